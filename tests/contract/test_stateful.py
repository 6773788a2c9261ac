"""A state machine that does the same to a container and to a plain dict of tensors, and compares after each step."""

from __future__ import annotations

import pathlib
import tempfile
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from contract.kinds import KINDS, Kind
from contract.model import Plain, assert_matches, changed, index_map, leaves, mapped, nested_keys
from strategies import indices, simple_names, trees
from strategies import leaves as drawn_leaves
from tensordict import TensorDict

PATHS = st.lists(st.sampled_from(["a", "b", "c", "d", "mask"]), min_size=1, max_size=3).map(tuple)


class ContainerMachine(RuleBasedStateMachine):
    """Random operations on a container of `kind`; the plain dict says what must come of them."""

    kind: Kind

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.plain: Plain = self.kind.plain()
        self.td = self.kind.build(self.kind.plain(), self.kind, pathlib.Path(self.folder.name))
        self.locked = self.kind.locked

    def teardown(self) -> None:
        self.folder.cleanup()

    # What the plain dict says.

    def find(self, path: tuple[str, ...]) -> Any:
        """The tensor or dict at this path, or None."""
        found: Any = self.plain
        for name in path:
            found = found.get(name) if isinstance(found, dict) else None
        return found

    def blocked(self, path: tuple[str, ...]) -> bool:
        """Whether a leaf stands where the path needs a dict."""
        return any(isinstance(self.find(path[:i]), torch.Tensor) for i in range(1, len(path)))

    def node_for(self, path: tuple[str, ...]) -> Plain:
        """The dict that holds the last name of the path, made where it lacks."""
        node = self.plain
        for name in path[:-1]:
            node = node.setdefault(name, {})
        return node

    def extra(self, path: tuple[str, ...]) -> tuple[int, ...]:
        """The batch size that a value at this path must begin with."""
        size: tuple[int, ...] = self.kind.batch_size
        node = self.td
        for name in path[:-1]:
            node = node.get(name, None)
            if node is None or isinstance(node, torch.Tensor):
                break
            size = tuple(node.batch_size)
        return size

    def refused(self) -> Any:
        return pytest.raises((KeyError, RuntimeError, ValueError, AttributeError))

    def keeps_form(self, path: tuple[str, ...], value: Any) -> bool:
        """Whether writing keeps the tensor at this path, in a file, which is of another shape or dtype."""
        old = self.find(path)
        if not self.kind.index_writes or not isinstance(old, torch.Tensor) or not isinstance(value, torch.Tensor):
            return False
        return old.shape != value.shape or old.dtype != value.dtype

    # Single entries.

    @rule(path=PATHS, data=st.data())
    def set(self, path: tuple[str, ...], data: st.DataObject) -> None:
        value = data.draw(drawn_leaves(self.extra(path)))
        if self.locked or self.blocked(path):
            with self.refused():
                self.td.set(path, value)
            return
        options = {"overwrite": True} if self.keeps_form(path, value) else {}
        self.td.set(path, value.clone(), **options)
        self.node_for(path)[path[-1]] = value

    @rule(path=PATHS)
    def set_in_place(self, path: tuple[str, ...]) -> None:
        old = self.find(path)
        if not isinstance(old, torch.Tensor):
            return
        self.td.set_(path, fresh(old))
        self.node_for(path)[path[-1]] = fresh(old)

    @rule(path=PATHS)
    def delete(self, path: tuple[str, ...]) -> None:
        if self.find(path) is None or self.locked:
            with self.refused():
                self.td.del_(path)
            return
        self.td.del_(path)
        del self.node_for(path)[path[-1]]

    @rule(path=PATHS)
    def pop(self, path: tuple[str, ...]) -> None:
        expected = self.find(path)
        if self.locked and expected is not None:
            with self.refused():
                self.td.pop(path, None)
            return
        if self.blocked(path):
            return
        found = self.td.pop(path, None)
        assert (found is None) == (expected is None)
        if expected is not None:
            del self.node_for(path)[path[-1]]

    @rule(old=PATHS, new=PATHS)
    def rename(self, old: tuple[str, ...], new: tuple[str, ...]) -> None:
        value = self.find(old)
        apart = new[: len(old)] != old and old[: len(new)] != new
        same_batch = self.extra(new) == self.extra(old)
        if not apart or not same_batch:
            return
        if value is None or self.locked or self.blocked(new):
            with self.refused():
                self.td.rename_key_(old, new)
            return
        self.td.rename_key_(old, new)
        del self.node_for(old)[old[-1]]
        self.node_for(new)[new[-1]] = value

    @rule(path=PATHS)
    def get(self, path: tuple[str, ...]) -> None:
        if self.blocked(path):
            return
        assert (self.td.get(path, None) is None) == (self.find(path) is None)
        assert (path in self.td.keys(True)) == (self.find(path) is not None)

    @precondition(lambda self: not self.locked)
    @rule(path=PATHS)
    def create_nested(self, path: tuple[str, ...]) -> None:
        if self.blocked(path) or self.find(path) is not None:
            return
        self.td.create_nested(path)
        self.node_for(path)[path[-1]] = {}

    # Many entries.

    @rule(data=st.data())
    def update(self, data: st.DataObject) -> None:
        new = data.draw(trees(self.kind.batch_size, simple_names(), min_size=1))
        if any(self.extra(path) != self.kind.batch_size for path in nested_keys(new)):
            return
        if self.locked:
            # A source of existing nodes without leaves changes nothing, so it need not be refused.
            if leaves(new):
                with self.refused():
                    self.td.update(new)
            return
        for path, value in leaves(new).items():
            if self.keeps_form(path, value):
                # `update` would write into the tensor that is there.
                self.td.set(path, value.clone(), overwrite=True)
        self.td.update(mapped(torch.clone, new))
        merge(self.plain, new)

    @precondition(lambda self: not self.locked)
    @rule(name=simple_names())
    def failing_update(self, name: str) -> None:
        if not self.kind.batch_size:
            return
        good = torch.zeros(self.kind.batch_size)
        with pytest.raises((RuntimeError, ValueError)):
            self.td.update({name: good, "fresh": good, "wrong": torch.zeros(9, 9)})

    @rule()
    def update_in_place(self) -> None:
        self.plain = mapped(fresh, self.plain)
        self.td.update_(TensorDict(dict(leaves(self.plain)), self.kind.batch_size))

    @rule()
    def apply_in_place(self) -> None:
        self.plain = mapped(fresh, self.plain)
        self.td.apply_(fresh)

    @rule()
    def zero(self) -> None:
        self.plain = mapped(torch.zeros_like, self.plain)
        self.td.zero_()

    @rule(data=st.data())
    def assign(self, data: st.DataObject) -> None:
        index = data.draw(indices(self.kind.batch_size))
        value = data.draw(st.sampled_from([0, 1]))
        numbers = index_map(self.kind.batch_size)[index]
        self.td[index] = value

        def filled(leaf: torch.Tensor) -> torch.Tensor:
            flat = leaf.reshape(
                index_map(self.kind.batch_size).numel(), *leaf.shape[len(self.kind.batch_size) :]
            ).clone()
            flat[numbers] = value
            return flat.reshape(leaf.shape)

        self.plain = mapped(filled, self.plain)

    @precondition(lambda self: not self.locked)
    @rule(data=st.data())
    def select_or_exclude(self, data: st.DataObject) -> None:
        keys = data.draw(st.lists(st.sampled_from(sorted(self.plain) or ["a"]), unique=True))
        if data.draw(st.booleans()):
            self.td.exclude(*keys, inplace=True)
            self.plain = {name: value for name, value in self.plain.items() if name not in keys}
        else:
            self.td.select(*keys, inplace=True, strict=False)
            self.plain = {name: value for name, value in self.plain.items() if name in keys}

    @precondition(lambda self: not self.locked and len(self.plain) > 6)
    @rule()
    def clear(self) -> None:
        self.td.clear()
        self.plain = {}

    # Locks and blocks.

    @rule()
    def lock(self) -> None:
        self.td.lock_()
        self.locked = True

    @rule()
    def unlock(self) -> None:
        self.td.unlock_()
        self.locked = False

    @precondition(lambda self: not self.locked)
    @rule(name=simple_names())
    def write_in_a_view(self, name: str) -> None:
        ramp = index_map(self.kind.batch_size)
        with self.td.unsqueeze(0) as view:
            view[name] = ramp.clone().unsqueeze(0)
        self.plain[name] = ramp

    @precondition(lambda self: not self.locked)
    @rule(name=simple_names())
    def write_flat(self, name: str) -> None:
        ramp = index_map(self.kind.batch_size)
        if name in self.plain:
            return
        with self.td.flatten_keys("_") as flat:
            flat[f"{name}_x"] = ramp.clone()
        self.plain[name] = {"x": ramp}

    @rule()
    def copies_change_nothing(self) -> None:
        copy = self.td.clone()
        copy.zero_()
        copy.clear()

    # After each step.

    @invariant()
    def same_content(self) -> None:
        assert_matches(self.td, self.plain, self.kind.batch_size)

    @invariant()
    def same_order(self) -> None:
        if self.kind.keeps_order:
            assert list(self.td.keys()) == list(self.plain)

    @invariant()
    def same_lock(self) -> None:
        assert self.td.is_locked == self.locked
        for value in self.td.values(True):
            assert isinstance(value, torch.Tensor) or value.is_locked == self.locked


def fresh(leaf: torch.Tensor) -> torch.Tensor:
    """Other values of the same form, in any dtype."""
    return leaf + 1 if leaf.is_complex() or (leaf.dtype is torch.uint8) else changed(leaf)


def merge(plain: Plain, new: Plain) -> None:
    for name, value in new.items():
        if isinstance(value, dict) and isinstance(plain.get(name), dict):
            merge(plain[name], value)
        else:
            plain[name] = value


@pytest.mark.parametrize("programs", [8, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_like_a_plain_dict(kind: Kind, programs: int) -> None:
    if kind.reason_to_skip:
        pytest.skip(kind.reason_to_skip)
    machine = type("Machine", (ContainerMachine,), {"kind": kind})
    run_state_machine_as_test(machine, settings=settings(max_examples=programs, stateful_step_count=25))
