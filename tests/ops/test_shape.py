"""Shape operations do to the batch dims of every entry what torch does to a tensor of the batch's shape."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cases import mark_slow
from tensordict import TensorDict, lazy_stack, set_lazy_legacy

SIZE = (3, 1, 4)


def make(size: tuple[int, ...] = SIZE, names: list[str | None] | None = None) -> TensorDict:
    """Entries with no, one and two feature dims, and nested containers with the parent's size and a longer one."""
    count = torch.Size(size).numel()
    td = TensorDict(
        {
            "flat": torch.arange(count).reshape(size),
            "wide": torch.arange(count * 2.0).reshape(*size, 2),
            "nested": {"deep": torch.arange(count * 6).reshape(*size, 2, 3)},
        },
        batch_size=size,
    )
    td["longer"] = TensorDict({"leaf": torch.arange(count * 10).reshape(*size, 5, 2)}, [*size, 5])
    if names is not None:
        td.names = names
    return td


def expected(leaf: Tensor, batch_dims: int, op: Callable[[Tensor], Tensor]) -> Tensor:
    """`op` applied to the batch dims of `leaf`: to each of its feature columns alone, as a tensor of the batch."""
    features = leaf.shape[batch_dims:]
    columns = leaf.reshape(*leaf.shape[:batch_dims], features.numel())
    done = [op(columns[..., i]) for i in range(features.numel())]
    return torch.stack(done, -1).reshape(*done[0].shape, *features)


def check(td: TensorDict, op: Callable[[Any], Any]) -> TensorDict:
    result = op(td)
    lead = td.batch_dims
    assert result.batch_size == op(torch.zeros(td.batch_size)).shape
    keys = list(td.keys(True, True))
    assert list(result.keys(True, True)) == keys
    for key in keys:
        want = expected(td[key], lead, op)
        assert result[key].shape == want.shape
        assert torch.equal(result[key], want), key
    assert result["nested"].batch_size == result.batch_size
    assert result["longer"].batch_size == (*result.batch_size, 5)
    return result


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "view": lambda x: x.view(-1),
    "view two dims": lambda x: x.view(4, 3),
    "view sequence": lambda x: x.view((2, -1, 1)),
    "reshape": lambda x: x.reshape(-1),
    "reshape two dims": lambda x: x.reshape([4, 3]),
    "flatten": lambda x: x.flatten(),
    "flatten some": lambda x: x.flatten(1, -1),
    "flatten one": lambda x: x.flatten(1, 1),
    "unflatten": lambda x: x.unflatten(-1, (2, -1)),
    "unflatten first": lambda x: x.unflatten(0, [1, 3]),
    "permute swap": lambda x: x.permute(2, 1, 0),
    "permute cycle": lambda x: x.permute(-1, 0, 1),
    "permute sequence": lambda x: x.permute((1, 2, 0)),
    "permute keyword": lambda x: x.permute(dims=(1, 2, 0)),
    "permute identity": lambda x: x.permute(0, 1, 2),
    "transpose": lambda x: x.transpose(0, -1),
    "transpose same": lambda x: x.transpose(1, 1),
    "movedim": lambda x: x.movedim(0, -1),
    "movedim many": lambda x: x.movedim((0, 1), (2, 0)),
    "moveaxis": lambda x: x.moveaxis(2, 0),
    "swapaxes": lambda x: x.swapaxes(0, 1),
    "swapdims": lambda x: x.swapdims(1, 2),
    "squeeze": lambda x: x.squeeze(),
    "squeeze dim": lambda x: x.squeeze(-2),
    "squeeze nothing": lambda x: x.squeeze(0),
    "squeeze dims": lambda x: x.squeeze((0, 1)),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "unsqueeze last": lambda x: x.unsqueeze(-1),
    "unsqueeze end": lambda x: x.unsqueeze(3),
    "expand": lambda x: x.expand(3, 7, 4),
    "expand new": lambda x: x.expand(2, -1, 5, -1),
    "expand sequence": lambda x: x.expand((2, 3, 1, 4)),
    "broadcast_to": lambda x: x.broadcast_to((2, 3, 6, 4)),
    "expand_as": lambda x: x.expand_as(torch.zeros(2, 3, 1, 4)),
    "flip": lambda x: x.flip((0, -1)),
    "flipud": lambda x: x.flipud(),
    "fliplr": lambda x: x.fliplr(),
    "rot90": lambda x: x.rot90(1, (0, 2)),
    "rot90 back": lambda x: x.rot90(-1, (-1, 0)),
    "rot90 twice": lambda x: x.rot90(2, (0, 2)),
    "roll": lambda x: x.roll(1, 0),
    "roll dims": lambda x: x.roll((1, -3), (0, -1)),
    "roll flat": lambda x: x.roll(5),
    "repeat": lambda x: x.repeat(2, 1, 3),
    "repeat new": lambda x: x.repeat(2, 1, 3, 1),
    "repeat zero": lambda x: x.repeat(0, 1, 1),
    "tile": lambda x: x.tile((2,)),
    "tile new": lambda x: x.tile((2, 1, 1, 3)),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 0),
    "repeat_interleave last": lambda x: x.repeat_interleave(3, dim=-1),
    "repeat_interleave flat": lambda x: x.repeat_interleave(2),
    "repeat_interleave counts": lambda x: x.repeat_interleave(torch.tensor([1, 0, 2]), dim=0),
    "repeat_interleave size": lambda x: x.repeat_interleave(torch.tensor([1, 0, 2]), dim=0, output_size=3),
    "narrow": lambda x: x.narrow(0, 1, 2),
    "narrow back": lambda x: x.narrow(-1, -2, 1),
}


