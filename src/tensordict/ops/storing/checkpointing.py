"""Methods for checkpoints that other programs read: state dicts as of `nn.Module`, and safetensors files."""

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
    """The methods `state_dict`, `load_state_dict`, `to_safetensors` and `from_safetensors`."""

    def state_dict(
        self,
        destination: MutableMapping[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        flatten: bool = True,
        *,
        values: bool = False,
    ) -> MutableMapping[str, Any]:
        """Return the tensors by name, as :meth:`torch.nn.Module.state_dict` does for a module.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.zeros(2), "b": {"c": torch.ones(2)}}, [2])
            >>> list(td.state_dict()), list(td.state_dict(flatten=False)["b"])
            (['a', 'b.c'], ['c'])
            >>> td.state_dict()._metadata["b"]
            {'batch_size': torch.Size([2]), 'device': None}

        The result has an attribute `_metadata` with the batch size and the device of every container, the values, and
        other data for :meth:`load_state_dict`. `torch.save` keeps it.

        Args:
            destination: a mapping to add the tensors to; a new `OrderedDict` by default.
            prefix: text in front of all names.
            keep_vars: do not detach the tensors from autograd.
            flatten: return one mapping, with dots between the parts of nested keys. `False` returns nested mappings.
            values: add the holders of values under their keys, for programs that do not keep `_metadata`
                (:mod:`torch.distributed.checkpoint`).

        Returns:
            `destination`, or a new `OrderedDict`. The tensors share their memory with this container; the leaves of a
            lazy stack are stacked, which copies them. A lazy stack with different members gives the entries of each
            member.

        Raises:
            RuntimeError: two entries would have the same name, such as `"a.b"` and `("a", "b")`.
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
        """Load a state dict of this container or of a similar one, as :meth:`state_dict` returns it.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.zeros(2), "b": {"c": torch.ones(2)}}, [2])
            >>> other = td.clone().zero_().load_state_dict(td.state_dict())
            >>> other["b", "c"], TensorDict().load_state_dict(td.state_dict()).batch_size
            (tensor([1., 1.]), torch.Size([2]))

        The batch sizes change to the batch sizes in the state dict. A call that fails changes nothing.

        Args:
            state_dict: flat or nested, with or without `_metadata`.
            strict: raise an error for keys that only one side has. `False` keeps the entries that the state dict does
                not have, and adds new ones. A container without entries always takes all of them.
            assign: replace the entries by the tensors of the state dict, instead of copying into them.
            from_flatten: `True` if the dots in the names separate the parts of nested keys. `None` assumes this unless
                the state dict contains mappings.

        Returns:
            the same container. New entries share their memory with the state dict.

        Raises:
            RuntimeError: keys, shapes or kinds of entries do not fit; the error lists all of them.
        """
        load_state(self, state_dict, strict, assign, from_flatten)
        return self

    def to_safetensors(
        self,
        path: PathLike,
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

        Args:
            path: the file, or a URL. An older save of a container is replaced in one step; programs that have
                loaded it keep their data. At a URL, an existing file is replaced only with `overwrite=True`.
            separator: the text between the parts of a nested key in the name of a tensor.
            num_threads: the number of threads that write; 0 for the calling thread only.
            durable: wait until the file has reached the disk, so that it survives a loss of power.
            checksum: record a checksum of every tensor, for :func:`tensordict.verify`: `True` for CRC-32, or
                `"sha256"` or `"blake2b"`.
            progress: show a progress bar (needs tqdm); by default on terminals and in notebooks, after a second.
            overwrite: replace any file, also one of another program, such as a model.
            storage_options: for a URL, as in :meth:`memmap`.

        Raises:
            RuntimeError: a file of another program exists, without `overwrite`; two keys give the same name; an entry
                cannot be stored (a value that JSON cannot hold, a sparse tensor, one on the meta device); or another
                process or thread is saving to the file. Nothing has been written.
            OSError: the file cannot be written; an older file is unchanged.

        The metadata in the header keeps the kinds of containers, batch sizes, dim names and values. Tensors that share
        memory are written separately. A ragged tensor is written as its elements and the sizes of its rows. Tensors of
        dtypes that the format does not have (`complex128`, `complex32`, `float4_e2m1fn_x2`) are written as bytes, with
        one more dim.
        """
        options = SaveOptions(num_threads, durable, checksums.algorithm(checksum), progress, overwrite)
        with hide_bars(progress):
            write_file(path, storage_options, overwrite, lambda path: safetensors.save(self, path, options, separator))

    @classmethod
    def from_safetensors(
        cls,
        path: PathLike,
        *,
        separator: str | None = ".",
        device: object = None,
        progress: bool | None = None,
        storage_options: StorageOptions | None = None,
        cache_dir: CacheDir | None = None,
    ) -> Self:
        """Load a safetensors file of :meth:`to_safetensors` or of another program.

        Example:
            >>> import tempfile
            >>> import torch
            >>> from tensordict import TensorDict
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     TensorDict({"a": {"b": torch.ones(2)}}).to_safetensors(folder + "/td.safetensors")
            ...     TensorDict.from_safetensors(folder + "/td.safetensors", device="meta")["a", "b"].device
            device(type='meta')

        The file is mapped privately: it is read when a tensor is used, and writing into a tensor does not change it.

        Args:
            path: the file or its URL. From a URL, the whole file is fetched.
            separator: splits the names in a file of another program into nested keys; `None` does not split them. A
                file of :meth:`to_safetensors` contains its separator.
            device: move the tensors there; they are on the CPU by default.
            progress: show a progress bar (needs tqdm) while tensors are moved; by default on terminals and in
                notebooks, after a second.
            storage_options, cache_dir: for a URL, as in :meth:`load_memmap`.

        Returns:
            a container of the class that was saved; for a file of another program, a `TensorDict` without batch dims.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is not a safetensors file, is truncated, or contains a tensorclass that this program
                has not defined.
        """
        options = LoadOptions(None if device is None else as_device(device), shows=progress)
        with hide_bars(progress):
            return read_file(  # type: ignore[no-any-return]
                path, storage_options, cache_dir, lambda path: safetensors.load(path, options, separator)
            )
