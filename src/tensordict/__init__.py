"""TensorDict: a container that holds many tensors under nested keys and behaves as one tensor."""

import gc as _gc
import importlib as _importlib
import typing as _typing

# No collection meanwhile: what is made here stays, and a look at all that torch has made takes as long as all the rest
# of this import (96 of 230 ms, see benchmarks/import_time.py).
_collects = _gc.isenabled()
_gc.disable()
try:
    from tensordict import llm as llm  # makes its records known to the loaders
    from tensordict.base import TensorDictBase
    from tensordict.compat import pickles as pickles  # makes itself known to torch.load
    from tensordict.containers.api import (
        append_memmap,
        from_any,
        from_arrow,
        from_consolidated,
        from_csv,
        from_dataclass,
        from_dict,
        from_h5,
        from_json,
        from_namedtuple,
        from_pandas,
        from_parquet,
        from_polars,
        from_pytree,
        from_safetensors,
        from_struct_array,
        from_tuple,
        from_zarr,
        fromkeys,
        load,
        load_memmap,
        make_tensordict,
        save,
        to_arrow,
        to_safetensors,
    )
    from tensordict.containers.checkpoints import load_checkpoint, save_checkpoint
    from tensordict.containers.concatenated import LazyConcatenatedTensorDict
    from tensordict.containers.lazy import LazyStackedTensorDict
    from tensordict.containers.nontensor import MetaData, NonTensorData, NonTensorDataBase, NonTensorStack
    from tensordict.containers.parsing import parse_tensor_dict_string
    from tensordict.containers.summary import Summary as Summary  # makes itself known
    from tensordict.containers.typed import TypedTensorDict
    from tensordict.containers.unbatched import UnbatchedTensor
    from tensordict.containers.view import LazyView
    from tensordict.core.dtypes import is_bool, is_floating, is_inexact, is_integer
    from tensordict.core.key_views import default_is_leaf, is_leaf_nontensor, is_non_tensor, is_tensor_collection
    from tensordict.core.keys import KEY_SEPARATOR, NestedKey, unravel_key, unravel_key_list, unravel_key_to_tuple
    from tensordict.core.settings import (
        capture_non_tensor_stack,
        get_defaults_to_none,
        kernel_memory_info,
        lazy_legacy,
        list_to_stack,
        set_capture_non_tensor_stack,
        set_get_defaults_to_none,
        set_kernel_memory_info,
        set_lazy_legacy,
        set_list_to_stack,
    )
    from tensordict.datasets import DatasetWriter, open_dataset
    from tensordict.functional import (
        cat,
        collate,
        dense_stack_tds,
        from_module,
        from_modules,
        group_by,
        is_batchedtensor,
        lazy_cat,
        lazy_stack,
        maybe_dense_stack,
        merge_tensordicts,
        pack_sequences,
        pad,
        pad_sequence,
        stack,
        unpack_sequences,
        unpad_sequence,
    )
    from tensordict.io.formats.archive import is_memmap_archive, pack_memmap, refresh_archive_checksums, unpack_memmap
    from tensordict.io.remote.cache import RemoteCache
    from tensordict.io.saving.save_diff import diff
    from tensordict.io.saving.verification import verify
    from tensordict.memmap import MemmapTensor, MemoryMappedTensor
    from tensordict.nn import TensorClassModuleBase, TensorClassModuleWrapper, TensorDictParams, as_tensordict_module
    from tensordict.ops.collection import TensorCollection
    from tensordict.ops.dims.packing import PackLayout
    from tensordict.ops.printing import get_printoptions, set_printoptions
    from tensordict.persistent import PersistentTensorDict
    from tensordict.tensorclass import TensorAttrs, TensorClass, is_tensorclass, tensorclass
    from tensordict.tensordict import TensorDict
    from tensordict.testing import assert_allclose_td, assert_close

    # isort: split
    from tensordict.containers.api import memmap  # after the module of this name