IN_PLACE = {
    "flatten": lambda x, **kw: x.flatten(1, 2, **kw),
    "unflatten": lambda x, **kw: x.unflatten(2, (2, 2), **kw),
    "roll": lambda x, **kw: x.roll(1, 0, **kw),
    "roll flat": lambda x, **kw: x.roll(1, **kw),
    "repeat": lambda x, **kw: x.repeat(2, 1, 1, **kw),
    "repeat_interleave": lambda x, **kw: x.repeat_interleave(2, 0, **kw),
    "repeat_interleave flat": lambda x, **kw: x.repeat_interleave(2, **kw),
    "gather": lambda x, **kw: x.gather(2, torch.zeros(3, 1, 2, dtype=torch.long), **kw),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_does_to_batch_dims_what_torch_does(name: str) -> None:
    check(make(), OPERATIONS[name])


@pytest.mark.parametrize("name", OPERATIONS)
def test_locked_container_gives_locked_result(name: str) -> None:
    td = make().lock_()
    result = OPERATIONS[name](td)
    assert result.is_locked
    assert result["longer"].is_locked
    with pytest.raises(RuntimeError, match="locked"):
        result["new"] = torch.zeros(result.batch_size)


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_changes_the_container_itself(name: str) -> None:
    op = IN_PLACE[name]
    td = make(names=["x", "y", "z"])
    nested = td["nested"]
    want = op(td)
    assert op(td, inplace=True) is td
    assert td.batch_size == want.batch_size
    assert td.names == want.names
    assert td["nested"] is nested
    assert nested.batch_size == want.batch_size
    assert td["longer"].batch_size == want["longer"].batch_size
    for key in want.keys(True, True):
        assert torch.equal(td[key], want[key])


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_on_a_locked_container_changes_nothing(name: str) -> None:
    td = make()
    td["longer"].lock_()
    leaves = [td[key] for key in td.keys(True, True)]
    with pytest.raises(RuntimeError, match="locked"):
        IN_PLACE[name](td, inplace=True)
    assert td.batch_size == SIZE
    assert all(a is b for a, b in zip(leaves, [td[key] for key in td.keys(True, True)], strict=True))


def test_views_share_memory() -> None:
    td = make()
    for op in (
        lambda x: x.view(-1),
        lambda x: x.permute(2, 0, 1),
        lambda x: x.transpose(0, 1),
        lambda x: x.squeeze(),
        lambda x: x.unsqueeze(1),
        lambda x: x.narrow(0, 0, 3),
        lambda x: x.unflatten(2, (2, 2)),
    ):
        result = op(td)
        for key in td.keys(True, True):
            assert result[key].data_ptr() == td[key].data_ptr()


def test_operations_that_change_nothing_return_the_container() -> None:
    td = make()
    assert td.view(3, 1, 4) is td
    assert td.reshape(3, 1, 4) is td
    assert td.permute(0, 1, 2) is td
    assert td.transpose(1, 1) is td
    assert td.squeeze(0) is td
    assert td.atleast_3d() is td


@given(data=st.data())
def test_view_and_permute_agree_with_torch_on_any_size(data: st.DataObject) -> None:
    size = tuple(data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4)))
    count = torch.Size(size).numel()
    td = TensorDict({"a": torch.arange(count * 2).reshape(*size, 2)}, batch_size=size)
    order = data.draw(st.permutations(range(len(size))))
    assert torch.equal(td.permute(*order)["a"], td["a"].permute(*order, len(size)))
    flat = td.reshape(-1)
    assert flat.batch_size == (count,)
    assert torch.equal(flat["a"], td["a"].reshape(count, 2))
    assert torch.equal(flat.view(size)["a"], td["a"])
    source = data.draw(st.integers(-len(size), len(size) - 1))
    target = data.draw(st.integers(-len(size), len(size) - 1))
    assert td.movedim(source, target).batch_size == torch.zeros(size).movedim(source, target).shape


