"""The parameters and buffers of modules as containers: taking them out, and putting others in."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tensordict.core import makers, registry
from tensordict.core import torch_internals as internals
from tensordict.core.contract import Contract
from tensordict.core.exceptions import KeyMismatchError, ModuleError, OptionError
from tensordict.core.uninitialized import initialize_with_first_call, is_element, stack_lazy_leaves

if TYPE_CHECKING:
    from typing_extensions import Self, TypedDict, Unpack

    from tensordict.nn.params import TensorDictParams

    class _FromModules(TypedDict, total=False):
        lock: bool
        use_state_dict: bool
        lazy_stack: bool
        expand_identical: bool

    class _ToModule(TypedDict, total=False):
        inplace: bool | None
        swap_dest: object
        use_state_dict: bool
        non_blocking: bool
        preserve_module_state: bool | None
        memo: dict[int, Any] | None


_NO_BATCH = torch.Size(())
_NO_SIZE = "it is a parameter of a lazy module, which has no size yet: run it once, on an input of the right size"


class Modules(Contract):
    """`from_module`, `from_modules` and `to_module`."""

    @overload
    @classmethod
    def from_module(
        cls,
        module: nn.Module,
        as_module: Literal[False] = ...,
        lock: bool = ...,
        use_state_dict: bool = ...,
        filter_empty: bool = ...,
    ) -> Self: ...
    @overload
    @classmethod
    def from_module(
        cls,
        module: nn.Module,
        as_module: Literal[True],
        lock: bool = ...,
        use_state_dict: bool = ...,
        filter_empty: bool = ...,
    ) -> TensorDictParams: ...
    @classmethod
    def from_module(
        cls,
        module: nn.Module,
        as_module: bool = False,
        lock: bool = False,
        use_state_dict: bool = False,
        filter_empty: bool = True,
    ) -> Any:
        """The parameters and buffers of a module in a container with the tree structure of the module.

        Nothing is copied: the entries are the very parameters and buffers, also those that are tied. A module that
        occurs in several places is one nested container.

        Args:
            module: the module.
            as_module: give a :class:`~tensordict.TensorDictParams`, which can be part of another module.
            lock: lock the result.
            use_state_dict: take the content of `module.state_dict()`, as its hooks make it, rather than the parameters
                and buffers themselves: detached tensors on the same memory, without buffers that are not persistent.
            filter_empty: leave out submodules that have neither parameters nor buffers.

        Returns:
            a container without batch dims.

        Example:
            >>> from torch import nn
            >>> from tensordict import TensorDict
            >>> net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
            >>> params = TensorDict.from_module(net)
            >>> params["0", "weight"] is net[0].weight, sorted(params.keys())
            (True, ['0', '2'])
        """
        make = makers.dense
        if use_state_dict:
            result = make({}, _NO_BATCH, None, None)
            for key, value in module.state_dict().items():
                result.set(tuple(key.split(".")), value)
        else:
            result = _taken_out(module, filter_empty, {}, make)
        if as_module:
            return _as_module(result, lock)
        return result.lock_() if lock else result

    @overload
    @classmethod
    def from_modules(
        cls, *modules: nn.Module, as_module: Literal[True], **options: Unpack[_FromModules]
    ) -> TensorDictParams: ...
    @overload
    @classmethod
    def from_modules(
        cls, *modules: nn.Module, as_module: Literal[False] = ..., **options: Unpack[_FromModules]
    ) -> Self: ...
    @classmethod
    def from_modules(
        cls,
        *modules: nn.Module,
        as_module: bool = False,
        lock: bool = True,
        use_state_dict: bool = False,
        lazy_stack: bool = False,
        expand_identical: bool = False,
    ) -> Any:
        """The parameters of several modules of the same structure, stacked: those of an ensemble.

        Parameters and buffers of lazy modules, such as `nn.LazyLinear`, are stacked without a size. The first call
        within `torch.vmap` gives the stack its size and first values, in place: the parameters that an optimizer has
        already are the ones that it trains. The values are drawn as for one parameter of shape
        `[len(modules), *shape]`, whatever the `randomness` of `torch.vmap` is.

        Args:
            *modules: the modules.
            as_module: give a :class:`~tensordict.TensorDictParams`; not with `lazy_stack`.
            lock: lock the result.
            use_state_dict: as for :meth:`from_module`.
            lazy_stack: give a lazy stack of the parameters themselves, so that gradients reach the modules; they are
                stacked whenever they are read, and the modules may differ in structure. Without it, the stacked
                parameters are new ones, and it is those that an optimizer has to be given.
            expand_identical: where all the modules share a tensor, give an expanded view of it instead of a stack of
                copies; not with `lazy_stack`.

        Returns:
            a container of batch size `[len(modules)]`.

        Raises:
            KeyError: the modules have different parameters, and `lazy_stack` is not set.
            RuntimeError: some of the modules are lazy and others have their sizes.
            ValueError: no modules, or options that exclude one another.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> from tensordict import TensorDict
            >>> params = TensorDict.from_modules(*[nn.Linear(3, 4) for _ in range(5)])
            >>> params["weight"].shape
            torch.Size([5, 4, 3])
            >>> empty = nn.Linear(3, 4, device="meta")
            >>> def run(params, x):
            ...     with params.to_module(empty):
            ...         return empty(x)
            >>> torch.vmap(run, (0, None))(params, torch.ones(3)).shape
            torch.Size([5, 4])
        """
        if not modules:
            raise ValueError("from_modules needs at least one module")
        if lazy_stack and as_module:
            raise OptionError("lazy_stack=True keeps the modules' own parameters and excludes as_module=True")
        members = [cls.from_module(module, use_state_dict=use_state_dict) for module in modules]
        if lazy_stack:
            stack = makers.lazy_stack(*members)
            return stack.lock_() if lock else stack
        fn = partial(_stacked, expand_identical=expand_identical)
        try:
            result: Any = members[0]._merge(members, fn, torch.Size((len(members),)), 0, None)
        except KeyMismatchError as error:
            raise KeyMismatchError(
                f"the modules have different parameters: {error}; lazy_stack=True takes such modules"
            ) from error
        if as_module:
            return _as_module(result, lock)
        return result.lock_() if lock else result

    @overload
    def to_module(
        self, module: nn.Module, *, return_swap: Literal[True] = ..., **options: Unpack[_ToModule]
    ) -> Self: ...
    @overload
    def to_module(self, module: nn.Module, *, return_swap: Literal[False], **options: Unpack[_ToModule]) -> None: ...
    def to_module(
        self,
        module: nn.Module,
        *,
        inplace: bool | None = None,
        return_swap: bool = True,
        swap_dest: Any = None,
        use_state_dict: bool = False,
        non_blocking: bool = False,
        preserve_module_state: bool | None = True,
        memo: dict[int, Any] | None = None,
    ) -> Self | None:
        """Put the entries in the place of the parameters and buffers of a module; as a context manager, for a block.

        `with params.to_module(net):` puts back what was there at the end of the block, also when it raised. What the
        module assigned anew in the block (a buffer, say) is then found in this container, unless it is locked.

        The container may have fewer entries than the module; the others stay. Everything is checked before the first
        entry changes.

        Args:
            module: the module.
            inplace: copy into the tensors of the module rather than replace them.
            return_swap: give what was in the module; without it `None`.
            swap_dest: a container that is updated with what was in the module, and returned.
            use_state_dict: load through `module.load_state_dict`, with its hooks.
            non_blocking: of copies between devices; with `inplace`.
            preserve_module_state: what takes the place of a parameter becomes one, with the `requires_grad` of the old
                one; tensors that require gradients or are mapped by `torch.vmap` are put in as they are. Without it,
                a plain tensor takes the place of a parameter as a plain attribute. A parameter that takes the place of
                such an attribute is registered as a parameter of the module. In compiled code, a tensor that
                is put in for a block requires gradients like the old parameter, and is no `nn.Parameter`. Functions of
                `torch.func` that are compiled, and `torch.export`, put it in as it is.
            memo: the modules that were visited, by `id`; several calls that share one visit each module once.

        Returns:
            the entries that were in the module, in a container of the same structure.

        Raises:
            KeyError: the module has no parameter, buffer or submodule of a name; missing and unexpected keys are
                listed.
            RuntimeError: (with `inplace`) shapes differ.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> from tensordict import TensorDict
            >>> net = nn.Linear(3, 4)
            >>> zeros = TensorDict.from_module(net).data * 0
            >>> with zeros.to_module(net):
            ...     y = net(torch.ones(3))
            >>> y.sum().item(), bool((net.weight == 0).all())
            (0.0, False)
        """
        container: Any = self._wrapped_container()
        if use_state_dict:
            swap, undo = _load_state(container, module, bool(inplace))
        else:
            slots: list[_Slot] = []
            firsts: _Firsts = []
            visited: dict[int, Any] = {} if memo is None else memo
            preserve = bool(preserve_module_state)
            swap = _plan(container, module, slots, firsts, visited, preserve, not return_swap)
            undo = _fill_in(slots, firsts, container, bool(inplace), non_blocking)
        if not return_swap:
            return None
        if swap_dest is not None:
            swap_dest.update(swap)
            swap = swap_dest
        swap._undo = (None, undo)
        return swap  # type: ignore[no-any-return]


def is_parameter(value: object) -> bool:
    """Whether a value is a parameter; 25 ns for most, where torch's own check is written in Python and takes 300."""
    kind = type(value)
    return kind is nn.Parameter or (kind is not Tensor and isinstance(value, nn.Parameter))


