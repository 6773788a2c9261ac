"""Methods that put all leaves of a container into one storage, in memory or in a file."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import Tensor

from tensordict.core import torch_internals as internals
from tensordict.core.contract import Contract, identity
from tensordict.core.devices import as_device, put_on, wait_for
from tensordict.core.exceptions import UnsupportedEntryError
from tensordict.io.formats import consolidated
from tensordict.io.formats.consolidated import BlockPlan
from tensordict.io.remote.remote_saves import read_file
from tensordict.io.remote.uploads import write_file
from tensordict.io.saving import checksums
from tensordict.io.saving.leaf_writer import SaveOptions
from tensordict.io.saving.progress import hide_bars
from tensordict.looking.shown_entries import has_stored_leaves
from tensordict.memory import flat_buffers, system
from tensordict.memory.flat_buffers import Block, CopyPlan
from tensordict.memory.mapped import PathLike
from tensordict.ops.storing.leaves import Leaves
from tensordict.parallel.sharded import has_sharded_leaves, save_whole

if TYPE_CHECKING:
    from typing_extensions import Self, TypedDict, Unpack

    from tensordict.core.annotations import No, On
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

    SelfT = TypeVar("SelfT", bound="Consolidating")


_CPU = torch.device("cpu")


class Consolidating(Leaves):
    """The methods `consolidate`, `from_consolidated` and `is_consolidated`."""

    @overload
    def consolidate(
        self: SelfT, filename: PathLike | None = ..., *, return_early: No = ..., **options: Unpack[_ConsolidateOptions]
    ) -> SelfT: ...
    @overload
    def consolidate(
        self: SelfT, filename: PathLike | None = ..., *, return_early: On, **options: Unpack[_ConsolidateOptions]
    ) -> Future[SelfT]: ...
    def consolidate(
        self: SelfT,
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
    ) -> SelfT | Future[SelfT]:
        """Copy all leaves into one storage, which can be pickled and moved to a device as a whole.

        Example:
            >>> import pickle
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(a=torch.zeros(3), b={"c": torch.ones(2, dtype=torch.int8)}).consolidate()
            >>> td["a"].untyped_storage().data_ptr() == td["b", "c"].untyped_storage().data_ptr()
            True
            >>> pickle.loads(pickle.dumps(td)).is_consolidated(), td.to(torch.float16).is_consolidated()
            (True, False)

        Args:
            filename: put the storage in this file, or upload it to this URL. See below.
            num_threads: the number of threads that copy; 0 for the calling thread only.
            device: the device of the storage; by default the device of the container, or the CPU if it has no device.
            non_blocking: do not wait for copies to or from an accelerator.
            inplace: replace the leaves of this container, and return this container.
            return_early: with at least two threads, return a `concurrent.futures.Future` of the result. The tensors
                must not change until it is done. Not with `use_buffer` or `non_blocking`.
            use_buffer: with a file, collect the leaves in memory and write the file in one piece. The result keeps the
                leaves in memory, and writing to them does not change the file.
            share_memory: put the storage in shared memory.
            pin_memory: put the storage in pinned memory.
            metadata: accepted for compatibility, without effect.
            durable: with a file, wait until it has reached the disk before it replaces an older file.
            checksum: with a file, record a checksum of every tensor, for :func:`tensordict.verify`: `True` for CRC-32,
                or `"sha256"` or `"blake2b"`. Later writes to the leaves make it wrong.
            progress: with a file, show a progress bar (needs tqdm); by default on terminals and in notebooks,
                after a second.
            overwrite: with a file, replace any file, also one that is not a consolidated container.
            storage_options: for a URL, as in :meth:`memmap`.
            full_tensor: gather each `DTensor` leaf on all ranks of its device mesh, as :meth:`memmap` does. With a
                file, one rank writes it, and every rank returns the container that :func:`from_consolidated` loads.

        Returns:
            a new container with contiguous leaves, locked; on the CPU with a file. :meth:`is_consolidated` is true
            until it is unlocked. A container that is consolidated already is returned unchanged, unless `filename` is
            given.

        Raises:
            RuntimeError: with `inplace`, the container is locked or over a file; an entry has no content or cannot be
                stored (the error names it); this machine has no such memory; a file of another format exists, without
                `overwrite`; or another process or thread is saving to the file.
            OSError: the file cannot be written; an older file is unchanged.
            TransferError: with `full_tensor`, another rank failed, or the ranks have different leaves or paths.

        Gradients do not flow back through the copy. A tensor under two keys is copied once. Ragged tensors of the
        strided layout get a copy outside of the storage, because torch cannot place them in a part of a storage.

        With a file, the leaves map it: writing to them changes the file, and processes that receive them map it too.
        An older file is replaced in one step when the new one is complete; programs that have mapped the old one keep
        its data. With a URL, the leaves map the temporary file that was uploaded, and an existing file at the URL is
        replaced only with `overwrite=True`. :func:`from_consolidated` loads the file.
        """
        if filename is None and self.is_consolidated():
            return self
        if full_tensor and has_sharded_leaves(self):
            if inplace:
                raise ValueError("full_tensor=True returns a new container without DTensors: pass inplace=False")
            given: dict[str, Any] = {
                "num_threads": num_threads, "device": device, "non_blocking": non_blocking, "use_buffer": use_buffer,
                "share_memory": share_memory, "pin_memory": pin_memory, "durable": durable, "checksum": checksum,
                "progress": progress, "overwrite": overwrite, "storage_options": storage_options,
            }  # fmt: skip
            write = partial(type(self).consolidate, filename=filename, **given)
            load = partial(self.from_consolidated, filename or "", storage_options=storage_options)
            return save_whole(self, filename, return_early, write, load)  # type: ignore[no-any-return]
        in_file = has_stored_leaves(self)
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
        if return_early and num_threads > 1 and (use_buffer or non_blocking):
            raise UnsupportedEntryError("return_early cannot be combined with use_buffer or non_blocking")
        source = self
        if in_file and filename is None:
            source = self._dense() if self._members() is None else self._map(identity)
        run: Callable[[], tuple[list[Tensor], Tensor]]
        if filename is None:
            copies = CopyPlan(source, content=target.type != "meta")
            run = partial(_copy_to_storage, copies, target, num_threads, non_blocking, share_memory, pin_memory)
        else:
            target = _CPU
            options = SaveOptions(num_threads, durable, checksums.algorithm(checksum), progress, overwrite)
            write_plan = partial(_write_storage, BlockPlan(self), options, use_buffer)
            run = partial(write_file, filename, storage_options, overwrite, write_plan)
        new_device = target if filename is not None or (self._device is not None and self._device != target) else None

        def finish() -> Any:
            with hide_bars(progress):
                leaves, storage = run()
            return source._over_block(leaves, storage, new_device, inplace)

        if not return_early or num_threads < 2:
            return finish()  # type: ignore[no-any-return]
        pool = ThreadPoolExecutor(1, thread_name_prefix="tensordict-consolidate")
        future: Future[Any] = pool.submit(finish)
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
        """Return this container with other leaves, which all lie in `storage`; on `device`, if one is given."""
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
        """Move a consolidated container to another device with one copy of its storage.

        Returns `None` if the container is not consolidated, or has ragged leaves.
        """
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
        """Load a file that :meth:`consolidate` wrote.

        Example:
            >>> import tempfile
            >>> import torch
            >>> from tensordict import TensorDict
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     _ = TensorDict(a=torch.arange(3)).consolidate(folder + "/data")
            ...     again = TensorDict.from_consolidated(folder + "/data")
            >>> again["a"], again.is_consolidated()
            (tensor([0, 1, 2]), True)

        The file is mapped privately: it is read when a leaf is used, and writing to a leaf does not change it. All
        sizes are checked first, and nothing in the file is executed.

        Args:
            filename: the file or its URL. From a URL, the whole file is fetched.
            storage_options, cache_dir: for a URL, as in :meth:`load_memmap`.

        Returns:
            a consolidated container, locked if the container was locked before it was consolidated.

        Raises:
            OSError: the file cannot be read.
            SaveError: the file has another format or is broken; the error names the path and the entry.

        A process that receives the container maps the file too. It sees all earlier writes to the leaves; later writes
        of one process are not visible to the other. :meth:`share_memory_` copies the leaves to memory that both share.
        """
        return read_file(filename, storage_options, cache_dir, consolidated.load)  # type: ignore[no-any-return]

    def is_consolidated(self) -> bool:
        """Return whether all leaves lie in the one storage that :meth:`consolidate` made for them.

        This ends when an entry is added, replaced or deleted, and with :meth:`unlock_`. A copy is not consolidated.
        """
        return self._consolidated is not None and flat_buffers.is_whole(self._leaves(), self._consolidated)


def _copy_to_storage(
    copies: CopyPlan, device: torch.device, num_threads: int, non_blocking: bool, share: bool, pin: bool
) -> tuple[list[Tensor], Tensor]:
    """Copy the leaves into one storage in memory. Returns the copies and the storage."""
    nbytes = copies.layout.nbytes
    storage = _allocate_storage(nbytes, device, share, pin)
    if device.type == "meta":
        return copies.over(Block(storage)), storage
    if not storage.is_cpu and all(leaf.is_cpu for leaf in copies.leaves):
        # Collect the leaves on the CPU first: one large transfer is faster than many small ones.
        host = flat_buffers.new_bytes(nbytes)
        copies.layout.fill(Block(host), num_threads)
        storage.copy_(host, non_blocking)
    else:
        copies.layout.fill(Block(storage), num_threads, non_blocking)
    return copies.over(Block(storage)), storage


def _allocate_storage(nbytes: int, device: torch.device, share: bool, pin: bool) -> Tensor:
    if device.type != "cpu":
        if share or pin:
            raise ValueError(f"shared and pinned memory is on the CPU, but the storage would be on {device}")
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


def _write_storage(plan: BlockPlan, options: SaveOptions, buffer: bool, filename: PathLike) -> tuple[list[Any], Tensor]:
    """Write the leaves to a file. Returns leaves over the file (or over memory, with a buffer), and their storage."""
    storage = plan.write(filename, options, buffer)
    return plan.leaves(storage), storage
