"""`CudaGraphModule`: record the GPU work of a function once, and replay it at each call."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tensordict.containers.lazy.core import LazyCore
from tensordict.containers.lazy.vmapping import flatten_stack
from tensordict.core import torch_internals as internals
from tensordict.core.contract import Contract, is_node
from tensordict.core.equality import same_value
from tensordict.core.keys import Key, unravel_key_list
from tensordict.core.pytree import flatten_container
from tensordict.nn.dispatch import dispatch
from tensordict.nn.interaction import interaction_type
from tensordict.nn.module import repr_of_fields
from tensordict.ops.collection import TensorCollection

if TYPE_CHECKING:
    from torch.nn.modules.module import _IncompatibleKeys

# The number of input forms to keep. A form that never comes again, such as a counter, gets no recording.
_KEPT = 32


class CudaGraphModule:
    """Record a function or module in a CUDA graph, and replay the graph at each call without the cost of Python.

    The first `warmup` calls run normally, on their own stream. The next call records: the GPU work is written to a list
    instead of being executed. From then on, each call copies its inputs to the recorded inputs, runs the list on the
    GPU, and returns a copy of the outputs. So the function must do the same work each time: it must not branch on
    values, read values on the CPU, or depend on outside state that changes. Parameters are read from the memory that
    they had during recording. Optimizers must be `capturable=True`.

    Each form of the input (keys, shapes, dtypes, non-tensor values) gets its own recording. So do training and
    evaluation mode, and each interaction type. The last 32 forms are kept.

    A module with in-keys, or a function with `in_keys`, takes a container (or, by :class:`dispatch`, its entries) and
    returns one. If it returns the given container, so does this object. Anything else takes and returns tensors and
    containers, alone or in tuples, lists and dicts.

    Without a GPU, a warning is given when the object is made, and calls go straight to the function. This object is not
    an `nn.Module`; its attribute `module` has the parameters.

    Args:
        module: the function or module.
        warmup: the number of calls before the recording, at least 1. Compiled functions need some.
        in_keys: the entries to read. An empty list means the whole container. By default, the in-keys of `module`.
        out_keys: the entries to write. An empty list means all. By default, the out-keys of `module`.
        device: the GPU; the current one by default.

    Raises:
        TypeError: `module` cannot be called; or, when called, an argument should be a container and is not.
        ValueError: `warmup` is not a positive integer, or `device` is not a GPU.
        RuntimeError: (when called) an input is not on a GPU or requires gradients, or a recorded output requires
            gradients.

    Example:
        >>> import warnings
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import CudaGraphModule, TensorDictModule
        >>> device = "cuda" if torch.cuda.is_available() else "cpu"
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")
        ...     double = CudaGraphModule(TensorDictModule(lambda x: 2 * x, in_keys=["x"], out_keys=["y"]))
        >>> for i in range(4):
        ...     y = double(x=torch.full((2,), i, device=device))
        >>> y.tolist()
        [6, 6]
    """

    def __init__(
        self,
        module: Callable[..., Any],
        warmup: int = 2,
        in_keys: Sequence[Key] | None = None,
        out_keys: Sequence[Key] | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        if not callable(module):
            raise TypeError(f"CudaGraphModule wraps a function or a module, got {type(module).__name__}")
        if type(warmup) is not int or warmup < 1:
            raise ValueError(f"warmup must be an integer greater than 0, got {warmup!r}")
        self.module = module
        self.in_keys = _resolve_keys(in_keys, module, "in_keys")
        self.out_keys = _resolve_keys(out_keys, module, "out_keys")
        self.device = None if device is None else torch.device(device)
        self.counter = 0
        self._warmup = warmup
        self._recordings: list[_Recording] = []
        self._has_cuda = torch.cuda.is_available()
        self._stream: torch.cuda.Stream | None = None
        if not self._has_cuda:
            warnings.warn(
                "there is no GPU: CudaGraphModule calls the function as it is, without recording it", stacklevel=2
            )
        elif self.device is not None and self.device.type != "cuda":
            raise ValueError(f"device must be a GPU, got {self.device}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, or replay it."""
        self.counter += 1
        if self.in_keys is None:
            return self._call_on_values(args, kwargs)
        if not self.in_keys and "tensordict" not in kwargs and not (args and isinstance(args[0], Contract)):
            raise TypeError("a CudaGraphModule with empty in_keys must be called with a container")
        return self._call_on_container(*args, **kwargs)

    def _call_on_values(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        values, spec = internals.tree_flatten((args, kwargs), is_leaf=is_node)
        _check_no_gradients(values)
        if not self._has_cuda:
            return self.module(*args, **kwargs)
        recording = self._find_recording(values, spec)
        if recording.calls < self._warmup:
            return self._warm_up(recording, args, kwargs)
        if recording.graph is None:

            def call(values: list[object]) -> object:
                args, kwargs = internals.tree_unflatten(values, spec)
                return self.module(*args, **kwargs)

            self._record(recording, values, call)
        return internals.tree_map(_copy, recording.replay(values), is_leaf=is_node)

    @dispatch(auto_batch_size=False)
    def _call_on_container(self, tensordict: TensorCollection, tensordict_out: TensorCollection | None = None) -> Any:
        read = tensordict.select(*self.in_keys, strict=False) if self.in_keys else tensordict
        _check_no_gradients([read])
        recording = self._find_recording([read], None) if self._has_cuda else None
        if recording is None or recording.calls < self._warmup:
            options = {} if tensordict_out is None else {"tensordict_out": tensordict_out}
            if recording is None:
                return self.module(tensordict, **options)
            return self._warm_up(recording, (tensordict,), options)
        if recording.graph is None:
            self._record(recording, [read], lambda values: self.module(*values))
        output = recording.replay([read])
        if output is recording.inputs[0] and tensordict_out is None:
            tensordict_out = tensordict
        elif tensordict_out is None:
            return output.clone()
        written = output.select(*self.out_keys, strict=False) if self.out_keys else output
        return tensordict_out.update(written.clone())

    # --- recordings ---------------------------------------------------------------------------------------------------

    def _find_recording(self, values: Sequence[object], spec: object) -> _Recording:
        """Return the recording for inputs of this form. A new one is still empty."""
        form = (
            spec,
            getattr(self.module, "training", None),
            interaction_type(),
            [_describe_form(value) for value in values],
        )
        for recording in self._recordings:
            if recording.form == form:
                return recording
        for tensor in _collect_tensors(values):
            if not _is_on_gpu(tensor):
                raise RuntimeError(
                    f"CudaGraphModule got a tensor of shape {list(tensor.shape)} on {tensor.device}: all inputs must "
                    "be on the GPU, because other tensors would keep their values from the recording"
                )
        if len(self._recordings) == _KEPT:
            self._recordings.pop(0)
        self._recordings.append(recording := _Recording(form))
        return recording

    def _warm_up(self, recording: _Recording, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Any:
        """Call the function on a side stream, as torch requires before a recording."""
        with torch.cuda.device(self.device):
            if self._stream is None:
                self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                result = self.module(*args, **kwargs)
            current.wait_stream(self._stream)
        recording.calls += 1
        return result

    def _record(self, recording: _Recording, values: Sequence[object], call: Callable[[list[Any]], object]) -> None:
        inputs = [_copy(value) for value in values]
        # Collect the buffers before the call, which may replace entries of the inputs.
        buffers = _collect_tensors(inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device), torch.cuda.graph(graph):
            output = call(inputs)
        _check_no_gradients(internals.tree_flatten(output, is_leaf=is_node)[0], "return")
        recording.inputs, recording.buffers, recording.output = inputs, buffers, output
        recording.graph = graph

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the state of the module; an empty dict for a function."""
        return self.module.state_dict(*args, **kwargs) if isinstance(self.module, nn.Module) else {}

    def load_state_dict(self, state_dict: Mapping[str, object], *args: Any, **kwargs: Any) -> _IncompatibleKeys | None:
        """Load the state of the module in place, so that recordings use it.

        Raises:
            ValueError: `module` is a function, and the state is not empty.
        """
        if isinstance(self.module, nn.Module):
            return self.module.load_state_dict(state_dict, *args, **kwargs)  # type: ignore[no-any-return]
        if state_dict:
            raise ValueError(f"a function has no state to load {sorted(state_dict)} into")
        return None

    def __repr__(self) -> str:
        fields = {"module": self.module, "warmup": self._warmup, "in_keys": self.in_keys, "out_keys": self.out_keys}
        return repr_of_fields(self, fields)


class _Recording:
    """The recording for one form of the input."""

    inputs: list[object]
    # The tensors in `inputs`, which each call overwrites.
    buffers: list[Tensor]
    output: Any
    graph: Any = None
    # The number of calls before the recording.
    calls: int = 0

    def __init__(self, form: object) -> None:
        self.form = form

    def replay(self, values: Sequence[object]) -> Any:
        """Return the output for these inputs. The next call overwrites it."""
        if self.buffers:
            with torch.no_grad():
                internals.foreach_copy_(self.buffers, _collect_tensors(values))
        self.graph.replay()
        return self.output


class _RecordedValue:
    """A non-tensor value in the form of an input. A recording is reused for an equal value."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _RecordedValue)
            and type(self.value) is type(other.value)
            and same_value(self.value, other.value)
        )

    __hash__ = None  # type: ignore[assignment]


def _describe_form(value: Any) -> object:
    """Return everything that a recording depends on, except the content of tensors."""
    if not is_node(value):
        return (value.shape, value.dtype, value.device) if isinstance(value, Tensor) else _RecordedValue(value)
    if value._is_non_tensor:
        return type(value), value._batch_size, _RecordedValue(value._unwrap_value())
    bare = value._wrapped_container()
    children, context = flatten_stack(bare) if isinstance(bare, LazyCore) else flatten_container(bare)
    return type(value), value._batch_size, context, [_describe_form(child) for child in children]


def _collect_tensors(values: Sequence[object]) -> list[Tensor]:
    """Return all tensors among the values and in their containers. Values of the same form give the same order."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, TensorCollection):
            value._gather(found)
        elif isinstance(value, Tensor):
            found.append(value)
    return found


def _copy(value: object) -> object:
    """Copy a tensor or a container; return anything else unchanged."""
    return value.clone() if isinstance(value, (Tensor, TensorCollection)) else value


def _is_on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _check_no_gradients(values: Sequence[object], verb: str = "take") -> None:
    if any(tensor.requires_grad for tensor in _collect_tensors(values)):
        raise RuntimeError(
            f"CudaGraphModule cannot {verb} tensors that require gradients: autograd does not see the recorded work. "
            "Let the function use parameters from outside, call backward() itself, and return detached tensors"
        )


def _resolve_keys(keys: Sequence[Key] | None, module: object, name: str) -> list[Key] | None:
    """Return the given keys, or the keys of the module; `None` if there are neither."""
    keys = getattr(module, name, None) if keys is None else keys
    return None if keys is None else unravel_key_list(list(keys))