# --- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "names"),
    [
        (lambda x: x.view(-1), [None]),
        (lambda x: x.reshape(4, 3), [None, None]),
        (lambda x: x.flatten(1, 2), ["x", None]),
        (lambda x: x.flatten(0, 0), ["x", "y", "z"]),
        (lambda x: x.unflatten(2, (2, 2)), ["x", "y", None, "z"]),
        (lambda x: x.permute(2, 0, 1), ["z", "x", "y"]),
        (lambda x: x.transpose(0, 1), ["y", "x", "z"]),
        (lambda x: x.movedim(0, 2), ["y", "z", "x"]),
        (lambda x: x.squeeze(), ["x", "z"]),
        (lambda x: x.unsqueeze(1), ["x", None, "y", "z"]),
        (lambda x: x.expand(2, 3, 5, 4), [None, "x", "y", "z"]),
        (lambda x: x.flip(0), ["x", "y", "z"]),
        (lambda x: x.rot90(1, (0, 2)), ["z", "y", "x"]),
        (lambda x: x.roll(1, 0), ["x", "y", "z"]),
        (lambda x: x.narrow(0, 0, 1), ["x", "y", "z"]),
        (lambda x: x.repeat(2, 3, 1, 1), [None, "x", "y", "z"]),
        (lambda x: x.repeat_interleave(2, 1), ["x", "y", "z"]),
    ],
)
def test_names_follow_their_dims(op: Callable[[Any], Any], names: list[str | None]) -> None:
    result = op(make(names=["x", "y", "z"]))
    assert result.names == names
    assert result["nested"].names == names
    assert result["longer"].names == [*names, None]


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "op",
    [
        lambda x: x.flatten(0, 5),
        lambda x: x.unflatten(3, (2, 2)),
        lambda x: x.permute(0, 1, 3),
        lambda x: x.transpose(0, -4),
        lambda x: x.movedim(0, 3),
        lambda x: x.squeeze(3),
        lambda x: x.unsqueeze(4),
        lambda x: x.unsqueeze(-5),
        lambda x: x.flip(3),
        lambda x: x.rot90(1, (0, 3)),
        lambda x: x.roll(1, 3),
        lambda x: x.repeat_interleave(2, 3),
        lambda x: x.narrow(3, 0, 1),
        lambda x: x.narrow(0, 4, 1),
        lambda x: x.size(3),
    ],
)
def test_dims_out_of_range(op: Callable[[Any], Any]) -> None:
    with pytest.raises(IndexError):
        op(make())


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (lambda x: x.view(5), r"\[5\].*\[3, 1, 4\]"),
        (lambda x: x.view(-1, 5), r"\[-1, 5\]"),
        (lambda x: x.view(-1, -1), "only one"),
        (lambda x: x.reshape(2, 2), r"\[2, 2\]"),
        (lambda x: x.flatten(2, 1), "start_dim"),
        (lambda x: x.unflatten(2, (3, 2)), r"\[3, 2\]"),
        (lambda x: x.permute(0, 1), "each of the 3"),
        (lambda x: x.permute(0, 0, 1), "once"),
        (lambda x: x.expand(5, 1, 4), r"\[5, 1, 4\]"),
        (lambda x: x.expand(4), "fewer"),
        (lambda x: x.expand(-1, 3, 1, 4), "needs its size"),
        (lambda x: x.narrow(0, 2, 2), "does not fit"),
        (lambda x: x.repeat(2), r"\[3, 1, 4\]"),
        (lambda x: x.roll((1, 2), 0), "one shift per dim"),
        (lambda x: TensorDict(batch_size=[2]).fliplr(), "at least 2"),
    ],
)
def test_sizes_that_do_not_fit(op: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        op(make())


@pytest.mark.parametrize("bad", ["ab", 1.5, None])
def test_sizes_are_ints(bad: Any) -> None:
    with pytest.raises(TypeError):
        make().reshape(bad) if bad is not None else make().reshape(bad, 1)


def test_view_of_memory_that_does_not_allow_it_names_the_entry() -> None:
    td = TensorDict({"fine": torch.zeros(2, 3), "n": {"bad": torch.zeros(3, 2).t()}}, [2, 3])
    with pytest.raises(RuntimeError, match=r"\('n', 'bad'\)"):
        td.view(-1)
    assert td.reshape(-1)["n", "bad"].shape == (6,)


# --- view with a dtype ----------------------------------------------------------------------------------------------


def test_view_dtype() -> None:
    td = TensorDict({"a": torch.arange(4.0).reshape(2, 2), "b": {"c": torch.ones(2, 6)}}, [2])
    result = td.view(torch.int32)
    assert result.batch_size == (2,)
    assert torch.equal(result["a"], td["a"].view(torch.int32))
    assert result["b", "c"].dtype is torch.int32
    assert result["a"].data_ptr() == td["a"].data_ptr()


def test_view_dtype_that_breaks_the_batch_size() -> None:
    td = TensorDict({"a": torch.zeros(2, 4)}, [2, 4])
    with pytest.raises(RuntimeError, match="'a'.*batch_size"):
        td.view(torch.uint8)
    assert td.view(torch.uint8, batch_size=[2])["a"].shape == (2, 16)


# --- as a context manager -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "op",
    [
        lambda x: x.view(-1),
        lambda x: x.flatten(0, 1),
        lambda x: x.unflatten(2, (2, 2)),
        lambda x: x.permute(2, 0, 1),
        lambda x: x.permute(0, 1, 2),
        lambda x: x.transpose(0, 2),
        lambda x: x.squeeze(1),
        lambda x: x.squeeze(),
        lambda x: x.squeeze(0),
        lambda x: x.unsqueeze(0),
        lambda x: x.unsqueeze(-1),
    ],
)
def test_what_is_written_in_the_block_appears_in_the_original(op: Callable[[Any], Any]) -> None:
    td = make()
    kept = td["wide"]
    template = torch.arange(12).reshape(SIZE)
    with op(td) as inside:
        inside["new"] = op(template)
        inside["nested", "new"] = op(template)
        inside["flat"] = op(td["flat"]) + 1
        del inside["nested", "deep"]
    assert td.batch_size == SIZE
    assert td["wide"] is kept
    assert torch.equal(td["new"], template)
    assert torch.equal(td["nested", "new"], template)
    assert torch.equal(td["flat"], template + 1)
    assert ("nested", "deep") not in td.keys(True)


