"""The mixin of `from_module`, `from_modules` and `to_module`, which exchange parameters and buffers with modules."""

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

    class _FromModules(TypedDict, total=False):
        lock: bool
        use_state_dict: bool
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

    @classmethod
    def from_module(
        cls,
        module: nn.Module,
        as_module: bool = False,
        lock: bool = True,
        use_state_dict: bool = False,
        filter_empty: bool = True,
    ) -> Any:
        """Collect the parameters and buffers of a module in a container with the tree structure of the module.

        Example:
            >>> from torch import nn
            >>> from tensordict import TensorDict
            >>> net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
            >>> params = TensorDict.from_module(net)
            >>> params["0", "weight"] is net[0].weight, sorted(params.keys())
            (True, ['0', '2'])

        Args:
            module: the module.
            as_module: return a :class:`~tensordict.TensorDictParams`, which can be part of another module.
            lock: lock the result. The default is `False` for `TensorDict.from_module`.
            use_state_dict: collect the result of `module.state_dict()` and its hooks instead. It contains detached
                tensors on the same memory, and lacks non-persistent buffers.
            filter_empty: skip submodules that have neither parameters nor buffers.

        Returns:
            a container without batch dims. Its entries are the parameters and buffers themselves, including tied ones.
            A module that occurs several times is a single nested container.
        """
        make = makers.dense
        if use_state_dict:
            result = make({}, _NO_BATCH, None, None)
            if not filter_empty:
                for name, _ in module.named_modules():
                    if name:
                        result.set(tuple(name.split(".")), make({}, _NO_BATCH, None, None))
            for key, value in module.state_dict().items():
                result.set(tuple(key.split(".")), value)
        else:
            result = _collect_entries(module, filter_empty, {}, make)
        if as_module:
            return _as_module(result, lock)
        return result.lock_() if lock else result

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
        """Stack the parameters and buffers of several modules of the same structure, for an ensemble.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> from tensordict import TensorDict
            >>> params = TensorDict.from_modules(*[nn.Linear(3, 4) for _ in range(5)])
            >>> params["weight"].shape
            torch.Size([5, 4, 3])

        Args:
            *modules: the modules.
            as_module: return a :class:`~tensordict.TensorDictParams`. Excludes `lazy_stack`.
            lock: lock the result.
            use_state_dict: as for :meth:`from_module`.
            lazy_stack: return a lazy stack of the parameters themselves, so that gradients reach the modules. They are
                stacked at each read, and the modules may differ in structure. By default, the stacked parameters are
                new parameters, which you pass to the optimizer.
            expand_identical: if all modules share a tensor, return an expanded view of it instead of a stack of copies.
                Excludes `lazy_stack`.

        Returns:
            a container of batch size `[len(modules)]`.

        Raises:
            KeyError: the modules have different parameters, and `lazy_stack` is not set.
            RuntimeError: only some of the modules are lazy.
            ValueError: `modules` is empty, or options exclude each other.

        Run the ensemble with `torch.vmap`:

            >>> empty = nn.Linear(3, 4, device="meta")
            >>> def run(params, x):
            ...     with params.to_module(empty):
            ...         return empty(x)
            >>> torch.vmap(run, (0, None))(params, torch.ones(3)).shape
            torch.Size([5, 4])

        Parameters and buffers of lazy modules, such as `nn.LazyLinear`, are stacked without a size. The first call
        within `torch.vmap` sets the size and the initial values of the stack in place, so that an optimizer can hold
        the parameters before. The values are drawn like one parameter of shape `[len(modules), *shape]`, for any
        `randomness` of `torch.vmap`.
        """
        if not modules:
            raise ValueError("from_modules needs at least one module")
        if lazy_stack and as_module:
            raise OptionError("lazy_stack=True keeps the modules' own parameters and excludes as_module=True")
        members = [cls.from_module(module, lock=False, use_state_dict=use_state_dict) for module in modules]
        if lazy_stack:
            stack = makers.lazy_stack(*members)
            return stack.lock_() if lock else stack
        fn = partial(_stack_leaves, expand_identical=expand_identical)
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
        """Replace the parameters and buffers of a module by the entries; in a `with` statement, only for the block.

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

        Args:
            module: the module. Parameters that the container lacks do not change.
            inplace: copy into the tensors of the module instead of replacing them.
            return_swap: return the old entries of the module; with `False`, return `None`.
            swap_dest: a container to update with the old entries of the module, and to return.
            use_state_dict: load through `module.load_state_dict`, with its hooks.
            non_blocking: for copies between devices, with `inplace`.
            preserve_module_state: convert tensors that replace parameters to parameters; see below.
            memo: the visited modules by `id`. Several calls that share a dict visit each module once.

        Returns:
            a container of the same structure with the old entries of the module.

        Raises:
            KeyError: the module lacks a parameter, buffer or submodule. The error lists missing and unexpected keys.
            RuntimeError: (with `inplace`) shapes differ.

        All checks come before the first change. At the end of a block `with params.to_module(net):`, the old entries
        are restored, also after an exception. Tensors that the module has assigned in the block, such as a buffer, are
        then in this container, unless it is locked.

        With `preserve_module_state`, a tensor that replaces a parameter becomes a parameter with the same
        `requires_grad`. Tensors that require gradients, or are mapped by `torch.vmap`, are not converted. In compiled
        code, a tensor that replaces a parameter for a block requires gradients like that parameter, but does not become
        an `nn.Parameter`. In compiled functions of `torch.func`, and in `torch.export`, it is not converted at all.
        Without `preserve_module_state`, a plain tensor replaces a parameter as a plain attribute. A parameter that
        replaces such an attribute is registered again.
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
            undo = _put_in(slots, firsts, container, bool(inplace), non_blocking)
        if not return_swap:
            return None
        if swap_dest is not None:
            swap_dest.update(swap)
            swap = swap_dest
        swap._undo = (None, undo)
        return swap  # type: ignore[no-any-return]


def is_parameter(value: object) -> bool:
    """Return whether a value is a parameter, in 25 ns for most values. Torch's own check, in Python, takes 300 ns."""
    kind = type(value)
    return kind is nn.Parameter or (kind is not Tensor and isinstance(value, nn.Parameter))