# --- taking out -------------------------------------------------------------------------------------------------------


def _as_module(container: Any, lock: bool) -> Any:
    return registry.lookup("TensorDictParams")(container, no_convert="buffer", lock=lock)


def _taken_out(module: nn.Module, filter_empty: bool, memo: dict[nn.Module, Any], make: Callable[..., Any]) -> Any:
    if isinstance(module, Contract):
        return module
    found = memo.get(module)
    if found is not None:
        return found
    entries: dict[str, Any] = {}
    # Before the submodules, for a module that is below itself.
    container = memo[module] = make(entries, _NO_BATCH, None, None)
    state = module.__dict__
    for table in (state["_parameters"], state["_buffers"]):
        for name, value in table.items():
            if value is not None:
                entries[name] = value
    for name, child in state["_modules"].items():
        if child is not None:
            inner = _taken_out(child, filter_empty, memo, make)
            if not filter_empty or inner._entries:
                entries[name] = inner
    return container


def _stacked(leaves: list[Any], expand_identical: bool) -> Any:
    """One leaf of an ensemble."""
    first = leaves[0]
    kinds = {is_parameter(leaf) for leaf in leaves}
    grads = {leaf.requires_grad for leaf in leaves}
    lazy = sum(map(is_lazy, leaves))
    if 0 < lazy < len(leaves):
        raise RuntimeError(f"of {lazy} of the {len(leaves)} modules, {_NO_SIZE}")
    if len(kinds) > 1 or len(grads) > 1:
        raise RuntimeError("it is a parameter, or requires gradients, in some of the modules only")
    if lazy:
        return stack_lazy_leaves(leaves)
    if expand_identical and all(leaf is first for leaf in leaves):
        return first.expand(len(leaves), *first.shape)
    with torch.no_grad():
        stack = torch.stack(leaves)
    if is_parameter(first):
        return nn.Parameter(stack, requires_grad=first.requires_grad)
    return stack.requires_grad_(first.requires_grad)