def test_what_was_written_survives_an_exception() -> None:
    td = make()
    with pytest.raises(ValueError, match="stop"), td.view(-1) as flat:  # noqa: PT012
        flat["new"] = torch.ones(12)
        raise ValueError("stop")
    assert td["new"].shape == SIZE


def test_a_view_does_not_keep_its_source_alive() -> None:
    td = make()
    view = td.view(-1)
    source = weakref.ref(td)
    del td
    gc.collect()
    assert source() is None
    assert view.batch_size == (12,)


# --- the batch size -------------------------------------------------------------------------------------------------


def test_sizes_and_dims() -> None:
    td = make()
    assert td.shape == td.batch_size == td.size() == torch.Size(SIZE)
    assert td.ndim == td.batch_dims == td.dim() == td.ndimension() == 3
    assert td.size(-1) == 4
    assert td.numel() == 12
    assert TensorDict(batch_size=[0]).numel() == 1


def test_batch_size_setter() -> None:
    td = make(names=["x", "y", "z"])
    td.batch_size = [3]
    assert td.batch_size == (3,)
    assert td.names == ["x"]
    assert td["nested"].batch_size == SIZE
    td.batch_size = SIZE
    assert td.names == ["x", None, None]


def test_batch_size_setter_extends_nested_containers() -> None:
    td = TensorDict({"a": {"b": torch.zeros(3, 4), "empty": {}}})
    td.batch_size = [3, 4]
    assert td["a"].batch_size == td["a", "empty"].batch_size == (3, 4)


