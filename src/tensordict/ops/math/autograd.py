"""The mixin of `requires_grad`, `grad`, `detach` and `backward`; also `torch.autograd.grad` for containers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from tensordict.core import ragged
from tensordict.core import torch_internals as internals
from tensordict.core.contract import Contract, named_error
from tensordict.core.keys import joined
from tensordict.ops.storing.leaves import Leaves, _gradient, _walk, _walk_entries

if TYPE_CHECKING:
    from typing_extensions import Self

    SelfT = TypeVar("SelfT", bound="Autograd")


class Autograd(Leaves):
    """Gradients of the leaves."""

    @property
    def requires_grad(self) -> bool:
        """True if any leaf requires grad."""
        return any([leaf.requires_grad for leaf in self._leaves()])  # noqa: C419 (half the time)

    def requires_grad_(self: SelfT, requires_grad: bool = True) -> SelfT:
        """Make every leaf require grad, or stop requiring it. Returns this container.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict(a=torch.zeros(2)).requires_grad_()["a"].requires_grad
            True

        Raises:
            RuntimeError: a leaf is neither floating point nor complex; or, with `False`, it is the result of a recorded
                operation. Nothing changes then.
        """
        pairs = list(_walk(self))
        if self._holds_parameters:
            # Among parameters, other tensors are buffers, which do not train.
            pairs = [(path, leaf) for path, leaf in pairs if isinstance(leaf, nn.Parameter)]
        for path, leaf in pairs:
            if requires_grad and not (leaf.is_floating_point() or leaf.is_complex()):
                raise RuntimeError(
                    f"entry {joined(path)!r} has dtype {leaf.dtype}: only tensors of floating point and complex dtype "
                    "can require gradients. Select the other entries first"
                )
            if not requires_grad and leaf.requires_grad and not leaf.is_leaf:
                raise RuntimeError(
                    f"entry {joined(path)!r} is the result of a recorded operation, so recording cannot be switched "
                    "off for this entry alone; use td.detach()"
                )
        for _, leaf in pairs:
            leaf.requires_grad_(requires_grad)
        return self

    def detach(self: SelfT) -> SelfT:
        """Return a container of detached leaves on the same memory. It is locked if this container is."""
        return self._same_lock(self._map(Tensor.detach))

    def detach_(self) -> Self:
        """Detach every leaf from the autograd graph, in place. Returns this container.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(a=torch.zeros(2, requires_grad=True) * 2)
            >>> td.detach_().requires_grad
            False

        Raises:
            RuntimeError: an entry that requires grad is a view, which torch cannot detach in place. Nothing changes
                then.
        """
        recorded = [(path, leaf) for path, leaf in _walk(self) if leaf.requires_grad]
        for path, leaf in recorded:
            if internals.base_of(leaf) is not None:
                raise RuntimeError(
                    f"Can't detach views in-place: entry {joined(path)!r} is a view of a tensor that requires grad. "
                    "Use td.detach()"
                )
        for _, leaf in recorded:
            leaf.detach_()
        return self

    @property
    def data(self: SelfT) -> SelfT:
        """A container of the same memory that autograd does not track, like `Tensor.data`. Locked if this one is."""
        # attrgetter takes 30 ns a leaf instead of 55 ns, but torch.compile cannot trace it.
        data = _data if not torch.compiler.is_compiling() else lambda leaf: leaf.data
        return self._same_lock(self._map(data))

    @property
    def grad(self: SelfT) -> SelfT | None:
        """A container of the gradients of all leaves that have one; `None` without any. Locked if this one is.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(a=torch.ones(2, requires_grad=True), b=torch.zeros(2))
            >>> td["a"].sum().backward()
            >>> list(td.grad.keys())
            ['a']
        """
        gradients = self._map_some(_gradient)
        return None if gradients is None else self._same_lock(gradients)

    def zero_grad(self, set_to_none: bool = True) -> Self:
        """Drop the gradients of all leaves. Returns this container.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(a=torch.ones(2, requires_grad=True))
            >>> td["a"].sum().backward()
            >>> td.zero_grad().grad is None
            True

        Args:
            set_to_none: with `False`, fill the existing gradients with zeros in place instead.
        """
        kept = []
        for leaf in self._leaves():
            gradient = _gradient(leaf)
            if gradient is None:
                continue
            if set_to_none:
                leaf.grad = None
                continue
            if gradient.requires_grad:
                # Detach a gradient made with create_graph=True: zeros do not depend on its graph.
                gradient = leaf.grad = gradient.detach()
            kept.append(gradient)
        if True in map(_is_nested, kept):
            # The calls on lists do not support ragged tensors.
            for gradient in kept:
                gradient.zero_()
        elif kept:
            internals.foreach_zero_(kept)
        return self

    def backward(
        self,
        gradient: object = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: object = None,
    ) -> None:
        """Run one backward pass from all entries that require grad, adding to the `.grad` of the graph's leaves.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> x = torch.ones(3, requires_grad=True)
            >>> TensorDict(first=x.sum(), second=(2 * x).sum()).backward()
            >>> x.grad
            tensor([3., 3., 3.])

        Args:
            gradient: a container with the gradient with respect to each of these entries, under the same key and of the
                same shape. `None` means ones; then each of these entries must have one element.
            retain_graph: keep the graph for another pass. The default is the value of `create_graph`.
            create_graph: record the computation, so that the gradients can be differentiated.
            inputs: add only to the `.grad` of these tensors: a container, a tensor, or a sequence of both.

        Raises:
            RuntimeError: all entries lack a graph; an entry has several elements and `gradient` is not given; or a
                gradient has another shape. The error names the entry, and nothing has been computed.
            KeyError: `gradient` lacks an entry. The error names it.
            TypeError: `gradient` is not a container.
        """
        pairs = [(path, leaf) for path, leaf in _walk_entries(self) if leaf.requires_grad]
        if not pairs:
            raise RuntimeError("backward: no entry of this container requires grad")
        gradients: list[Tensor] | None = None
        if gradient is None:
            for path, leaf in pairs:
                if leaf.numel() != 1:
                    raise RuntimeError(
                        f"entry {joined(path)!r} has shape {list(leaf.shape)}: backward() without a gradient needs "
                        "entries of one element. Pass a container of gradients, or reduce the entry first"
                    )
        else:
            gradients = [_find_gradient(gradient, path, leaf) for path, leaf in pairs]
        torch.autograd.backward(
            [leaf for _, leaf in pairs],
            gradients,
            retain_graph=retain_graph,
            create_graph=create_graph,
            inputs=None if inputs is None else _list_tensors(inputs),
        )


_data: Callable[[Any], Any] = attrgetter("data")
_is_nested = attrgetter("is_nested")


def compute_gradients(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> Any:
    """Call :func:`torch.autograd.grad` with containers among the outputs or the inputs.

    Returns:
        a tuple of the gradient with respect to each input, a container for a container. A single container as the only
        input gives its gradient without a tuple. With `allow_unused`, a gradient container lacks the entries that the
        outputs do not depend on.
    """
    inputs = (inputs,) if isinstance(inputs, (Tensor, Contract)) else tuple(inputs)
    outputs = (outputs,) if isinstance(outputs, (Tensor, Contract)) else tuple(outputs)
    if grad_outputs is None:
        given = None
    else:
        single = isinstance(grad_outputs, (Tensor, Contract))
        given = _list_gradients((grad_outputs,) if single else tuple(grad_outputs), outputs)
    for item in inputs:
        if isinstance(item, Contract):
            for path, leaf in _walk(item):
                if not leaf.requires_grad:
                    raise RuntimeError(f"entry {joined(path)!r} of the inputs does not require grad")
    found = torch.autograd.grad(
        # `_list_gradients` lists gradients for the same tensors in the same order.
        [leaf for item in outputs for leaf in _list_leaves(item)],
        _list_tensors(inputs),
        given,
        retain_graph=retain_graph,
        create_graph=create_graph,
        only_inputs=only_inputs,
        allow_unused=allow_unused,
        is_grads_batched=is_grads_batched,
        materialize_grads=materialize_grads,
    )
    remaining = iter(found)
    results = tuple([_take_gradients(item, remaining) for item in inputs])
    return results[0] if len(inputs) == 1 and isinstance(inputs[0], Contract) else results


def _list_leaves(item: object) -> list[Any]:
    return [leaf for _, leaf in _walk_entries(item)] if isinstance(item, Contract) else [item]


def _take_gradients(item: object, remaining: Iterator[Tensor | None]) -> Any:
    """Return the next gradients of the iterator in the structure of one input."""
    if not isinstance(item, Autograd):
        return next(remaining)
    found = item._map_some(lambda leaf: next(remaining))
    if found is None:
        found = item._build({}, item._batch_size, item._device, item._names)
    return item._same_lock(found)


def _list_gradients(given: Sequence[Any], outputs: Sequence[Any]) -> list[Tensor | None]:
    """Return the gradient with respect to each tensor among the outputs."""
    if len(given) != len(outputs):
        raise RuntimeError(f"{len(given)} grad_outputs do not fit {len(outputs)} outputs")
    found: list[Tensor | None] = []
    for gradient, output in zip(given, outputs, strict=True):
        if not isinstance(output, Contract):
            found.append(gradient)
        elif gradient is None:
            found += [None for _ in _walk_entries(output)]
        else:
            found += [_find_gradient(gradient, path, leaf) for path, leaf in _walk_entries(output)]
    return found


def _find_gradient(gradient: object, path: tuple[str, ...], leaf: Tensor) -> Tensor:
    """Return the gradient with respect to the entry at `path`. Raises unless it has the shape of the entry."""
    if not isinstance(gradient, Contract):
        raise TypeError(f"the gradient of a container is a container with the same keys, got {type(gradient).__name__}")
    value: Any = gradient
    for name in path:
        value = value._entries.get(name) if isinstance(value, Contract) else None
    if not isinstance(value, Tensor):
        raise KeyError(f"the gradient lacks a tensor for the entry {joined(path)!r}")
    if leaf.is_nested:
        try:
            return ragged.like(value, leaf)
        except RuntimeError as refused:
            raise named_error(refused, path) from refused
    if value.shape != leaf.shape:
        error = RuntimeError(f"the gradient has shape {list(value.shape)}, the entry {list(leaf.shape)}")
        raise named_error(error, path)
    return value


def _list_tensors(items: Any) -> list[Tensor]:
    """Return the tensors of a container, or of a sequence of containers and tensors, or a tensor itself, as a list."""
    if isinstance(items, Leaves):
        return items._leaves()
    if isinstance(items, Tensor):
        return [items]
    return [tensor for item in items for tensor in (item._leaves() if isinstance(item, Leaves) else [item])]