# --- putting in -------------------------------------------------------------------------------------------------------


class _Slot(NamedTuple):
    """A place in a module, and what goes there."""

    table: dict[str, Any]
    name: str
    old: Any
    new: Any
    # The container that the new tensor comes from, and that which keeps the old one.
    source: Any
    kept: dict[str, Any]
    # The table that the new tensor goes to, if another: a parameter becomes a plain attribute, or the reverse.
    target: dict[str, Any] | None = None


# Lazy modules whose next call gives stacks their sizes, with the places of these.
_Firsts = list[tuple[nn.Module, list[_Slot]]]


def _plan(
    container: Contract,
    module: nn.Module,
    slots: list[_Slot],
    firsts: _Firsts,
    memo: dict[int, Any],
    preserve: bool,
    lasting: bool,
) -> Any:
    """Note what goes where, and give the container of what is there."""
    done = memo.get(id(module))
    if done is not None:
        return done
    if isinstance(module, Contract):
        return _plan_container(container, module, slots, memo)
    state = module.__dict__
    parameters, buffers, modules = state["_parameters"], state["_buffers"], state["_modules"]
    kept: dict[str, Any] = {}
    # A submodule that occurs twice is visited once.
    result = memo[id(module)] = makers.dense(kept, _NO_BATCH, None, None)
    entries = container._entries
    for name, value in entries.items():
        if (old := parameters.get(name)) is not None:
            if not preserve and not is_parameter(value):
                slots.append(_Slot(parameters, name, old, value, entries, kept, state))
                continue
            new = value if is_parameter(value) else _as_parameter(value, old, lasting)
            slots.append(_Slot(parameters, name, old, new, entries, kept))
        elif (old := buffers.get(name)) is not None:
            slots.append(_Slot(buffers, name, old, value, entries, kept))
        elif (child := modules.get(name)) is not None and isinstance(value, Contract):
            kept[name] = _plan(value._wrapped_container(), child, slots, firsts, memo, preserve, lasting)
        elif isinstance(old := state.get(name), Tensor) and not isinstance(value, Contract):
            # A plain attribute, as a swap without `preserve_module_state` leaves it. A parameter is registered again.
            slots.append(_Slot(state, name, old, value, entries, kept, parameters if is_parameter(value) else None))
        else:
            raise _unfit(container, module, name)
    # Lazy modules have this hook until their first call.
    if "_initialize_hook" in state and (own := [s for s in slots if is_element(s.new) and s.source is entries]):
        firsts.append((module, own))
    return result


