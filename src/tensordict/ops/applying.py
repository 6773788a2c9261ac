"""The mixin of `apply`, `apply_` and `named_apply`, which call a function on every leaf."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import Tensor

from tensordict.core import ragged
from tensordict.core.contract import Contract, EntryStore, Names, is_node
from tensordict.core.devices import as_device, put_on
from tensordict.core.exceptions import add_note
from tensordict.core.key_views import IsLeaf, MembersApart
from tensordict.core.keys import Path, joined
from tensordict.core.shapes import as_size
from tensordict.ops.dims.naming import as_names
from tensordict.ops.entries.numbers import make_entry
from tensordict.ops.entries.reading import NO_DEFAULT
from tensordict.ops.entries.write_plans import WritePlan
from tensordict.ops.entries.writing import Writing

if TYPE_CHECKING:
    from typing_extensions import Self

    from tensordict.core.annotations import Off, On

    SelfT = TypeVar("SelfT", bound="Applying")


@dataclass(slots=True)
class _Call:
    """The arguments of one call of `apply`, which the walk passes to every level."""

    fn: Callable[..., Any]
    named: bool
    nested_names: bool
    default: Any
    filter_empty: bool | None
    call_on_nested: bool
    batch_size: torch.Size | None
    device: Any
    names: Any
    # With `inplace`, the copies into the leaves, which run after all calls have succeeded.
    plan: WritePlan | None
    is_leaf: IsLeaf | None = None
    # True if the caller guarantees that the results have the batch size.
    trusted: bool = False


class Applying(Writing):
    """`apply` and its kin."""

    # Type checkers infer the parameters of a lambda only from an overload with their exact number.
    @overload
    def apply(self: SelfT, fn: Callable[[Any], Any], *, filter_empty: Off = ..., **options: Any) -> SelfT: ...
    @overload
    def apply(
        self: SelfT, fn: Callable[[Any, Any], Any], other: Any, *, filter_empty: Off = ..., **options: Any
    ) -> SelfT: ...
    @overload
    def apply(self: SelfT, fn: Callable[..., Any], *others: Any, filter_empty: On, **options: Any) -> SelfT | None: ...
    @overload
    def apply(self: SelfT, fn: Callable[..., Any], *others: Any, filter_empty: Off = ..., **options: Any) -> SelfT: ...
    def apply(
        self: SelfT,
        fn: Callable[..., Any],
        *others: object,
        batch_size: object = None,
        device: object = NO_DEFAULT,
        names: object = NO_DEFAULT,
        inplace: bool = False,
        default: object = NO_DEFAULT,
        filter_empty: bool | None = None,
        propagate_lock: bool = False,
        call_on_nested: bool = False,
        is_leaf: IsLeaf | None = None,
        out: object = None,
        named: bool = False,
        nested_keys: bool = False,
        **constructor_kwargs: object,
    ) -> SelfT | None:
        """Call `fn` on every leaf and collect the results in a container of the same structure.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.ones(2), "b": {"c": torch.ones(2)}}, [2])
            >>> td.apply(lambda x, y: x + y, td)["b", "c"]
            tensor([2., 2.])

        Args:
            fn: takes a leaf, and the leaf with the same key of each of `others`. Returns a tensor, a container, or
                `None` to drop the entry.
            *others: containers of the same structure.
            batch_size: the batch size of the result, at every level. Needed if `fn` changes it.
            device: the device of the result. The results of `fn` are moved to it.
            names: the dim names of the result.
            inplace: copy the results into the leaves instead. Nothing is written if a call fails.
            default: passed to `fn` for leaves that `others` lack. Without it, a missing leaf is a `KeyError`.
            filter_empty: `True` drops containers without entries, `False` keeps them. `None` drops a container if `fn`
                has dropped all of its entries. If nothing is left, the result is `None`.
            propagate_lock: lock the result if this container is locked.
            call_on_nested: call `fn` on the entries of this level only, including nested containers.
            is_leaf: takes the class of a nested container, or of the holder of a non-tensor value. Returns whether to
                call `fn` on it as a whole. By default, `fn` gets tensors only.
            out: a container whose entries are replaced by the results, as in :meth:`update`. Its old tensors do not
                change.
            named: call `fn` with the name of the leaf as first argument, like :meth:`named_apply`.
            nested_keys: with `named`, pass the whole nested key instead of the last name.

        Returns:
            a new container; `self` with `inplace`; or `out`.

        Raises:
            KeyError: one of `others` lacks a leaf, and `default` is not given.
            RuntimeError: the shape of a result does not begin with the batch size, or `out` is locked.
        """
        _refuse_unknown(constructor_kwargs)
        call = _Call(
            fn, named, nested_keys, default, filter_empty, call_on_nested, _as_size(batch_size), device, names,
            WritePlan() if inplace else None, is_leaf,
        )  # fmt: skip
        return self._run_apply(call, others, propagate_lock, out)  # type: ignore[no-any-return]

    # Type checkers infer the parameters of a lambda only from an overload with their exact number.
    @overload
    def named_apply(
        self: SelfT, fn: Callable[[Any, Any], Any], *, filter_empty: Off = ..., **options: Any
    ) -> SelfT: ...
    @overload
    def named_apply(
        self: SelfT, fn: Callable[[Any, Any, Any], Any], other: Any, *, filter_empty: Off = ..., **options: Any
    ) -> SelfT: ...
    @overload
    def named_apply(
        self: SelfT, fn: Callable[..., Any], *others: Any, filter_empty: On, **options: Any
    ) -> SelfT | None: ...
    @overload
    def named_apply(
        self: SelfT, fn: Callable[..., Any], *others: Any, filter_empty: Off = ..., **options: Any
    ) -> SelfT: ...
    def named_apply(
        self: SelfT,
        fn: Callable[..., Any],
        *others: object,
        nested_keys: bool = False,
        batch_size: object = None,
        device: object = NO_DEFAULT,
        names: object = NO_DEFAULT,
        inplace: bool = False,
        default: object = NO_DEFAULT,
        filter_empty: bool | None = None,
        propagate_lock: bool = False,
        call_on_nested: bool = False,
        is_leaf: IsLeaf | None = None,
        out: object = None,
        **constructor_kwargs: object,
    ) -> SelfT | None:
        """Call `fn(name, leaf)` on every leaf and collect the results in a container of the same structure.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.zeros(1), "b": {"c": torch.zeros(1)}})
            >>> td.named_apply(lambda name, x: x + len(name), nested_keys=True)["b", "c"]
            tensor([2.])

        Args:
            fn: takes the name of a leaf, the leaf, and the leaf with the same key of each of `others`.
            nested_keys: pass the whole nested key instead of the last name.
            *others, default, ...: as for :meth:`apply`.
        """
        _refuse_unknown(constructor_kwargs)
        call = _Call(
            fn, True, nested_keys, default, filter_empty, call_on_nested, _as_size(batch_size), device, names,
            WritePlan() if inplace else None, is_leaf,
        )  # fmt: skip
        return self._run_apply(call, others, propagate_lock, out)  # type: ignore[no-any-return]

    def apply_(self, fn: Callable[..., Any], *others: Any, **kwargs: Any) -> Self:
        """Call `fn` on every leaf and copy the results into the leaves: :meth:`apply` with `inplace=True`."""
        if self._holds_parameters and torch.is_grad_enabled():
            with torch.no_grad():
                return self.apply_(fn, *others, **kwargs)
        self.apply(fn, *others, inplace=True, **kwargs)
        return self

    def _run_apply(self, call: _Call, others: tuple[Any, ...], propagate_lock: bool, out: Any) -> Any:
        names = call.names
        if names is not NO_DEFAULT and names is not None:
            names = as_names(names, len(self._batch_size if call.batch_size is None else call.batch_size))
        result = self._apply_tree(call, others, ())
        if call.plan is not None:
            call.plan.run(self)
            return self
        if result is not None and names is not NO_DEFAULT:
            result._name_tree(names)
        if out is not None:
            result = out if result is None else out.update(result)
        if propagate_lock and self._locked and result is not None:
            result.lock_()
            result._undo = None
        return result

    def _apply_tree(self, call: _Call, others: Sequence[Any], path: Path) -> Any:
        mapping: Mapping[str, Any] = self._entries
        size = self._batch_size if call.batch_size is None else call.batch_size
        fn = call.fn
        if not isinstance(mapping, dict):
            if self._is_non_tensor:
                names = self._names if call.batch_size is None else None
                return self._build({}, size, self._device, names) if call.plan is None else None
            if isinstance(mapping, EntryStore) and (block := mapping.together(Tensor.clone)) is not None:
                with block:
                    return self._apply_tree(call, others, path)
            if self._members() is not None:
                return self._apply_to_members(call, others, path)
            mapping, fn = self._writable(), self._on_read(fn, 1 if call.named else 0, keep=True)
        entries: dict[str, Any] = {}
        ndim, plan = 0 if call.trusted else len(size), call.plan
        first = size[0] if ndim == 1 else None
        theirs = others[0]._entries if len(others) == 1 and isinstance(others[0], Contract) else None
        named, nested_names = call.named, bool(path) and call.nested_names
        # A leaf that `fn` returns unchanged has the batch size already.
        keeps_size = call.batch_size is None
        for name, value in mapping.items():
            if type(value) is not Tensor and _is_inner(value, call):
                below = self._get_counterparts(name, call, others, path) if others and not value._is_non_tensor else ()
                nested = value._apply_tree(call, below, (*path, name))
                if nested is not None:
                    entries[name] = nested
                continue
            if theirs is not None and name in theirs:
                beside: Sequence[Any] = (theirs[name],)
            elif others:
                beside = self._get_counterparts(name, call, others, path)
            try:
                if named:
                    key = (*path, name) if nested_names else name
                    result = fn(key, value, *beside) if others else fn(key, value)
                else:
                    result = fn(value, *beside) if others else fn(value)
            except Exception as error:
                add_note(error, f"apply: raised by the function for the entry {joined((*path, name))!r}")
                raise
            if result is None or (plan is not None and result is value):
                continue
            if plan is not None:
                if is_node(value):
                    value.update_(result)
                else:
                    plan.copy(value, result, (*path, name))
                continue
            if type(result) is Tensor and (type(value) is Tensor or not isinstance(value, Contract)):
                # Like `_fill`: compare a single batch dim without slicing shapes, which takes 130 ns.
                try:
                    if (
                        not ndim
                        or (result is value and keeps_size)
                        or (result.shape[:ndim] == size if ndim > 1 else result.shape[0] == first)
                    ):
                        entries[name] = result
                        continue
                except (RuntimeError, IndexError):
                    pass  # the result has no dims, or is a strided nested tensor, which lacks `shape`
            entries[name] = self._convert_result(value, result, size, call, (*path, name))
        if plan is not None or (not entries and (call.filter_empty or (call.filter_empty is None and mapping))):
            return None
        return self._build_result(entries, size, call)

    def _convert_result(self, value: object, result: Any, size: torch.Size, call: _Call, path: Path) -> Any:
        """Convert a result of the function to the entry that replaces `value` in a container of this batch size."""
        if not isinstance(result, (Tensor, Contract)):
            result = make_entry(result, path, size, self._device)
        elif (
            # Like `set`: a container with a device moves nested containers to it.
            self._device is not None
            and result is not value
            and call.device is NO_DEFAULT
            and is_node(result)
            and result._device != self._device  # type: ignore[union-attr]
        ):
            result = result.to(self._device)
        if isinstance(value, Contract) and isinstance(value, Tensor):
            # An `UnbatchedTensor`, whose shape is independent of the batch size.
            return value._over(result, size) if isinstance(result, Tensor) else result  # type: ignore[attr-defined]
        if call.trusted or (result is value and call.batch_size is None):
            return result
        shape = ragged.shape_of(result) if isinstance(result, Tensor) else result.shape
        return result if shape[: len(size)] == size else _rebatch_result(result, size, path)

    def _apply_to_members(self, call: _Call, others: Sequence[object], path: Path) -> Any:
        """Run `_apply_tree` on the members of a lazy stack."""
        members = self._members()
        if not members or (call.batch_size is not None and call.plan is None):
            # The function changes the batch dims, so it needs leaves with all of them.
            return self._dense()._apply_tree(call, others, path)
        columns = [
            self._pieces_of(other) if isinstance(other, Contract) else [other] * len(members) for other in others
        ]
        inner = replace(call, batch_size=None)
        apart = type(call.is_leaf) is MembersApart
        results = [
            member._apply_tree(inner, [column[i] for column in columns], (*path, str(i)) if apart else path)
            for i, member in enumerate(members)
        ]
        if all(result is None for result in results):
            return None
        pairs = zip(members, results, strict=True)
        return self._restack([member.empty() if result is None else result for member, result in pairs])

    def _build_result(self, entries: dict[str, Any], size: torch.Size, call: _Call) -> Any:
        """Build a container of results with the requested device."""
        names: Names | None = self._names if call.batch_size is None else None
        if call.device is NO_DEFAULT or call.device is None:
            return self._build(entries, size, self._device if call.device is NO_DEFAULT else None, names)
        device = as_device(call.device)
        for name, value in entries.items():
            if value.device != device:
                entries[name] = put_on(value, device)
        return self._build(entries, size, device, names)

    def _get_counterparts(self, name: str, call: _Call, others: Sequence[Any], path: Path) -> Sequence[Any]:
        """Return the entries of the same name in the other containers."""
        default = call.default
        try:
            return [other._entries[name] for other in others]
        except (KeyError, AttributeError):  # guarded: `get` asks again
            # One of them lacks the entry, or is itself the default for a missing node.
            found = [other._entries.get(name, default) if isinstance(other, Contract) else default for other in others]
        if default is NO_DEFAULT:
            raise KeyError(
                f"apply: one of the other containers lacks the entry {joined((*path, name))!r}; pass default="
            )
        return found


def _rebatch_result(result: Any, size: torch.Size, path: Path) -> Any:
    """Give a container the batch size `size`, if its entries fit. Raises for a tensor.

    With `is_leaf` or `call_on_nested`, `fn` may return a container of another batch size.
    """
    if not is_node(result):
        raise RuntimeError(
            f"apply: the result for {joined(path)!r} has shape {list(ragged.shape_of(result))}, which does not begin "
            f"with the batch size {list(size)}; pass batch_size= for a function that changes it"
        )
    result = result.copy()
    result._rebatch(size, path)
    return result


def _is_inner(value: object, call: _Call) -> bool:
    """Return whether the walk descends into an entry, instead of passing it to the function."""
    if call.call_on_nested or not isinstance(value, Applying):
        return False
    return call.is_leaf is None or not call.is_leaf(type(value))


def _as_size(batch_size: object) -> torch.Size | None:
    return None if batch_size is None else as_size(batch_size)


def _refuse_unknown(kwargs: dict[str, object]) -> None:
    if kwargs:
        raise TypeError(f"apply got unknown keyword arguments {sorted(kwargs)}; see help(TensorDict.apply)")
