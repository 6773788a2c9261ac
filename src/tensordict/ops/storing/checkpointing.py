"""State dicts, and the safetensors format: what containers share with modules, checkpoints and other programs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from tensordict.core.contract import Contract
from tensordict.core.devices import as_device
from tensordict.io.checkpoint import load_state
from tensordict.io.formats import safetensors
from tensordict.io.formats.loading import LoadOptions
from tensordict.io.remote.remote_saves import read_file
from tensordict.io.remote.uploads import write_file
from tensordict.io.saving import checksums
from tensordict.io.saving.leaf_writer import SaveOptions
from tensordict.io.saving.progress import hide_bars
from tensordict.io.states import StateWriter
from tensordict.memory.mapped import PathLike

if TYPE_CHECKING:
    from typing_extensions import Self

    from tensordict.io.remote.remote_saves import CacheDir
    from tensordict.io.remote.urls import StorageOptions


class Checkpointing(Contract):
    """`state_dict`, `load_state_dict`, `to_safetensors` and `from_safetensors`."""

    def state_dict(
        self,
        destination: MutableMapping[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        flatten: bool = True,
        *,
        values: bool = False,
    ) -> MutableMapping[str, Any]:
        """The tensors by name, as :meth:`torch.nn.Module.state_dict` gives those of a module.

        The attribute `_metadata` of the result has the batch size and the device of every container, the values that
        are no tensors, and what else :meth:`load_state_dict` needs. `torch.save` keeps it.

        Args:
            destination: a mapping to add them to; a new `OrderedDict` by default.
            prefix: put in front of all names.
            keep_vars: give the tensors as they are, and not detached from autograd.
            flatten: give one mapping, whose names have dots between the parts of nested keys. `False` gives mappings
                in a mapping.
            values: give the holders of values that are no tensors under their keys too, for what does not keep
                `_metadata` (:mod:`torch.distributed.checkpoint`).

        Returns:
            `destination`, or a new `OrderedDict`. The tensors share their memory with this container, but for those of
            a lazy stack, which are stacked. A lazy stack whose members differ gives the entries of each member.

        Raises:
            RuntimeError: two entries would have the same name, such as `"a.b"` and `("a", "b")`.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.zeros(2), "b": {"c": torch.ones(2)}}, [2])
            >>> list(td.state_dict()), list(td.state_dict(flatten=False)["b"])
            (['a', 'b.c'], ['c'])
            >>> td.state_dict()._metadata["b"]
            {'batch_size': torch.Size([2]), 'device': None}
        """
        if destination is None:
            destination = OrderedDict()
            destination._metadata = OrderedDict()  # type: ignore[attr-defined]
        StateWriter(keep_vars, flatten, values).write(self, destination, prefix)
        return destination

    def load_state_dict(
        self,
        state_dict: Mapping[str, object],
        strict: bool = True,
        assign: bool = False,
        from_flatten: bool | None = None,
    ) -> Self:
        """Load what :meth:`state_dict` gave, of this container or of one like it; a call that fails changes nothing.

        A container without entries takes over all that there is, whatever `strict` says. Batch sizes become those of
        the state dict.

        Args:
            state_dict: flat or nested, with or without `_metadata`.
            strict: refuse keys that are on one side only. `False` leaves what is missing as it is, and adds what is
                new.
            assign: put the tensors of the state dict in place of those of the container, in place of copying them
                into the memory that is there.
            from_flatten: whether the dots in the names of the state dict stand between the parts of nested keys;
                `None` decides by whether it has mappings in it.

        Returns:
            the same container. New entries share their memory with the state dict.

        Raises:
            RuntimeError: keys, shapes or kinds of entries do not fit; all of them are listed.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.zeros(2), "b": {"c": torch.ones(2)}}, [2])
            >>> other = td.clone().zero_().load_state_dict(td.state_dict())
            >>> other["b", "c"], TensorDict().load_state_dict(td.state_dict()).batch_size
            (tensor([1., 1.]), torch.Size([2]))
        """
        load_state(self, state_dict, strict, assign, from_flatten)
        return self

    def to_safetensors(
        self,
        filename: PathLike,
        *,
        separator: str = ".",
        num_threads: int = 0,
        durable: bool = False,
        checksum: bool | str = False,
        progress: bool | None = None,
        overwrite: bool = False,
        storage_options: StorageOptions | None = None,
    ) -> None:
        """Save to one file in the safetensors format, which programs in many languages read.

        A tensor is called by its nested key, with the separator between the parts. The kinds of containers, batch
        sizes, dim names and JSON values are kept in the header's metadata. Tensors that share memory are written each
        for itself; ragged ones as their elements and the sizes of their rows; those of dtypes that the format lacks
        (`complex128`, `complex32`, `float4_e2m1fn_x2`) as bytes, in one more dim.

        Args:
            filename: the file. A container saved there is replaced in one step: whoever has it loaded keeps it. Or a
                URL, where what is there is replaced with `overwrite=True` only.
            separator: stands between the parts of a nested key.
            num_threads: the number of threads that write; 0 for none but the calling one.
            durable: have the file survive a loss of power once this returns.
            checksum: record a checksum of every tensor, for :func:`tensordict.verify`: `True` for CRC-32, or
                `"sha256"` or `"blake2b"`.
            progress: show a progress bar (needs tqdm); by default on terminals and in notebooks, after a second.
            overwrite: replace a file that no container was saved to, as the model of another program, too.
            storage_options: of a URL, as in :meth:`memmap`.

        Raises:
            RuntimeError: there is such a file, two keys would be the same name, an entry cannot be stored (a value that
                JSON cannot hold, a sparse tensor, one on the meta device), or another process or thread is saving to
                the file; nothing has been written then.
            OSError: the file cannot be written; what was there before stays.

        Example:
            >>> import tempfile
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.zeros(2), "b": {"c": torch.ones(2)}, "note": "hello"}, [2])
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     td.to_safetensors(folder + "/td.safetensors")
            ...     again = TensorDict.from_safetensors(folder + "/td.safetensors")
            >>> again["b", "c"], again["note"], again.batch_size
            (tensor([1., 1.]), 'hello', torch.Size([2]))
        """
        options = SaveOptions(num_threads, durable, checksums.algorithm(checksum), progress, overwrite)
        with hide_bars(progress):
            write_file(
                filename, storage_options, overwrite, lambda path: safetensors.save(self, path, options, separator)
            )

    @classmethod
    def from_safetensors(
        cls,
        filename: PathLike,
        *,
        separator: str | None = ".",
        device: object = None,
        progress: bool | None = None,
        storage_options: StorageOptions | None = None,
        cache_dir: CacheDir | None = None,
    ) -> Self:
        """Load a safetensors file, of :meth:`to_safetensors` or of any other program.

        The file is mapped, and read where its tensors are used. The map is private: what is written into the tensors
        stays in memory, and the file as it is.

        Args:
            filename: the file, or its URL, from which it is fetched as a whole.
            separator: where the names of a file of another program are nested; `None` for nowhere. A file of this
                package knows its own.
            device: move the tensors there; they are on the CPU by default.
            progress: show a progress bar (needs tqdm); by default on terminals and in notebooks, after a second.
                Mapping the file takes no time; moving tensors does.
            storage_options, cache_dir: of a URL, as in :meth:`load_memmap`.

        Returns:
            the container that was saved, of its own kind; for a file of another program, a `TensorDict` without batch
            dims.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is no safetensors file, was cut off, or is of a tensorclass that this program has not
                defined.

        Example:
            >>> import tempfile
            >>> import torch
            >>> from tensordict import TensorDict
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     TensorDict({"a": {"b": torch.ones(2)}}).to_safetensors(folder + "/td.safetensors")
            ...     TensorDict.from_safetensors(folder + "/td.safetensors", device="meta")["a", "b"].device
            device(type='meta')
        """
        options = LoadOptions(None if device is None else as_device(device), shows=progress)
        with hide_bars(progress):
            return read_file(  # type: ignore[no-any-return]
                filename, storage_options, cache_dir, lambda path: safetensors.load(path, options, separator)
            )