def _plan_container(container: Any, module: Any, slots: list[_Slot], memo: dict[int, Any]) -> Any:
    """As `_plan`, for a module that is a container: its entries are exchanged."""
    kept: dict[str, Any] = {}
    result = memo[id(module)] = makers.dense(kept, module._batch_size, None, None)
    theirs, entries = module._wrapped_container()._entries, container._entries
    for name, value in entries.items():
        old = theirs.get(name)
        if old is None or isinstance(old, Contract) is not isinstance(value, Contract):
            raise _unfit(container, module, name)
        if isinstance(old, Contract):
            kept[name] = _plan_container(value._wrapped_container(), old, slots, memo)
        else:
            slots.append(_Slot(theirs, name, old, value, entries, kept))
    return result


class _RequireGrad(torch.autograd.Function):
    """A tensor on the memory of another, which requires gradients if a parameter does, and keeps none."""

    @staticmethod
    def forward(ctx: object, value: Tensor, parameter: nn.Parameter) -> Tensor:
        # A view would refuse to be changed in place.
        return value.detach()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[None, None]:
        return None, None


def _as_parameter(value: Tensor, old: nn.Parameter, lasting: bool) -> Tensor:
    """What takes the place of a parameter; a tensor that gradients or a map go through stays itself."""
    if value.requires_grad:
        return value
    if torch.compiler.is_compiling():
        if internals.transforms_active() or internals.is_exporting():
            return value
        # Dynamo makes parameters of what the graph is given, not of what is computed in it.
        if not lasting:
            return _RequireGrad.apply(value, old) if old.requires_grad else value  # type: ignore[no-untyped-call]
    elif internals.is_transformed(value):
        return value
    return nn.Parameter(value, requires_grad=old.requires_grad)