def test_batch_size_that_does_not_fit_changes_nothing() -> None:
    td = TensorDict({"n": {"fits": torch.zeros(3, 4)}, "a": torch.zeros(3, 4), "m": {"b": torch.zeros(3)}}, [3])
    with pytest.raises(RuntimeError, match=r"\('m', 'b'\).*\[3, 4\]"):
        td.batch_size = [3, 4]
    assert td.batch_size == td["n"].batch_size == td["m"].batch_size == (3,)


def test_batch_size_of_a_locked_container_can_be_set() -> None:
    td = make().lock_()
    td.batch_size = [3, 1]
    assert td.batch_size == (3, 1)


def test_auto_batch_size() -> None:
    td = TensorDict({"a": torch.zeros(3, 4, 5), "b": {"c": torch.zeros(3, 4, 6), "empty": {}}})
    assert td.auto_batch_size_() is td
    assert td.batch_size == (3, 4)
    assert td["b"].batch_size == td["b", "empty"].batch_size == (3, 4, 6)
    td.auto_batch_size_(1)
    assert td.batch_size == td["b"].batch_size == (3,)
    td.auto_batch_size_(0)
    assert td.batch_size == ()


def test_auto_batch_size_keeps_compliant_sizes() -> None:
    td = TensorDict({"a": torch.zeros(3, 4), "b": TensorDict({"c": torch.zeros(3, 4, 5)}, [3, 4])}, [3])
    td.auto_batch_size_(1, keep_compliant_size=True)
    assert td.batch_size == (3,)
    assert td["b"].batch_size == (3, 4)


def test_auto_batch_size_of_containers_whose_batch_size_cannot_change() -> None:
    members = [TensorDict({"a": torch.zeros(3, 4)}, [3]) for _ in range(2)]
    td = TensorDict({"x": torch.zeros(3, 2, 5), "n": lazy_stack(members, 1)}, [3], names=["time"])
    for limit in (0, 1):
        with pytest.raises(RuntimeError, match="stack of 2 members along dim 1 cannot have the batch size") as refused:
            td["n"].batch_size = [3][:limit]
        with pytest.raises(RuntimeError) as raised:
            td.auto_batch_size_(limit)
        assert str(raised.value) == str(refused.value)
        assert (td.batch_size, td.names) == ((3,), ["time"])
        assert (td["n"].batch_size, td["n"].names) == ((3, 2), ["time", None])
    assert td.auto_batch_size_(2)["n"].batch_size == (3, 2)
    with set_lazy_legacy(True):
        view = TensorDict({"a": torch.zeros(3, 4)}, [3], names=["time"]).unsqueeze(0)
    with pytest.raises(RuntimeError, match="lazy view"):
        view.auto_batch_size_()
    assert (view.batch_size, view.names) == ((1, 3), [None, "time"])