def as_buffer(value: Tensor) -> Tensor:
    """Mark a plain tensor as a buffer, for `isinstance(value, nn.Buffer)`. Returns a new tensor on the same memory.

    A marked tensor stays a buffer in a container of parameters. Tensors that require gradients, or belong to compiled
    code or to a transform of `torch.func`, are returned as they are, because `nn.Buffer` detaches them.
    """
    if type(value) is not Tensor or value.requires_grad or is_buffer(value):
        return value
    if torch.compiler.is_compiling() or internals.is_transformed(value):
        return value
    return nn.Buffer(value)


def is_buffer(value: object) -> bool:
    """Return whether a tensor is marked as a buffer."""
    return getattr(value, "_is_buffer", False)


# --- taking out -------------------------------------------------------------------------------------------------------


def _as_module(container: Any, lock: bool) -> Any:
    return registry.lookup("TensorDictParams")(container, no_convert="buffer", lock=lock)


def _collect_entries(
    module: nn.Module, filter_empty: bool, memo: dict[nn.Module, Any], make: Callable[..., Any]
) -> Any:
    if isinstance(module, Contract):
        return module
    found = memo.get(module)
    if found is not None:
        return found
    entries: dict[str, Any] = {}
    # Add to `memo` before visiting the submodules, in case the module contains itself.
    container = memo[module] = make(entries, _NO_BATCH, None, None)
    state = module.__dict__
    for table in (state["_parameters"], state["_buffers"]):
        for name, value in table.items():
            if value is not None:
                entries[name] = value
    for name, child in state["_modules"].items():
        if child is not None:
            inner = _collect_entries(child, filter_empty, memo, make)
            if not filter_empty or inner._entries:
                entries[name] = inner
    return container


def _stack_leaves(leaves: list[Any], expand_identical: bool) -> Any:
    """Stack the same leaf of all modules of an ensemble."""
    first = leaves[0]
    kinds = {is_parameter(leaf) for leaf in leaves}
    grads = {leaf.requires_grad for leaf in leaves}
    lazy = sum(map(is_lazy, leaves))
    if 0 < lazy < len(leaves):
        raise RuntimeError(f"in {lazy} of the {len(leaves)} modules, {_NO_SIZE}")
    if len(kinds) > 1 or len(grads) > 1:
        raise RuntimeError("it is a parameter, or requires gradients, in some of the modules only: make them alike")
    if lazy:
        return stack_lazy_leaves(leaves)
    if expand_identical and all(leaf is first for leaf in leaves):
        return first.expand(len(leaves), *first.shape)
    with torch.no_grad():
        stack = torch.stack(leaves)
    if is_parameter(first):
        return nn.Parameter(stack, requires_grad=first.requires_grad)
    return as_buffer(stack.requires_grad_(first.requires_grad))


# --- putting in -------------------------------------------------------------------------------------------------------


class _Slot(NamedTuple):
    """An entry of a module to replace, and its replacement."""

    table: dict[str, Any]
    name: str
    old: Any
    new: Any
    # The entries of the container with the new tensor, and of the container that receives the old one.
    source: Any
    kept: dict[str, Any]
    # The table for the new tensor if it differs: a parameter becomes a plain attribute, or the reverse.
    target: dict[str, Any] | None = None


