"""The loader behind `load_state_dict`. It checks the whole state dict before it writes, and lists all misfits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tensordict.core import foreach, makers, ragged
from tensordict.core.context import same_memory
from tensordict.core.contract import Contract
from tensordict.core.equality import same_value
from tensordict.core.exceptions import LockedError, StateError
from tensordict.core.keys import Path, joined
from tensordict.io.specification import DICT, LAZY, OWN, UNBATCHED, Specification, check, tensorclass_over, to_container
from tensordict.io.states import (
    CLASS,
    LISTS,
    NAMES,
    SIZE,
    STACK_DIM,
    UNBATCHED_NAMES,
    UNFIT,
    VALUES,
    Level,
    parse_state,
    split_members,
)
from tensordict.memory.mapped import MemoryMappedTensor

# The types of tensors that one call of `foreach.copy_` may copy together.
_PLAIN = (Tensor, torch.nn.Parameter, MemoryMappedTensor)


def load_state(
    container: Contract, state: Mapping[str, Any], strict: bool, assign: bool, from_flatten: bool | None
) -> None:
    """Load a state dict into a container; see `TensorDict.load_state_dict`."""
    plan = _LoadPlan(strict, assign)
    plan.match(container, parse_state(state, container, from_flatten), ())
    plan.check(type(container).__name__)
    plan.run()


class _LoadPlan:
    """The copies and actions that load a state dict, and the problems that forbid it."""

    def __init__(self, strict: bool, assign: bool) -> None:
        self.strict = strict
        self.assign = assign
        self.missing: dict[Path, None] = {}
        self.unexpected: dict[Path, None] = {}
        self.misfits: list[str] = []
        self.locked: Path | None = None
        self.targets: list[Tensor] = []
        self.sources: list[Tensor] = []
        self.actions: list[Callable[[], object]] = []

    # --- matching ---------------------------------------------------------------------------------------------------

    def match(self, container: Any, level: Level, key: Path) -> torch.Size:
        """Plan to load a level into a container.

        Returns:
            the batch size of the container after loading.
        """
        node = container._wrapped_container()
        if node._is_non_tensor:
            self._match_value(node, level, key)
            return node._batch_size  # type: ignore[no-any-return]
        if level.is_value:
            self._add_misfit(key, "it is a container, and a value in the state dict")
            return node._batch_size  # type: ignore[no-any-return]
        if hasattr(node, "stack_dim"):
            self._match_stack(node, level, key)
            return node._batch_size  # type: ignore[no-any-return]
        size = torch.Size(level.meta[SIZE]) if level.meta.get(SIZE) is not None else node._batch_size
        fresh = not key and not node._entries
        if fresh and level.kind == LAZY and level.entries:
            self._add_misfit(
                key,
                "it is a lazy stack of unequal members, which an empty container cannot become: load it "
                "into a lazy stack",
            )
            return size
        self._match_values(container, level, size, key, fresh)
        for name, item in level.entries.items():
            path = (*key, name)
            current = node._writable().get(name)
            if item is UNFIT:
                continue
            if current is None:
                self._plan_new_entry(container, level, name, item, size, path, fresh)
            elif isinstance(current, Contract) and not isinstance(current, Tensor):
                self._match_node(node, name, current, item, size, path)
            else:
                self._match_leaf(container, name, current, item, size, path)
        for name, current in node._entries.items():
            if name not in level.entries:
                self._keep_entry(level, current, size, (*key, name))
        self._plan_resize(node, level, size, fresh)
        return size

    def _match_node(self, parent: Any, name: str, current: Any, item: Any, size: torch.Size, key: Path) -> None:
        if isinstance(item, Level):
            inner = self.match(current, item, key) if not current._is_non_tensor else current._batch_size
            if not current._is_non_tensor:
                self._check_shape(inner, size, key)
                return
            if not item.is_value:
                self._add_misfit(key, "it is a value, and a container in the state dict")
                return
        elif not current._is_non_tensor:
            self._add_misfit(key, f"it is a container, and a {type(item).__name__} in the state dict")
            return
        self._plan_value(parent, name, current, item, size, key)

    def _plan_value(self, parent: Any, name: str, current: Any, item: Any, size: torch.Size, key: Path) -> None:
        """Plan the new value of a holder, unless it is equal to the old one and fits the batch size of the parent."""
        own = current._batch_size
        if own[: len(size)] != size:
            self._plan_write(parent, name, self._make_holder(item, size, current._device, key), key)
            return
        holder = self._make_holder(item, own, current._device, key)
        if holder is None or (holder._batch_size == own and _have_equal_values(holder, current)):
            return
        try:
            self.actions.append(current._replacing(parent, name, holder, (), own, key))
        except (RuntimeError, TypeError) as error:
            self.misfits.append(str(error))

    def _make_holder(self, item: object, size: torch.Size, device: torch.device | None, key: Path) -> Any:
        """Return a holder with this batch size for a value of a state dict; `None` after a misfit."""
        if isinstance(item, Level) and LISTS in item.meta:
            return self._build(item, size, device, key)
        if isinstance(item, Contract):
            return item
        value = item.value if isinstance(item, Level) else item
        return makers.value(value, size, device)

    def _match_value(self, node: Any, level: Level, key: Path) -> None:
        """Plan to load a holder that is the root itself."""
        if not level.is_value:
            self._add_misfit(key, "it is a value, and a container in the state dict")
            return
        holder = self._make_holder(level, node._batch_size, node._device, key)
        if holder is not None:
            self.actions.append(lambda: node.update_(holder))

    def _match_values(self, container: Any, level: Level, size: torch.Size, key: Path, fresh: bool) -> None:
        """Plan to load the values of a tensorclass, which its own metadata contains."""
        fields = level.meta.get(VALUES)
        if not isinstance(fields, Mapping):
            return
        node = container._wrapped_container()
        for name, value in fields.items():
            path = (*key, name)
            current = node._writable().get(name)
            if value is None or name in level.entries:
                continue
            if isinstance(current, Contract) and current._is_non_tensor:
                self._plan_value(node, name, current, value, size, path)
            elif current is None and (fresh or not self.strict):
                self._plan_write(container, name, self._make_holder(value, size, node._device, path), path)
            else:
                self.unexpected[path] = None

    def _match_leaf(
        self, container: object, name: str, current: Tensor, item: object, size: torch.Size, key: Path
    ) -> None:
        if isinstance(item, (bool, int, float, complex)) or hasattr(item, "__array__"):
            item = torch.as_tensor(item)
        if not isinstance(item, Tensor):
            kind = "container" if isinstance(item, Level) else type(item).__name__
            self._add_misfit(key, f"it is a tensor, and a {kind} in the state dict")
            return
        bound = torch.Size(()) if isinstance(current, Contract) else size
        if self.assign:
            self._check_shape(ragged.shape_of(item), bound, key)
            value = type(current)(item, current._batch_size) if isinstance(current, Contract) else item
            self._plan_write(container, name, value, key)
            return
        if self._plan_copy(current, item, key):
            self._check_shape(ragged.shape_of(current), bound, key)

    def _plan_copy(self, current: Any, item: Any, key: Path) -> bool:
        """Plan to copy a tensor into a leaf. Returns False after a misfit."""
        if current.is_nested or item.is_nested:
            return self._plan_row_copies(current, item, key)
        if current.shape != item.shape:
            self._add_misfit(key, f"its shape is {list(current.shape)}, and {list(item.shape)} in the state dict")
        elif item.is_meta and not current.is_meta:
            self._add_misfit(key, "it has no content in the state dict, where it is on the meta device")
        elif item.is_complex() and not current.is_complex():
            self._add_misfit(key, f"it is of {current.dtype}, which cannot hold {item.dtype}")
        elif current.layout is torch.strided and any(
            step == 0 and count > 1 for step, count in zip(current.stride(), current.shape, strict=True)
        ):
            self._add_misfit(key, "it is expanded and cannot be written in place: pass assign=True")
        else:
            self._add_copy(current, item)
            return True
        return False

    def _plan_row_copies(self, current: Any, item: Any, key: Path) -> bool:
        try:
            if not current.is_nested:
                raise ValueError("it is a dense tensor, and a ragged one in the state dict")
            targets, sources = ragged.pair_copies(current, item)
        except (RuntimeError, ValueError) as error:
            self._add_misfit(key, str(error))
            return False
        for target, source in zip(targets, sources, strict=True):
            self._add_copy(target, source)
        return True

    def _add_copy(self, target: Tensor, source: Tensor) -> None:
        """Add a copy to the plan, unless a distributed checkpoint has already loaded the source into the target."""
        if type(target) in _PLAIN and type(source) in _PLAIN and target.layout is source.layout is torch.strided:
            if not same_memory(target, source):
                self.targets.append(target)
                self.sources.append(source)
        else:
            self.actions.append(lambda: target.copy_(source))

    def _match_stack(self, stack: Any, level: Level, key: Path) -> None:
        """Plan to load the members of a lazy stack, each from its own part."""
        members = stack._members()
        if not members:
            return
        levels = split_members(level, len(members), stack.stack_dim, key, self.misfits)
        for member, part in zip(members, levels, strict=False):
            size = self.match(member, part, key)
            if size != member._batch_size:
                self._add_misfit(
                    key,
                    f"a member of a lazy stack has batch size {list(member._batch_size)}, and {list(size)} "
                    "in the state dict",
                )

    # --- entries of one side ----------------------------------------------------------------------------------------

    def _plan_new_entry(
        self, container: Any, level: Level, name: str, item: Any, size: torch.Size, key: Path, fresh: bool
    ) -> None:
        if (self.strict and not fresh) or not self._accepts(container, name):
            self.unexpected[key] = None
            return
        if isinstance(item, Level):
            value = self._build(item, size, container._device, key)
            if value is None:
                return
            self._check_shape(value._batch_size, size, key)
        elif name in level.meta.get(UNBATCHED_NAMES, ()) and isinstance(item, Tensor):
            value = to_container(Specification(UNBATCHED, size, entries={OWN: item}))
        else:
            value = item
            if isinstance(item, Tensor):
                self._check_shape(ragged.shape_of(item), size, key)
        self._plan_write(container, name, value, key)

    def _accepts(self, container: object, name: str) -> bool:
        known = getattr(type(container), "__expected_keys__", None)
        return not known or name in known

    def _keep_entry(self, level: Level, current: Any, size: torch.Size, key: Path) -> None:
        """Keep an entry that the state dict lacks, which is a problem if loading is strict."""
        shape = current._batch_size if isinstance(current, Contract) else ragged.shape_of(current)
        self._check_shape(
            shape, torch.Size(()) if isinstance(current, Tensor) and isinstance(current, Contract) else size, key
        )
        if not self.strict:
            return
        if isinstance(current, Contract) and not isinstance(current, Tensor):
            in_fields = key[-1] in (level.meta.get(VALUES) or ())
            # Values and empty containers are in the metadata only, and some programs save a state dict without it.
            if in_fields or (SIZE not in level.meta and not current._leaves()):
                return
        self.missing[key] = None

    def _plan_write(self, container: Any, name: str, value: Any, key: Path) -> None:
        """Plan to write an entry, new or not."""
        if container._locked and self.locked is None:
            self.locked = key
        self.actions.append(lambda: container._write_name(name, value))

    def _plan_resize(self, node: Contract, level: Level, size: torch.Size, fresh: bool) -> None:
        names = level.meta.get(NAMES)
        keeps = node._names is not None and len(node._names) == len(size) and not fresh
        if not keeps and not (isinstance(names, list) and len(names) == len(size)):
            names = None
        if size != node._batch_size or fresh:
            self.actions.insert(0, lambda: _resize(node, size, node._names if keeps else names))

    # --- new containers ---------------------------------------------------------------------------------------------

    def _build(self, level: Level, size: torch.Size, device: torch.device | None, key: Path) -> Any:
        """Build the container that a level describes; `None` after a misfit."""
        node = self._specify(level, size, device, key)
        try:
            return None if node is None else to_container(node, key)
        except (RuntimeError, ValueError) as error:
            self.misfits.append(str(error))
            return None

    def _specify(self, level: Level, size: torch.Size, device: torch.device | None, key: Path) -> Specification | None:
        """Return the specification of the container that a level describes; `None` after a misfit."""
        before, meta = len(self.misfits), level.meta
        own = torch.Size(meta[SIZE]) if meta.get(SIZE) is not None else size
        names = meta.get(NAMES) if isinstance(meta.get(NAMES), list) else None
        node = Specification(DICT, own, device, names)
        try:
            self._fill(node, level, key)
            if len(self.misfits) > before:
                return None
            check(node, key)
            return node if CLASS not in meta else check(tensorclass_over(str(meta[CLASS]), node), key)
        except (RuntimeError, ValueError) as error:
            self.misfits.append(str(error))
            return None

    def _fill(self, node: Specification, level: Level, key: Path) -> None:
        """Set the kind and the content of a specification."""
        meta, size, device = level.meta, node.batch_size, node.device
        dim = meta.get(STACK_DIM)
        if level.is_value:
            node.kind, node.value = str(level.kind), level.value
            node.stack_dim = dim if LISTS in meta else None
            return
        if type(dim) is int and 0 <= dim < len(size) and size[dim]:
            rest = size[:dim] + size[dim + 1 :]
            members = map(_drop_class, split_members(level, size[dim], dim, key, self.misfits))
            node.kind, node.stack_dim = LAZY, dim
            node.entries = {str(i): self._specify(member, rest, device, key) for i, member in enumerate(members)}
            return
        entries: dict[str, Any] = {}
        for name, item in level.entries.items():
            if isinstance(item, Level):
                entries[name] = self._specify(item, size, device, (*key, name))
            elif not isinstance(item, Tensor):
                entries[name] = Specification("NonTensorData", size, device, value=item)
            elif name in meta.get(UNBATCHED_NAMES, ()):
                entries[name] = Specification(UNBATCHED, size, entries={OWN: item})
            else:
                entries[name] = item
        if CLASS in meta:
            for name, value in dict(meta.get(VALUES) or {}).items():
                if value is not None and name not in entries:
                    entries[name] = Specification("NonTensorData", size, device, value=value)
        node.entries = entries

    # --- problems, and running the plan -----------------------------------------------------------------------------

    def _add_misfit(self, key: Path, what: str) -> None:
        self.misfits.append(f"entry {joined(key)!r}: {what}" if key else what)

    def _check_shape(self, shape: torch.Size, size: torch.Size, key: Path) -> None:
        if shape[: len(size)] != size:
            self._add_misfit(key, f"its shape {list(shape)} does not begin with the batch size {list(size)}")

    def check(self, name: str) -> None:
        """Raise an error that lists all problems, if there are any."""
        problems = []
        if self.missing:
            problems.append(f"missing in the state dict: {_list_keys(self.missing)}")
        if self.unexpected:
            problems.append(f"not in the container: {_list_keys(self.unexpected)}")
        problems += dict.fromkeys(self.misfits)
        if problems:
            hint = "; strict=False loads what both have" if self.missing or self.unexpected else ""
            raise StateError(f"cannot load the state dict into the {name}: " + "; ".join(problems) + hint)
        if self.locked is not None:
            raise LockedError(
                f"cannot set the entry {joined(self.locked)!r} of a locked container: unlock_() it first, or load its "
                "existing entries in place (assign=False)"
            )

    def run(self) -> None:
        """Write all copies, and then run the other actions."""
        with torch.no_grad():
            foreach.copy_(self.targets, self.sources)
            for action in self.actions:
                action()


def _resize(node: Contract, size: torch.Size, names: list[str | None] | None) -> None:
    node._batch_size = size
    node._names = names


def _have_equal_values(holder: Any, current: Any) -> bool:
    mine, theirs = holder._flat_values(), current._flat_values()
    return len(mine) == len(theirs) and all(map(same_value, mine, theirs))


def _drop_class(level: Level) -> Level:
    """Remove the class from the level of a member: the tensorclass wraps the stack, and not its members."""
    bare = Level({name: value for name, value in level.meta.items() if name != CLASS})
    bare.entries = level.entries
    return bare


def _list_keys(keys: Mapping[Path, Any]) -> str:
    texts = [repr(joined(key)) for key in keys]
    return ", ".join(texts[:20]) + (f" and {len(texts) - 20} more" if len(texts) > 20 else "")