finally:
    if _collects:
        if not _gc.get_freeze_count():
            # All at once to the oldest generation: a look at what is new would be next, 20 ms.
            _gc.freeze()
            _gc.unfreeze()
        _gc.enable()

if _typing.TYPE_CHECKING:
    from tensordict import utils as utils
    from tensordict.containers.stacked_store import LazyStackedTensorDictStore as LazyStackedTensorDictStore
    from tensordict.containers.tensordict_store import TensorDictStore as TensorDictStore
else:

    def __getattr__(name: str) -> object:
        """Import what programs use after `import tensordict` alone, when they ask for it."""
        if name in ("store", "utils"):
            return _importlib.import_module(f"tensordict.{name}")
        if name in ("LazyStackedTensorDictStore", "TensorDictStore"):
            return getattr(_importlib.import_module("tensordict.store"), name)
        if name.startswith("PYTREE_REGISTERED_"):
            return getattr(_importlib.import_module("tensordict._pytree"), name)
        raise AttributeError(f"module 'tensordict' has no attribute {name!r}", name=name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


# Paths that pickles and a few programs know are in this folder, found as if they were here.
__path__.append(f"{__path__[0]}/compat/paths")

__version__ = "0.14.100"

__all__ = [
    "KEY_SEPARATOR",
    "DatasetWriter",
    "LazyConcatenatedTensorDict",
    "LazyStackedTensorDict",
    "LazyStackedTensorDictStore",
    "LazyView",
    "MemmapTensor",
    "MemoryMappedTensor",
    "MetaData",
    "NestedKey",
    "NonTensorData",
    "NonTensorDataBase",
    "NonTensorStack",
    "PackLayout",
    "PersistentTensorDict",
    "RemoteCache",
    "TensorAttrs",
    "TensorClass",
    "TensorClassModuleBase",
    "TensorClassModuleWrapper",
    "TensorCollection",
    "TensorDict",
    "TensorDictBase",
    "TensorDictParams",
    "TensorDictStore",
    "TypedTensorDict",
    "UnbatchedTensor",
    "append_memmap",
    "as_tensordict_module",
    "assert_allclose_td",
    "assert_close",
    "capture_non_tensor_stack",
    "cat",
    "collate",
    "default_is_leaf",
    "dense_stack_tds",
    "diff",
    "from_any",
    "from_arrow",
    "from_consolidated",
    "from_csv",
    "from_dataclass",
    "from_dict",
    "from_h5",
    "from_json",
    "from_module",
    "from_modules",
    "from_namedtuple",
    "from_pandas",
    "from_parquet",
    "from_polars",
    "from_pytree",
    "from_safetensors",
    "from_struct_array",
    "from_tuple",
    "from_zarr",
    "fromkeys",
    "get_defaults_to_none",
    "get_printoptions",
    "group_by",
    "is_batchedtensor",
    "is_bool",
    "is_floating",
    "is_inexact",
    "is_integer",
    "is_leaf_nontensor",
    "is_memmap_archive",
    "is_non_tensor",
    "is_tensor_collection",
    "is_tensorclass",
    "kernel_memory_info",
    "lazy_cat",
    "lazy_legacy",
    "lazy_stack",
    "list_to_stack",
    "load",
    "load_checkpoint",
    "load_memmap",
    "make_tensordict",
    "maybe_dense_stack",
    "memmap",
    "merge_tensordicts",
    "open_dataset",
    "pack_memmap",
    "pack_sequences",
    "pad",
    "pad_sequence",
    "parse_tensor_dict_string",
    "refresh_archive_checksums",
    "save",
    "save_checkpoint",
    "set_capture_non_tensor_stack",
    "set_get_defaults_to_none",
    "set_kernel_memory_info",
    "set_lazy_legacy",
    "set_list_to_stack",
    "set_printoptions",
    "stack",
    "tensorclass",
    "to_arrow",
    "to_safetensors",
    "unpack_memmap",
    "unpack_sequences",
    "unpad_sequence",
    "unravel_key",
    "unravel_key_list",
    "unravel_key_to_tuple",
    "verify",
]
