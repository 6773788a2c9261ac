"""All private names of torch that this package uses, each with a substitute; no other module names one.

Because of the substitutes, the package can be imported on a torch that lacks a name. A substitute is slower, or raises
an error that names the missing feature. :data:`LACKING` lists the losses on the installed torch. Private members that
subclasses may use, such as `_parameters` of a module, are not collected here.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

OnLists = Callable[..., Any]

# The private names that the installed torch lacks, each with the feature that is slower or missing.
LACKING: dict[str, str] = {}

_HAVE_ALL = "torch 2.11 to 2.15 have it"


def _take(path: str, instead: Any, lost: str) -> Any:
    """Return the object at a dotted path in torch. If torch lacks it, record the loss and return `instead`."""
    found: Any = torch
    prefix = "torch"
    for name in path.split(".")[1:]:
        prefix = f"{prefix}.{name}"
        if not hasattr(found, name):
            try:
                import_module(prefix)
            except ImportError:
                LACKING[path] = lost
                return instead
        found = getattr(found, name)
    return found


def _need(path: str, feature: str) -> Any:
    """Return the object at a dotted path in torch, or a function that raises an error naming the missing feature."""

    def refuse(*args: object, **kwargs: object) -> Any:
        raise RuntimeError(f"{feature} needs {path}, which torch {torch.__version__} does not have; {_HAVE_ALL}")

    return _take(path, refuse, f"missing: {feature}")


# --- calls on lists of tensors ----------------------------------------------------------------------------------------


def _on_lists(name: str) -> OnLists:
    """Return `torch._foreach_NAME`. If torch lacks it, return a function that raises a `TypeError`.

    `foreach.results` and `foreach.write` catch this error, and call the leaves one by one.
    """

    def refuse(*args: object, **kwargs: object) -> Any:
        raise TypeError(f"torch {torch.__version__} has no _foreach_{name}")

    return _take(f"torch._foreach_{name}", refuse, f"slower: {name} is a call for each leaf")  # type: ignore[no-any-return]


def _clone_each(leaves: Sequence[Tensor]) -> list[Tensor]:
    return [leaf.clone() for leaf in leaves]


def _copy_each(targets: Sequence[Tensor], values: Sequence[Tensor], non_blocking: bool = False) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(value, non_blocking)


def _zero_each(leaves: Sequence[Tensor]) -> None:
    for leaf in leaves:
        leaf.zero_()


# Torch 2.11 lacks this call.
foreach_clone: OnLists = _take("torch._foreach_clone", _clone_each, "slower: cloning takes 1.2 us a leaf, not 0.9")
foreach_copy_: OnLists = _take("torch._foreach_copy_", _copy_each, "slower: copying is a call for each leaf")
foreach_zero_: OnLists = _take("torch._foreach_zero_", _zero_each, "slower: zeroing gradients is a call for each leaf")
# The functions that torch has for lists of tensors, also in place, as `torch._foreach_abs` and `torch._foreach_abs_`.
_NAMES = """
    abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min cos cosh div erf erfc exp expm1 floor frac lerp
    lgamma log log10 log1p log2 maximum minimum mul neg pow reciprocal round sigmoid sign sin sinh sqrt sub tan tanh
    trunc