def test_auto_batch_size_leaves_nested_containers_without_leaves_where_they_fit() -> None:
    stack = lazy_stack([TensorDict({}, [2, 2])], 2)
    td = TensorDict({"a": torch.zeros(2, 2), "d": TensorDict({}, [2, 2, 3]), "s": stack, "e": TensorDict({}, [2])}, [2])
    td.auto_batch_size_()
    assert [td[key].shape for key in ("d", "s", "e")] == [(2, 2, 3), (2, 2, 1), (2, 2)] and td.shape == (2, 2)


def test_auto_batch_size_of_entries_that_share_nothing_and_of_none() -> None:
    assert TensorDict({"a": torch.zeros(3), "b": torch.zeros(4)}).auto_batch_size_().batch_size == ()
    assert TensorDict(batch_size=[3]).auto_batch_size_().batch_size == (3,)
    with pytest.raises(ValueError, match="-1"):
        TensorDict().auto_batch_size_(-1)


def test_no_batch_dims() -> None:
    td = TensorDict({"a": torch.arange(2)})
    assert td.view(1)["a"].shape == (1, 2)
    assert td.flatten().batch_size == (1,)
    assert td.reshape(()) is td
    assert td.permute() is td
    assert td.expand(3)["a"].shape == (3, 2)
    assert td.repeat(3)["a"].shape == (3, 2)
    assert td.roll(1)["a"].tolist() == [0, 1]
    assert td.atleast_3d()["a"].shape == (1, 1, 1, 2)
    assert td.repeat_interleave(3)["a"].shape == (3, 2)


def test_expand_as_another_container() -> None:
    td = TensorDict({"a": torch.ones(3, 1, 4), "b": {"c": torch.ones(3, 2, 1, 4)}}, [3])
    other = TensorDict({"a": torch.zeros(2, 3, 5, 4), "b": {"c": torch.zeros(2, 3, 2, 6, 4)}}, [2, 3])
    result = td.expand_as(other)
    assert result.batch_size == result["b"].batch_size == (2, 3)
    assert result["a"].shape == (2, 3, 5, 4)
    assert result["b", "c"].shape == (2, 3, 2, 6, 4)
    with pytest.raises(KeyError, match="'c'"):
        td.expand_as(TensorDict({"a": other["a"], "b": {}}, [2, 3]))
    with pytest.raises(RuntimeError, match="'a'"):
        td.expand_as(TensorDict({"a": torch.zeros(2, 2, 1, 4), "b": other["b"]}, [2]))


def test_no_dims_at_all() -> None:
    td = TensorDict({"a": torch.tensor(3)})
    one = TensorDict({"a": torch.tensor([3])}, [1])
    assert td.expand(()).batch_size == td.repeat().batch_size == ()
    assert td.repeat()["a"] == td.expand(())["a"] == 3
    assert one.view(())["a"].shape == one.reshape(())["a"].shape == ()
    assert td.flip(())["a"] == 3
    assert td.new_zeros()["a"].shape == ()


COMPILED = ["view", "reshape two dims", "flatten", "unflatten", "permute cycle", "transpose", "squeeze", "unsqueeze"]
COMPILED += ["expand new", "flip", "roll", "narrow", "repeat", "repeat_interleave"]


# The quick rows of tests/compile_table compile shape operations, too.
@pytest.mark.parametrize("name", mark_slow(COMPILED, keep=["view", "unflatten", "expand new", "repeat_interleave"]))
@pytest.mark.parametrize("dynamic", [False, True])
def test_operation_can_be_compiled(name: str, dynamic: bool) -> None:
    torch.compiler.reset()
    td = make()
    compiled = torch.compile(OPERATIONS[name], backend="eager", fullgraph=True, dynamic=dynamic)(td)
    want = OPERATIONS[name](td)
    assert compiled.batch_size == want.batch_size
    assert all(torch.equal(compiled[key], want[key]) for key in want.keys(True, True))


def test_an_expansion_in_place_that_fails_changes_nothing() -> None:
    ragged = torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged)
    td = TensorDict({"a": torch.zeros(1), "n": {"b": torch.zeros(1)}, "c": ragged}, [1])
    with pytest.raises(RuntimeError, match="expand"):
        td.expand(2, 3, inplace=True)
    assert td.batch_size == td["n"].batch_size == td["a"].shape == (1,)
