"""Consolidating: all leaves of a container in one piece of memory, or in one file."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from tensordict.core import torch_internals as internals
from tensordict.core.contract import Contract
from tensordict.core.devices import as_device, put_on, wait_for
from tensordict.core.exceptions import UnsupportedEntryError
from tensordict.io.formats import consolidated
from tensordict.io.formats.consolidated import BlockPlan
from tensordict.io.remote.remote_saves import read_file
from tensordict.io.remote.uploads import write_file
from tensordict.io.saving import checksums
from tensordict.io.saving.leaf_writer import SaveOptions
from tensordict.io.saving.progress import hide_bars
from tensordict.memory import flat_buffers, system
from tensordict.memory.flat_buffers import Block, Copies
from tensordict.memory.mapped import PathLike
from tensordict.ops.storing.leaves import Leaves
from tensordict.parallel.sharded import holds_sharded, save_whole

if TYPE_CHECKING:
    from typing_extensions import Self, TypedDict, Unpack

    from tensordict.io.remote.remote_saves import CacheDir
    from tensordict.io.remote.urls import StorageOptions

    class _ConsolidateOptions(TypedDict, total=False):
        num_threads: int
        device: object
        non_blocking: bool
        inplace: bool
        use_buffer: bool
        share_memory: bool
        pin_memory: bool
        metadata: bool
        durable: bool
        checksum: bool | str
        progress: bool | None
        overwrite: bool
        storage_options: StorageOptions | None
        full_tensor: bool


_CPU = torch.device("cpu")


class Consolidating(Leaves):
    """`consolidate`, and its way back from a file."""

    @overload
    def consolidate(
        self,
        filename: PathLike | None = ...,
        *,
        return_early: Literal[False] = ...,
        **options: Unpack[_ConsolidateOptions],
    ) -> Self: ...
    @overload
    def consolidate(
        self, filename: PathLike | None = ..., *, return_early: Literal[True], **options: Unpack[_ConsolidateOptions]
    ) -> Future[Self]: ...
    def consolidate(
        self,
        filename: PathLike | None = None,
        *,
        num_threads: int = 0,
        device: object = None,
        non_blocking: bool = False,
        inplace: bool = False,
        return_early: bool = False,
        use_buffer: bool = False,
        share_memory: bool = False,
        pin_memory: bool = False,
        metadata: bool = False,
        durable: bool = False,
        checksum: bool | str = False,
        progress: bool | None = None,
        overwrite: bool = False,
        storage_options: StorageOptions | None = None,
        full_tensor: bool = False,
    ) -> Self | Future[Self]:
        """The same container with all leaves side by side in one storage, which is pickled and moved as a whole.

        Every leaf is copied once and is contiguous then. Gradients do not flow back through the copy. A tensor that
        is found under two keys has one place. Ragged tensors of the strided layout are copied apart: torch has none
        over a part of a storage.

        Args:
            filename: put the storage in this file. One that is there is replaced in one step when all of the new one
                is there: who has the old one mapped keeps it. The leaves map the file, and what is written to them is
                written to it; processes that they are sent to map it too. :func:`from_consolidated` reads it back.
                To a URL a temporary file is uploaded, which the leaves map from then on; what is there is replaced
                with `overwrite=True` only.
            num_threads: the number of threads that copy; 0 for none but the calling one.
            device: the device of the storage; that of the container by default, and the CPU if it has none.
            non_blocking: do not wait for copies to or from an accelerator.
            inplace: replace the leaves of this container, which then is the result.
            return_early: with at least two threads, return a `concurrent.futures.Future` of the result. The tensors
                must not change until it is done.
            use_buffer: with a file, collect the leaves in memory and write them from there in one piece. The leaves of
                the result are those in memory, and what is written to them does not reach the file.
            share_memory: put the storage in shared memory.
            pin_memory: put the storage in pinned memory.
            metadata: accepted for compatibility: what a pickle needs besides the storage is found when it is made.
            durable: with a file, have it reach the disk before it takes the place of the old one.
            checksum: with a file, record a checksum of every tensor, for :func:`tensordict.verify`: `True` for CRC-32,
                or `"sha256"` or `"blake2b"`. Writing to the leaves later makes it wrong.
            progress: with a file, show a progress bar (needs tqdm); by default on terminals and in notebooks,
                after a second.
            overwrite: with a file, replace one that is no consolidated container, too.
            storage_options: of a URL, as in :meth:`memmap`.
            full_tensor: gather each `DTensor` leaf on all ranks of its device mesh, as :meth:`memmap` does. With a
                file, one rank writes it, and the result is what :func:`from_consolidated` gives on every rank.

        Returns:
            a new container, locked, for which :meth:`is_consolidated` holds until it is unlocked; with a file, on the
            CPU. This container itself if it is consolidated already and no `filename` is given.

        Raises:
            RuntimeError: the container has to be changed in place and is locked or over a file, an entry has no content
                or cannot be stored (it is named), there is no such memory here, or there is a file of another kind, or
                another process or thread is saving to it.
            OSError: the file cannot be written; what was there before stays.
            TransferError: with `full_tensor`, another rank failed, or the ranks have different leaves or paths.

        Example:
            >>> import pickle
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(a=torch.zeros(3), b={"c": torch.ones(2, dtype=torch.int8)}).consolidate()
            >>> td["a"].untyped_storage().data_ptr() == td["b", "c"].untyped_storage().data_ptr()
            True
            >>> pickle.loads(pickle.dumps(td)).is_consolidated(), td.to(torch.float16).is_consolidated()
            (True, False)
        """
        if filename is None and self.is_consolidated():
            return self
        if full_tensor and holds_sharded(self):
            if inplace:
                raise ValueError("full_tensor=True gives a new container, without the DTensors: not with inplace")
            given: dict[str, Any] = {
                "num_threads": num_threads, "device": device, "non_blocking": non_blocking, "use_buffer": use_buffer,
                "share_memory": share_memory, "pin_memory": pin_memory, "durable": durable, "checksum": checksum,
                "progress": progress, "overwrite": overwrite, "storage_options": storage_options,
            }  # fmt: skip
            write = partial(type(self).consolidate, filename=filename, **given)
            load = partial(self.from_consolidated, filename or "", storage_options=storage_options)
            return save_whole(self, filename, return_early, write, load)  # type: ignore[no-any-return]
        in_file = self._wrapped_container()._is_in_file
        if in_file and inplace:
            raise UnsupportedEntryError(
                "a container over a file, or over other containers, cannot be consolidated in place; inplace=False can"
            )
        if inplace:
            self._refuse_if_locked("replace its leaves")
        target = _CPU if self._device is None else self._device
        if device is not None:
            target = as_device(device)
        if filename is not None and device is not None and target.type != "cpu":
            raise ValueError(f"a file is mapped on the CPU: pass filename or device={str(device)!r}, not both")
        if filename is None and (checksum or progress):
            raise ValueError("checksum and progress are for a file: pass filename too")
        if return_early and (use_buffer or non_blocking):
            raise ValueError("return_early is not to be had together with use_buffer or non_blocking")
        source = self._dense() if in_file and filename is None else self
        run: Callable[[], tuple[list[Tensor], Tensor]]
        if filename is None:
            copies = Copies(source, content=target.type != "meta")
            run = partial(_copied, copies, target, num_threads, non_blocking, share_memory, pin_memory)
        else:
            target = _CPU
            options = SaveOptions(num_threads, durable, checksums.algorithm(checksum), progress, overwrite)
            written = partial(_written, BlockPlan(self), options, use_buffer)
            run = partial(write_file, filename, storage_options, overwrite, written)
        moved = target if filename is not None or (self._device is not None and self._device != target) else None

        def finished() -> Any:
            with hide_bars(progress):
                leaves, storage = run()
            return source._over_block(leaves, storage, moved, inplace)

        if not return_early or num_threads < 2:
            return finished()  # type: ignore[no-any-return]
        pool = ThreadPoolExecutor(1, thread_name_prefix="tensordict-consolidate")
        future: Future[Any] = pool.submit(finished)
        pool.shutdown(wait=False)
        return future

    def _over_block(
        self,
        leaves: list[Tensor],
        storage: Tensor,
        device: torch.device | None = None,
        inplace: bool = False,
        lock: bool = True,
    ) -> Self:
        """This container with other leaves, all of a storage, and with a `device` if it is given one."""
        found = iter(leaves)
        if device is None:
            result = self._rebuilt(found)
        else:
            result = self._place_on(
                lambda leaf: leaf._rebuilt(found) if isinstance(leaf, Contract) else next(found), device
            )
        if inplace:
            result = self._replace_leaves(result)
        if lock:
            result._lock_tree()
        result._consolidated = (storage, len(leaves))
        return result

    def _moved_whole(self, device: torch.device, non_blocking: bool) -> Self | None:
        """This container on another device, by one copy of its storage; `None` when that is not all there is to do."""
        leaves = self._leaves()
        if not flat_buffers.is_whole(leaves, self._consolidated) or any(leaf.is_nested for leaf in leaves):
            return None
        assert self._consolidated is not None
        block = Block(put_on(self._consolidated[0], device, non_blocking=True))
        if not non_blocking:
            wait_for((device, self._consolidated[0].device))
        moved = [
            block.tensor(leaf.dtype, leaf.shape, leaf.storage_offset() * leaf.itemsize, leaf.stride())
            for leaf in leaves
        ]
        return self._over_block(moved, block.storage, device, lock=self._locked)

    @classmethod
    def from_consolidated(
        cls,
        filename: PathLike,
        *,
        storage_options: StorageOptions | None = None,
        cache_dir: CacheDir | None = None,
    ) -> Self:
        """The container in a file that :meth:`consolidate` wrote.

        The file is mapped: nothing is read until it is used. What is written to the leaves does not reach the file.
        A process that the container is sent to maps the file as well, finds what has been written to the leaves so far,
        and writes to pages of its own; :meth:`share_memory_` copies the content to memory that both see. All sizes are
        checked first, and nothing in the file is executed.

        Args:
            filename: the file, or its URL, from which it is fetched as a whole.
            storage_options, cache_dir: of a URL, as in :meth:`load_memmap`.

        Returns:
            a consolidated container, locked if the one that was written was locked before.

        Raises:
            OSError: the file cannot be read.
            SaveError: it is of another format, or broken; the path and the entry are named.

        Example:
            >>> import tempfile
            >>> import torch
            >>> from tensordict import TensorDict
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     _ = TensorDict(a=torch.arange(3)).consolidate(folder + "/data")
            ...     again = TensorDict.from_consolidated(folder + "/data")
            >>> again["a"], again.is_consolidated()
            (tensor([0, 1, 2]), True)
        """
        return read_file(filename, storage_options, cache_dir, consolidated.load)  # type: ignore[no-any-return]

    def is_consolidated(self) -> bool:
        """Whether all leaves lie in the one storage that :meth:`consolidate` made for them.

        It ends when an entry is added, replaced or deleted, and with :meth:`unlock_`; a copy is not consolidated.
        """
        return self._consolidated is not None and flat_buffers.is_whole(self._leaves(), self._consolidated)


def _copied(
    copies: Copies, device: torch.device, num_threads: int, non_blocking: bool, share: bool, pin: bool
) -> tuple[list[Tensor], Tensor]:
    """The leaves, copied into one storage in memory, and this storage."""
    nbytes = copies.layout.nbytes
    storage = _allocated(nbytes, device, share, pin)
    if device.type == "meta":
        return copies.over(Block(storage)), storage
    if not storage.is_cpu and all(leaf.is_cpu for leaf in copies.leaves):
        # One large transfer in the place of many small ones.
        host = flat_buffers.new_bytes(nbytes)
        copies.layout.fill(Block(host), num_threads)
        storage.copy_(host, non_blocking)
    else:
        copies.layout.fill(Block(storage), num_threads, non_blocking)
    return copies.over(Block(storage)), storage


def _allocated(nbytes: int, device: torch.device, share: bool, pin: bool) -> Tensor:
    if device.type != "cpu":
        if share or pin:
            raise ValueError(f"shared and pinned memory is on the CPU, and the storage is to be on {device}")
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    if pin:
        return torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=True)
    if share and nbytes:
        try:
            shared = internals.new_shared_storage(nbytes)
        except RuntimeError as error:
            raise system.explain_shared_memory(error) from error
        return torch.empty(0, dtype=torch.uint8, device=device).set_(shared)
    return flat_buffers.new_bytes(nbytes)


def _written(plan: BlockPlan, options: SaveOptions, buffer: bool, filename: PathLike) -> tuple[list[Any], Tensor]:
    """The leaves over the file that they were written to (or over memory, with a buffer), and their storage."""
    storage = plan.write(filename, options, buffer)
    return plan.leaves(storage), storage