"""
# The calls by name: `on_lists["add"]` is `torch._foreach_add`.
on_lists: dict[str, OnLists] = {
    name: _on_lists(name) for name in ("max", "norm", *_NAMES.split(), *[f"{name}_" for name in _NAMES.split()])
}

# Concatenates the elements of all tensors in a list.
flatten_dense_tensors: Callable[[list[Tensor]], Tensor] = _take(
    "torch._C._nn.flatten_dense_tensors",
    lambda leaves: torch.cat([leaf.flatten() for leaf in leaves]),
    "slower: reductions to one number over all leaves",
)
# Takes the tensors, batch_first, the padding and its side. torch.nn.utils.rnn.pad_sequence would check them again.
pad_sequence: Callable[[list[Tensor], bool, float, str], Tensor] = _take(
    "torch._C._nn.pad_sequence", torch.nn.utils.rnn.pad_sequence, "slower: pad_sequence of containers"
)

# --- autograd ---------------------------------------------------------------------------------------------------------


def _find_requires_grad(*operands: Any) -> bool:
    return any([one.requires_grad if isinstance(one, Tensor) else _find_requires_grad(*one) for one in operands])  # noqa: C419


# Returns True if autograd records operations on one of its arguments, which are tensors or lists of tensors.
any_requires_grad: Callable[..., bool] = _take(
    "torch._C._any_requires_grad", _find_requires_grad, "slower: writes into leaves while gradients are recorded"
)


def base_of(tensor: Tensor) -> Tensor | None:
    """Return the tensor that a view was made from. Without `_base`, writes into views of graph leaves fail late."""
    return getattr(tensor, "_base", None)


is_view: Callable[[Tensor], bool] = _take(
    "torch.Tensor._is_view", lambda tensor: False, "missing: views of mapped tensors are plain tensors"
)


def version_of(tensor: Tensor) -> object:
    """Return a number that changes with each write into a tensor. Without `_version`, an object equal to no other."""
    return getattr(tensor, "_version", object())


# Returns 1 if several elements of a tensor share memory, 0 if none do, 2 if torch cannot tell.
internal_overlap: Callable[[Tensor], int] = _take(
    "torch._debug_has_internal_overlap", lambda tensor: 2, "missing: errors of overlapping leaves name no entry"
)
is_all_true: Callable[[Tensor], Any] = _take("torch._is_all_true", torch.all, "slower: checks of TruncatedNormal")

# --- subclasses of tensors --------------------------------------------------------------------------------------------

# A block that treats tensor subclasses as plain tensors.
as_plain: Callable[[], contextlib.AbstractContextManager[Any]] = _need(
    "torch._C.DisableTorchFunctionSubclass",
    "calling torch's functions on unbatched tensors, on tensors in stores or out=",
)
make_wrapper: Callable[..., Any] = _need(
    "torch.Tensor._make_wrapper_subclass", "reading tensors in HDF5, Zarr or Redis"
)

make_subclass: Callable[..., Any] = _need("torch.Tensor._make_subclass", "stacking lazy modules")


def _has_dispatch(tensor: Tensor) -> bool:
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


# Returns True for a tensor that consists of other tensors.
is_wrapper: Callable[[Tensor], bool] = _take(
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass",
    _has_dispatch,
    "missing: reports take every tensor with a dispatch of its own for one that consists of others",
)
# The operation that changes the device and dtype of a tensor.
aten_to_copy: Any = _take(
    "torch.ops.aten._to_copy.default", None, "slower: tensors in stores are read to change device"
)


class _NoFakeTensor:
    """A substitute for the class of fake tensors in a torch without it."""


if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
else:
    FakeTensor = _take(
        "torch._subclasses.fake_tensor.FakeTensor", _NoFakeTensor, "missing: fake tensors are not told from others"
    )
    FakeTensorMode = _need("torch._subclasses.fake_tensor.FakeTensorMode", "reading back printed fake tensors")

# --- storages ---------------------------------------------------------------------------------------------------------


def untyped_storage(storage: torch.TypedStorage) -> torch.UntypedStorage:
    """Return the untyped storage of a typed one. Without `_untyped_storage`, torch warns about typed storages."""
    found: torch.UntypedStorage | None = getattr(storage, "_untyped_storage", None)
    return storage.untyped() if found is None else found  # type: ignore[no-untyped-call]


def _share_anew(nbytes: int) -> torch.UntypedStorage:
    return torch.UntypedStorage(nbytes).share_memory_()  # type: ignore[no-untyped-call, no-any-return]


new_shared_storage: Callable[[int], torch.UntypedStorage] = _take(
    "torch.UntypedStorage._new_shared", _share_anew, "slower: shared memory is allocated twice"
)
new_shared_storage_over: Callable[[int, int], torch.UntypedStorage] = _need(
    "torch.UntypedStorage._new_shared_fd_cpu", "mapping a file that other processes are to share"
)
# Returns the file descriptor of a shared storage, which torch keeps, and its size in bytes.
share_descriptor: Callable[[torch.UntypedStorage], tuple[int, int]] = _need(
    "torch.UntypedStorage._share_fd_cpu_", "handing shared memory to another process"
)
# Returns a number that is equal for two Python objects of the same storage.
storage_id: Callable[[torch.UntypedStorage], int] = (
    attrgetter("_cdata")
    if _take("torch.UntypedStorage._cdata", None, "missing: storages are told apart by their addresses")
    else torch.UntypedStorage.data_ptr
)

# --- ragged tensors ---------------------------------------------------------------------------------------------------


def _sizes_of_rows(leaf: Tensor) -> Tensor:
    return torch.tensor([list(row.shape) for row in leaf.unbind()])


def _nested_of_rows(buffer: Tensor, sizes: Tensor, strides: Tensor, offsets: Tensor) -> Tensor:
    rows = [
        buffer[at : at + size.prod()].view(*size.tolist()) for at, size in zip(offsets.tolist(), sizes, strict=True)
    ]
    return torch.nested.as_nested_tensor(rows)


# Returns the shapes of the rows of a strided nested tensor, as a table.
nested_sizes: Callable[[Tensor], Tensor] = _take(
    "torch.Tensor._nested_tensor_size", _sizes_of_rows, "slower: shapes of ragged leaves of the strided layout"
)
# Builds a nested tensor from a flat buffer, and the sizes, strides and offsets of its rows.
nested_from_buffer: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = _take(
    "torch._nested_view_from_buffer", _nested_of_rows, "slower: ragged leaves of the strided layout are copied"
)


def jagged_dim(leaf: Tensor) -> int:
    """Return the ragged dim of a jagged tensor. Without `_ragged_idx`, the dim whose length is not an int."""
    found: int | None = getattr(leaf, "_ragged_idx", None)
    return [type(length) is int for length in leaf.shape].index(False) if found is None else found


# --- the notice of the first jagged tensor ----------------------------------------------------------------------------

_TRACING_LOGGER = "torch.fx._symbolic_trace"
# Empty once torch has had its chance to log the notice, which it does once in a process.
_unsaid = ["is_fx_tracing will return true"]


def nest_jagged(
    values: Tensor, offsets: Tensor, lengths: Tensor | None = None, jagged_dim: int | None = None
) -> Tensor:
    """Call `torch.nested.nested_tensor_from_jagged`, without the notice that torch logs about its own code.

    Torch calls a function there whose first call logs that it should not be called. Other messages are logged.
    """
    if torch.compiler.is_compiling() or not _unsaid:
        return torch.nested.nested_tensor_from_jagged(values, offsets, lengths, jagged_dim)
    logger, notice = logging.getLogger(_TRACING_LOGGER), _unsaid[0]

    def keep(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(notice)

    logger.addFilter(keep)
    try:
        return torch.nested.nested_tensor_from_jagged(values, offsets, lengths, jagged_dim)
    finally:
        logger.removeFilter(keep)
        _unsaid.clear()


# --- transformations of torch.func ------------------------------------------------------------------------------------

_UNSEEN = "missing: containers inside functions of torch.func"

is_batched: Callable[[Tensor], bool] = _take("torch._C._functorch.is_batchedtensor", lambda tensor: False, _UNSEEN)


def count_writes(leaf: Tensor) -> int | None:
    """Return how often a tensor was written in place, or `None` where torch does not count.

    It does not count in compiled code, in inference mode, and for tensors that an outer `vmap` maps.
    """
    if torch.compiler.is_compiling() or leaf.is_inference() or is_batched(leaf):
        return None
    count: int | None = getattr(leaf, "_version", None)
    return count


is_transformed: Callable[[Tensor], bool] = _take(
    "torch._C._functorch.is_functorch_wrapped_tensor", lambda tensor: False, _UNSEEN
)
get_unwrapped: Callable[[Tensor], Tensor] = _take("torch._C._functorch.get_unwrapped", lambda tensor: tensor, _UNSEEN)
# Returns the dim of a batched tensor that `torch.vmap` maps over.
get_mapped_dim: Callable[[Tensor], int] = _need(
    "torch._C._functorch.maybe_get_bdim", "the first call of stacked lazy modules"
)
# A block that suspends the innermost transformation.
leave_transform: Callable[[], contextlib.AbstractContextManager[Any]] = _need(
    "torch._functorch.pyfunctorch.temporarily_pop_interpreter_stack", "the first call of stacked lazy modules"
)
# Returns the innermost active transformation. Dynamo does not support this function.
innermost: Callable[[], object] = _take("torch._C._functorch.peek_interpreter_stack", lambda: None, _UNSEEN)


def _is_any_at_work() -> bool:
    return torch.compiler.is_compiling() or innermost() is not None


# Returns whether a transformation of `torch.func` is active. Dynamo knows this for the code that it traces.
transforms_active: Callable[[], bool] = _take(
    "torch._C._are_functorch_transforms_active", _is_any_at_work, "slower: compiled code calls leaves one by one"
)

_EXPORTING_AT_IMPORT: bool | None = _take(
    "torch.compiler._is_exporting_flag", None, "missing: gradients of swapped tensors in compiled code"
)


def is_exporting() -> bool:
    """Return whether `torch.export` traces. Torch 2.11 says yes in all compiled code."""
    if _EXPORTING_AT_IMPORT is None:
        return torch.compiler.is_exporting()
    return torch.compiler._is_exporting_flag


def do_distributions_validate() -> bool:
    """Return whether distributions check their arguments by default. Torch has a public function to set that only."""
    return getattr(torch.distributions.Distribution, "_validate_args", __debug__)


add_batch_dim: Callable[[Tensor, int, int], Any] = _need("torch._functorch.vmap._add_batch_dim", "torch.vmap")
remove_batch_dim: Callable[[Tensor, int, int, int], Any] = _need(
    "torch._functorch.vmap._remove_batch_dim", "torch.vmap"
)

# The functions that `vmap` flattens its arguments and builds its results with, and the parameters of each.
_VMAP: Mapping[str, Sequence[str]] = {
    "_process_batched_inputs": ("in_dims", "args", "func"),
    "_create_batched_inputs": ("flat_in_dims", "flat_args", "vmap_level", "args_spec"),
    "_unwrap_batched": ("batched_outputs", "out_dims", "vmap_level", "batch_size", "func"),
}
_NO_VMAP = "missing: torch.vmap over lazy stacks; slower: torch.vmap over other containers"


def vmap_functions() -> list[Callable[..., Any]] | None:
    """Return the three functions in `_VMAP`; `None` if torch lacks one, or its parameters differ."""
    found = []
    for name, parameters in _VMAP.items():
        function = _take(f"torch._functorch.vmap.{name}", None, _NO_VMAP)
        if function is None:
            return None
        if tuple(inspect.signature(function).parameters) != tuple(parameters):
            LACKING[f"torch._functorch.vmap.{name}"] = _NO_VMAP
            return None
        found.append(function)
    return found if all(name not in LACKING for name in _VMAP_NEEDS) else None


def replace_vmap_functions(*functions: Callable[..., Any]) -> None:
    """Replace the functions of :func:`vmap_functions` in `torch.vmap`, because torch offers no hook."""
    module = import_module("torch._functorch.vmap")
    for name, function in zip(_VMAP, functions, strict=True):
        setattr(module, name, function)


# --- pytrees ----------------------------------------------------------------------------------------------------------

_PYTREE = "torch.utils._pytree"

register_pytree_node: Callable[..., None] = _take(
    f"{_PYTREE}.register_pytree_node", lambda *args, **kwargs: None, "missing: containers are leaves of pytrees"
)
# The functions and names that torch has registered for each class.
pytree_nodes: dict[Any, Any] = _take(
    f"{_PYTREE}.SUPPORTED_NODES", {}, "missing: classes that are registered as pytrees"
)
MappingKey: Callable[[str], Any] = _take(f"{_PYTREE}.MappingKey", str, "missing: names of entries in torch.export")
SequenceKey: Callable[[int], Any] = _take(f"{_PYTREE}.SequenceKey", int, "missing: numbers of members in torch.export")
tree_flatten: Callable[..., tuple[list[Any], Any]] = _need(f"{_PYTREE}.tree_flatten", "taking a pytree apart")
tree_map: Callable[..., Any] = _need(f"{_PYTREE}.tree_map", "calling a function on the leaves of a pytree")
tree_unflatten: Callable[..., Any] = _need(f"{_PYTREE}.tree_unflatten", "putting a pytree together")
broadcast_to_leaves: Callable[[Any, Any], list[Any] | None] = _need(
    f"{_PYTREE}._broadcast_to_and_flatten", "torch.vmap over lazy stacks"
)
_VMAP_NEEDS = (
    "torch._functorch.vmap._add_batch_dim", "torch._functorch.vmap._remove_batch_dim",
    f"{_PYTREE}.tree_flatten", f"{_PYTREE}.tree_unflatten", f"{_PYTREE}._broadcast_to_and_flatten",
)  # fmt: skip

# --- Python's side ----------------------------------------------------------------------------------------------------


class _Decorator(contextlib.ContextDecorator):
    """A context manager that also decorates functions: each call enters a new copy, made by `clone`."""

    def clone(self) -> Any:
        return type(self)()

    def _recreate_cm(self) -> Any:
        return self.clone()


if TYPE_CHECKING:
    from torch.utils._contextlib import _DecoratorContextManager

    Decorator = _DecoratorContextManager
else:
    Decorator = _take(
        "torch.utils._contextlib._DecoratorContextManager", _Decorator, "missing: settings around generator functions"
    )

# The functions that collate samples of each class in a `DataLoader`; torch documents this table.
collate_functions: dict[Any, Any] = _take(
    "torch.utils.data._utils.collate.default_collate_fn_map", {}, "missing: DataLoader without collate_fn"
)
# Converts the old arguments `size_average` and `reduce` of losses to `reduction`.
reduction_of: Callable[[Any, Any], str] = _need(
    "torch.nn._reduction.legacy_get_string", "size_average and reduce of a loss, in place of reduction,"
)
# The module that runs `torch.load(weights_only=True)`.
WEIGHTS_ONLY = "torch._weights_only_unpickler"


def break_at_in_place_operator() -> None:
    """Make Dynamo leave `td += tensor` to Python. Outside of traced code, this does nothing.

    Dynamo makes the same call for `td += tensor` as for `td + tensor`, and only the bytecode tells them apart. Without
    `torch._dynamo.comptime`, Dynamo rejects operators between a tensor and a container.
    """
    torch._dynamo.comptime.comptime(_break_if_in_place)


def _break_if_in_place(traced: Any) -> None:
    frame = traced._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    while frame is not None and os.path.dirname(frame.f_code.co_filename) in _OPERATORS:
        frame = frame.parent
    if frame is None:
        # Python called the operator, not Dynamo, and knows one from the other.
        return
    operation = frame.current_instruction
    # From 13 on, the arguments of BINARY_OP are in-place operators. Python 3.10 has separate instructions for them.
    if not operation.opname.startswith("BINARY_") or (operation.opname == "BINARY_OP" and operation.arg >= 13):
        traced.graph_break("Dynamo does not tell td += tensor from td + tensor. Write td.add_(tensor)")


# Frames from these folders lie between the user's operator and this module.
_CORE = os.path.dirname(__file__)
_OPS = os.path.join(os.path.dirname(_CORE), "ops")
_OPERATORS = (_CORE, _OPS, os.path.join(_OPS, "math"))