# Lazy modules whose next call determines the sizes of stacks, with the slots of these stacks.
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
    """Append the slots of all entries, and return the container that receives the old entries.

    Args:
        container: the new entries.
        module: the module to change.
        slots: receives the slots.
        firsts: receives the lazy modules.
        memo: the results for visited modules, by `id`.
        preserve: see `preserve_module_state` of :meth:`Modules.to_module`.
        lasting: True if the change outlasts the call, so that it cannot be in a `with` statement.
    """
    done = memo.get(id(module))
    if done is not None:
        return done
    if isinstance(module, Contract):
        return _plan_container(container, module, slots, memo, preserve, lasting)
    state = module.__dict__
    parameters, buffers, modules = state["_parameters"], state["_buffers"], state["_modules"]
    kept: dict[str, Any] = {}
    # A submodule that occurs twice is visited once.
    result = memo[id(module)] = makers.dense(kept, _NO_BATCH, None, None)
    entries = container._entries
    for name, value in entries.items():
        if (old := parameters.get(name)) is not None:
            if is_parameter(value):
                slots.append(_Slot(parameters, name, old, value, entries, kept))
            elif preserve:
                slots.append(_Slot(parameters, name, old, _as_parameter(value, old, lasting), entries, kept))
            else:
                slots.append(_Slot(parameters, name, old, value, entries, kept, state))
        elif (old := buffers.get(name)) is not None:
            if not preserve and is_parameter(value):
                slots.append(_Slot(buffers, name, old, value, entries, kept, parameters))
                continue
            slots.append(_Slot(buffers, name, old, _without_parameter(value), entries, kept))
        elif (child := modules.get(name)) is not None and isinstance(value, Contract):
            kept[name] = _plan(value._wrapped_container(), child, slots, firsts, memo, preserve, lasting)
        elif isinstance(old := state.get(name), Tensor) and not isinstance(value, Contract):
            # A plain attribute, left by a call without `preserve_module_state`. A parameter is registered again.
            slots.append(_Slot(state, name, old, value, entries, kept, parameters if is_parameter(value) else None))
        else:
            raise _unfit_error(container, module, name)
    # Lazy modules keep this hook until their first call.
    if "_initialize_hook" in state and (own := [s for s in slots if is_element(s.new) and s.source is entries]):
        firsts.append((module, own))
    return result


def _plan_container(
    container: Any, module: Any, slots: list[_Slot], memo: dict[int, Any], preserve: bool, lasting: bool
) -> Any:
    """Run `_plan` for a module that is a container, whose entries are replaced."""
    kept: dict[str, Any] = {}
    result = memo[id(module)] = makers.dense(kept, module._batch_size, None, None)
    theirs, entries = module._wrapped_container()._entries, container._entries
    for name, value in entries.items():
        old = theirs.get(name)
        if old is None or isinstance(old, Contract) is not isinstance(value, Contract):
            raise _unfit_error(container, module, name)
        if isinstance(old, Contract):
            kept[name] = _plan_container(value._wrapped_container(), old, slots, memo, preserve, lasting)
        else:
            if preserve and is_parameter(old) and not is_parameter(value):
                value = _as_parameter(value, old, lasting)
            slots.append(_Slot(theirs, name, old, value, entries, kept))
    return result


class _RequireGrad(torch.autograd.Function):
    """Returns a tensor on the same memory that requires gradients if a parameter does, and does not pass them on."""

    @staticmethod
    def forward(ctx: object, value: Tensor, parameter: nn.Parameter) -> Tensor:
        # Not a view: autograd would forbid changing it in place.
        return value.detach()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[None, None]:
        return None, None


def _as_parameter(value: Tensor, old: nn.Parameter, lasting: bool) -> Tensor:
    """Convert a tensor to a parameter like `old`. A tensor that requires gradients or is mapped does not change."""
    if value.requires_grad:
        return value
    if torch.compiler.is_compiling():
        if internals.transforms_active() or internals.is_exporting():
            return value
        # Dynamo can make parameters only of inputs of the graph, not of tensors that the graph computes.
        if not lasting:
            return _RequireGrad.apply(value, old) if old.requires_grad else value  # type: ignore[no-untyped-call]
    elif internals.is_transformed(value):
        return value
    return nn.Parameter(value, requires_grad=old.requires_grad)


def _without_parameter(value: Any) -> Any:
    """Return a buffer on the memory of a parameter that replaces a buffer; any other value unchanged."""
    if not is_parameter(value) or is_lazy(value) or torch.compiler.is_compiling() or internals.is_transformed(value):
        return value
    return nn.Buffer(value)


def _put_in(
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
        # The function under `torch.vmap` may call `to_module` again, so the stack may be in both places.
        places = [([slot.target or slot.table, slot.source], slot.name, slot.new) for slot in own]
        stops.append(initialize_with_first_call(module, places))
    return partial(_put_back, slots, orders, stops, container._locked)


def _put_back(
    slots: list[_Slot], orders: list[tuple[dict[str, Any], list[str]]], stops: list[Any], locked: bool, swap: object
) -> Any:
    """Undo `_put_in`, even if the module has changed since."""
    for stop in stops:
        stop()
    for table, name, old, new, source, _, target in slots:
        current = table.get(name) if target is None else target.pop(name, new)
        table[name] = old
        if current is not new and current is not None and not locked:
            source[name] = current
    for table, order in orders:
        # Entries that were removed and restored are now last. Restore the order, which optimizers rely on.
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
                f"{slot.name!r} has shape {list(slot.new.shape)} and cannot be copied into the tensor of the module, "
                f"which has shape {list(slot.old.shape)}; inplace=False replaces it"
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
    """Load the entries with `load_state_dict`. Returns the container of old entries, and a function that undoes it."""
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


def _unfit_error(container: Contract, module: object, name: str) -> ModuleError:
    """Return the error about entries that do not fit a module."""
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