def _fill_in(
    slots: list[_Slot], firsts: _Firsts, container: Contract, inplace: bool, non_blocking: bool
) -> Callable[[Any], object]:
    if inplace:
        return _copy_in(slots, non_blocking)
    orders = [(slot.table, list(slot.table)) for slot in slots if slot.target is not None and is_parameter(slot.old)]
    for table, name, old, new, _, kept, target in slots:
        kept[name] = old
        if target is None:
            table[name] = new
        else:
            del table[name]
            target[name] = new
    stops = []
    for module, own in firsts:
        # The function that is mapped may put its container into the module again.
        places = [([slot.target or slot.table, slot.source], slot.name, slot.new) for slot in own]
        stops.append(initialize_with_first_call(module, places))
    return partial(_put_back, slots, orders, stops, container._locked)


def _put_back(
    slots: list[_Slot], orders: list[tuple[dict[str, Any], list[str]]], stops: list[Any], locked: bool, swap: object
) -> Any:
    """Undo `_fill_in`, whatever has become of the module meanwhile."""
    for stop in stops:
        stop()
    for table, name, old, new, source, _, target in slots:
        current = table.get(name) if target is None else target.pop(name, new)
        table[name] = old
        if current is not new and current is not None and not locked:
            source[name] = current
    for table, order in orders:
        # What was taken out and put back stands last; optimizers go by the order.
        for name in order:
            table[name] = table.pop(name)
    return swap


def _copy_in(slots: list[_Slot], non_blocking: bool) -> Callable[[Any], Any]:
    """Copy into the tensors of the module."""
    for slot in slots:
        if is_lazy(slot.old) or is_lazy(slot.new):
            raise ModuleError(f"{slot.name!r}: {_NO_SIZE}")
        if slot.old.shape != slot.new.shape:
            raise ModuleError(
                f"{slot.name!r} has shape {list(slot.new.shape)} and cannot be copied into the module's, which has "
                f"{list(slot.old.shape)}"
            )
    targets = [slot.old.detach() for slot in slots]
    for slot, target in zip(slots, targets, strict=True):
        slot.kept[slot.name] = target.clone()
    with torch.no_grad():
        for slot, target in zip(slots, targets, strict=True):
            target.copy_(slot.new, non_blocking=non_blocking)

    def copy_back(swap: object) -> Any:
        with torch.no_grad():
            for slot, target in zip(slots, targets, strict=True):
                target.copy_(slot.kept[slot.name])
        return swap

    return copy_back


def _load_state(container: Contract, module: nn.Module, inplace: bool) -> tuple[Any, Callable[[Any], Any]]:
    """Go through the state dict of a module, and its hooks."""
    before = module.state_dict(keep_vars=not inplace)
    if inplace:
        before = {name: value.clone() for name, value in before.items()}
    state = {".".join(path): leaf for path, leaf in container._walk()}
    if unexpected := sorted(state.keys() - before.keys()):
        raise ModuleError(
            f"the {type(container).__name__} does not fit the module {type(module).__name__}: unexpected keys "
            f"{unexpected}, missing keys {sorted(before.keys() - state.keys())}"
        )
    module.load_state_dict(state, strict=False, assign=not inplace)
    swap = makers.dense({}, _NO_BATCH, None, None)
    for name in state:
        swap.set(tuple(name.split(".")), before[name])

    def load_back(result: object) -> Any:
        module.load_state_dict({name: before[name] for name in state}, strict=False, assign=not inplace)
        return result

    return swap, load_back


def _unfit(container: Contract, module: object, name: str) -> ModuleError:
    """The error about entries that have no place in a module."""
    if isinstance(module, Contract):
        places = set(module._entries)
    else:
        state = module.__dict__
        tables = ("_parameters", "_buffers", "_modules")
        places = {key for table in tables for key, value in state[table].items() if value is not None}
    given = set(container._entries)
    unexpected = sorted(given - places) or [name]
    return ModuleError(
        f"the {type(container).__name__} does not fit the module {type(module).__name__}: unexpected keys "
        f"{unexpected}, missing keys {sorted(places - given)}; nothing was changed"
    )
