"""Cutting containers in pieces and joining them, against torch on every entry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tensordict
from tensordict import TensorDict, lazy_stack

SIZE = (5, 4)


def make(size: tuple[int, ...] = SIZE, seed: int = 0, names: list[str | None] | None = None) -> TensorDict:
    generator = torch.Generator().manual_seed(seed)
    td = TensorDict(
        {
            "a": torch.rand(*size, 3, generator=generator),
            "n": {"b": torch.rand(size, generator=generator)},
            "m": TensorDict({"c": torch.rand(*size, 2, 6, generator=generator)}, [*size, 2]),
        },
        batch_size=size,
    )
    if names is not None:
        td.names = names
    return td


def same(td: TensorDict, leaves: dict[Any, torch.Tensor], size: tuple[int, ...]) -> None:
    assert td.batch_size == size
    assert td["n"].batch_size == size
    assert td["m"].batch_size == (*size, 2)
    assert set(td.keys(True, True)) == set(leaves)
    for key, leaf in leaves.items():
        assert td[key].shape == leaf.shape
        assert torch.equal(td[key], leaf)


CUTS: dict[str, Callable[[Any], Any]] = {
    "split": lambda x: x.split(2),
    "split last dim": lambda x: x.split(3, 1),
    "split lengths": lambda x: x.split([1, 0, 4]),
    "split more than there is": lambda x: x.split(9),
    "chunk": lambda x: x.chunk(2),
    "chunk unevenly": lambda x: x.chunk(4),
    "chunk last dim": lambda x: x.chunk(3, 1),
    "tensor_split": lambda x: x.tensor_split(3),
    "tensor_split more than there is": lambda x: x.tensor_split(7),
    "tensor_split indices": lambda x: x.tensor_split([1, 4]),
    "tensor_split negative": lambda x: x.tensor_split((-2,), 1),
    "tensor_split backwards": lambda x: x.tensor_split([3, 1]),
    "tensor_split past the end": lambda x: x.tensor_split([2, 9]),
    "tensor_split tensor": lambda x: x.tensor_split(torch.tensor([2, 3])),
    "tensor_split scalar": lambda x: x.tensor_split(torch.tensor(2)),
    "unbind": lambda x: x.unbind(0),
    "unbind last dim": lambda x: x.unbind(1),
}


@pytest.mark.parametrize("name", CUTS)
def test_pieces_are_those_of_torch(name: str) -> None:
    cut = CUTS[name]
    td = make()
    pieces = cut(td)
    assert isinstance(pieces, tuple)
    sizes = [piece.shape for piece in cut(torch.zeros(SIZE))]
    assert [piece.batch_size for piece in pieces] == sizes
    columns = {key: cut(td[key]) for key in td.keys(True, True)}
    for i, piece in enumerate(pieces):
        same(piece, {key: column[i] for key, column in columns.items()}, sizes[i])
        for key, column in columns.items():
            assert piece[key].data_ptr() == column[i].data_ptr()


@pytest.mark.parametrize("name", [name for name in CUTS if not name.endswith("last dim")])
def test_pieces_along_a_negative_dim(name: str) -> None:
    op = {"split": "split", "chunk": "chunk", "tensor_split": "tensor_split", "unbind": "unbind"}[name.split()[0]]
    args = () if op == "unbind" else (2,)
    td = make()
    pieces = getattr(td, op)(*args, dim=-1)
    want = getattr(td, op)(*args, dim=1)
    assert [piece.batch_size for piece in pieces] == [piece.batch_size for piece in want]
    assert all(torch.equal(a["a"], b["a"]) for a, b in zip(pieces, want, strict=True))


def test_names_and_locks_of_pieces() -> None:
    td = make(names=["x", "y"]).lock_()
    for piece in (*td.split(2), *td.chunk(2), *td.tensor_split(2)):
        assert piece.names == ["x", "y"]
        assert piece["m"].names == ["x", "y", None]
        assert piece.is_locked
    for item in td.unbind(1):
        assert item.names == ["x"]
        assert not item.is_locked
    piece = td.split(2)[0].unlock_()
    piece.names = ["p", "q"]
    assert td.names == td.split(2)[1].names == ["x", "y"]


def test_containers_without_entries_or_elements() -> None:
    assert [item.batch_size for item in TensorDict(batch_size=[2, 3]).unbind(0)] == [(3,), (3,)]
    assert TensorDict({"a": torch.zeros(0, 2)}, [0]).unbind(0) == ()
    empty = TensorDict({"a": torch.zeros(0, 2)}, [0])
    assert [piece.batch_size for piece in empty.split(2)] == [p.shape[:1] for p in torch.zeros(0, 2).split(2)]
    assert [piece.batch_size for piece in empty.chunk(2)] == [p.shape[:1] for p in torch.zeros(0, 2).chunk(2)]


@pytest.mark.parametrize("cut", [lambda x: x.split(1, 2), lambda x: x.chunk(1, -3), lambda x: x.unbind(2)])
def test_cut_along_a_dim_out_of_range(cut: Callable[[Any], Any]) -> None:
    with pytest.raises(IndexError, match="out of range"):
        cut(make())


def test_split_by_0_of_no_elements_is_one_piece() -> None:
    empty = TensorDict({"a": torch.zeros(0, 2)}, batch_size=[0])
    (piece,) = empty.split(0)
    assert piece.batch_size == (0,) and piece["a"].shape == torch.zeros(0, 2).split(0)[0].shape


@pytest.mark.parametrize(
    "cut", [lambda x: x.split(0), lambda x: x.split([1, 1]), lambda x: x.split([7, -2]), lambda x: x.chunk(0)]
)
def test_lengths_that_do_not_fit(cut: Callable[[Any], Any]) -> None:
    with pytest.raises(ValueError, match=r"positive|add up"):
        cut(make())


@pytest.mark.parametrize("bad", [1.5, "ab", [1.0, 4.0]])
def test_lengths_are_ints(bad: Any) -> None:
    with pytest.raises(TypeError, match="split_size"):
        make().split(bad)


# --- stack and cat --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stack", [TensorDict.stack, tensordict.stack, torch.stack])
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
def test_stack(stack: Any, dim: int) -> None:
    tds = [make(seed=seed) for seed in range(3)]
    place = dim % 3
    want = {key: torch.stack([td[key] for td in tds], place) for key in tds[0].keys(True, True)}
    same(stack(tds, dim), want, torch.stack([torch.zeros(SIZE)] * 3, dim).shape)


@pytest.mark.parametrize("cat", [TensorDict.cat, tensordict.cat, torch.cat])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_cat(cat: Any, dim: int) -> None:
    place = dim % 2
    sizes = [tuple(length if d == place else n for d, n in enumerate(SIZE)) for length in (1, 3, 2)]
    tds = [make(size, seed) for seed, size in enumerate(sizes)]
    want = {key: torch.cat([td[key] for td in tds], place) for key in tds[0].keys(True, True)}
    same(cat(tds, dim), want, torch.cat([torch.zeros(size) for size in sizes], dim).shape)


@given(st.integers(1, 4), st.integers(0, 2), st.integers(1, 5))
def test_split_and_cat_are_inverse(length: int, dim: int, count: int) -> None:
    td = make((3, 4, 2))
    again = TensorDict.cat(td.split(length, dim), dim)
    same(again, {key: td[key] for key in td.keys(True, True)}, (3, 4, 2))
    stacked = TensorDict.stack([td] * count, dim)
    assert all(torch.equal(item["m", "c"], td["m", "c"]) for item in stacked.unbind(dim))


def test_inputs_need_not_be_lists() -> None:
    td = make()
    assert TensorDict.stack(iter([td, td])).batch_size == (2, *SIZE)
    same(TensorDict.stack(td), {key: td[key] for key in td.keys(True, True)}, SIZE)


def test_free_functions_take_plain_tensors() -> None:
    assert tensordict.stack([torch.zeros(2), torch.ones(2)]).tolist() == [[0, 0], [1, 1]]
    assert tensordict.cat((torch.zeros(1), torch.ones(1))).tolist() == [0, 1]


def test_order_of_keys_does_not_matter() -> None:
    one = TensorDict({"a": torch.zeros(2), "b": torch.ones(2)})
    two = TensorDict({"b": torch.ones(2), "a": torch.zeros(2)})
    result = TensorDict.stack([one, two])
    assert result["a"].sum() == 0
    assert result["b"].sum() == 4


def test_names_of_joined_containers() -> None:
    named, other = make(names=["x", "y"]), make(names=["x", "z"])
    assert TensorDict.stack([named, named], 1).names == ["x", None, "y"]
    assert TensorDict.stack([named, named], 1)["m"].names == ["x", None, "y", None]
    assert TensorDict.stack([named, make()]).names == [None, None, None]
    assert TensorDict.cat([named, make()]).names == ["x", "y"]
    for join in (TensorDict.stack, TensorDict.cat):
        with pytest.raises(RuntimeError, match=r"dim 1 is named 'y' .* and 'z'"):
            join([named, other])


def test_device_is_kept_where_all_agree() -> None:
    here, nowhere = TensorDict(a=torch.zeros(2), device="cpu"), TensorDict(a=torch.zeros(2))
    assert TensorDict.stack([here, here]).device == torch.device("cpu")
    assert TensorDict.stack([here, nowhere]).device is None


def test_result_is_not_locked() -> None:
    td = make().lock_()
    assert not TensorDict.stack([td, td]).is_locked
    assert not TensorDict.cat([td, td]).is_locked


def test_different_keys_are_named() -> None:
    full = TensorDict({"a": torch.zeros(2), "n": {"b": torch.zeros(2), "c": torch.zeros(2)}}, [2])
    for join in (TensorDict.stack, TensorDict.cat):
        with pytest.raises(KeyError, match="'a'") as error:
            join([full, full.exclude("a")])
        assert isinstance(error.value, RuntimeError)
        with pytest.raises(RuntimeError, match="under 'n'.*'c'"):
            join([full, full.exclude(("n", "c"))])
        swapped = full.exclude("a")
        swapped["z"] = torch.zeros(2)
        with pytest.raises(RuntimeError, match=r"\['a', 'z'\]"):
            join([full, swapped])


def test_different_batch_sizes_are_shown() -> None:
    with pytest.raises(RuntimeError, match=r"\[5, 4\].*\[3, 4\]"):
        TensorDict.stack([make(), make((3, 4))])
    with pytest.raises(RuntimeError, match=r"\[5, 4\].*\[5, 3\]"):
        TensorDict.cat([make(), make((5, 3))], 0)
    with pytest.raises(RuntimeError, match=r"\[5, 4\].*\[5\]"):
        TensorDict.cat([make(), make((5,))], 0)


def test_shapes_that_do_not_fit_name_the_entry() -> None:
    one = TensorDict({"n": {"a": torch.zeros(2)}})
    two = TensorDict({"n": {"a": torch.zeros(3)}})
    with pytest.raises(RuntimeError, match=r"\('n', 'a'\)"):
        TensorDict.stack([one, two])
    for pair in ([one, TensorDict({"n": torch.zeros(())})], [TensorDict({"n": torch.zeros(())}), one]):
        with pytest.raises(TypeError, match="'n'"):
            TensorDict.stack(pair)


@pytest.mark.parametrize("join", [TensorDict.stack, TensorDict.cat])
def test_bad_inputs(join: Any) -> None:
    with pytest.raises(ValueError, match="at least one"):
        join([])
    with pytest.raises(TypeError, match="Tensor at position 1"):
        join([make(), torch.zeros(SIZE)])
    with pytest.raises(IndexError, match="out of range"):
        join([make(), make()], 3)


# --- out= -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("join", "count"), [(TensorDict.stack, 2), (TensorDict.cat, 10), (torch.stack, 2)])
def test_out_is_written_in_place(join: Any, count: int) -> None:
    tds = [make(seed=1), make(seed=2)]
    want = join(tds)
    out = want.clone().zero_().lock_()
    before = {key: out[key] for key in out.keys(True, True)}
    assert join(tds, out=out) is out
    assert out.batch_size[0] == count
    for key, leaf in before.items():
        assert out[key] is leaf
        assert torch.equal(leaf, want[key])


def test_out_takes_the_entries_that_it_has_and_an_empty_one_all() -> None:
    tds = [make(seed=1), make(seed=2)]
    empty = TensorDict(batch_size=[2, *SIZE])
    TensorDict.stack(tds, out=empty)
    assert set(empty.keys()) == {"a", "n", "m"}
    assert torch.equal(empty["m", "c"], torch.stack([td["m", "c"] for td in tds]))
    locked = TensorDict(batch_size=[2, *SIZE], lock=True)
    with pytest.raises(RuntimeError, match="'a'.*lacks"):
        TensorDict.stack(tds, out=locked)
    some = empty.exclude("a").zero_().set("extra", torch.ones(2, *SIZE)).lock_()
    TensorDict.stack(tds, out=some)
    assert set(some.keys()) == {"extra", "n", "m"} and some["extra"].all()
    assert torch.equal(some["m", "c"], empty["m", "c"])


def test_out_that_does_not_fit_is_left_alone() -> None:
    tds = [make(seed=1), make(seed=2)]
    out = TensorDict.stack(tds).zero_()
    out["m"] = TensorDict({"c": torch.zeros(2, *SIZE, 2, 7)}, [2, *SIZE])
    with pytest.raises(RuntimeError, match=r"\('m', 'c'\).*7.*6"):
        TensorDict.stack(tds, out=out)
    assert out["a"].abs().sum() == 0
    with pytest.raises(RuntimeError, match=r"\[2, 5, 4\].*\[5, 4\]"):
        TensorDict.stack(tds, out=make())
    with pytest.raises(TypeError, match="dict"):
        TensorDict.stack(tds, out={})
    with pytest.raises(KeyError, match="'a'"):
        TensorDict.stack([tds[0], tds[1].exclude("a")], out=out)


def test_cat_into_out_along_the_last_dim() -> None:
    tds = [make((2, 1)), make((2, 3))]
    out = make((2, 4)).zero_()
    TensorDict.cat(tds, -1, out=out)
    assert torch.equal(out["m", "c"], torch.cat([td["m", "c"] for td in tds], 1))


# --- joining entries ------------------------------------------------------------------------------------------------


def test_stack_tensors_and_cat_tensors() -> None:
    td = TensorDict({"a": torch.zeros(2, 3), "n": {"b": torch.ones(2, 3)}}, [2])
    assert td.stack_tensors("a", ("n", "b"), out_key=("n", "c"), dim=-1) is td
    assert td["n", "c"].shape == (2, 3, 2)
    assert set(td.keys(True, True)) == {("n", "c")}
    td = TensorDict({"a": torch.zeros(2, 3), "b": torch.ones(2, 3)}, [2])
    assert td.cat_tensors("a", "b", out_key="a", dim=1, keep_entries=True)["a"].shape == (2, 6)
    assert "b" in td
    td = TensorDict(a=torch.zeros(2), b=torch.ones(2)).cat_tensors("a", "b", out_key="a")
    assert list(td.keys()) == ["a"]
    assert td["a"].tolist() == [0, 0, 1, 1]


def test_joining_entries_that_cannot_be_changes_nothing() -> None:
    td = TensorDict(a=torch.zeros(2), b=torch.ones(3))
    with pytest.raises(KeyError, match='"q"'):
        td.stack_tensors("a", "q", out_key="c")
    with pytest.raises(RuntimeError, match="size"):
        td.stack_tensors("a", "b", out_key="c")
    with pytest.raises(RuntimeError, match="locked"):
        td.lock_().cat_tensors("a", "b", out_key="c")
    assert set(td.keys()) == {"a", "b"}
    td = TensorDict({"a": torch.zeros(2), "n": TensorDict({"x": torch.ones(2)}).lock_()})
    for keys, out in ((("a", ("n", "x")), "c"), (("a", "a"), ("n", "y"))):
        with pytest.raises(RuntimeError, match="locked"):
            td.cat_tensors(*keys, out_key=out)
        assert set(td.keys(True, True)) == {"a", ("n", "x")}
    td = TensorDict({"n": TensorDict({"x": torch.ones(2)}, [2])}, [2])
    with pytest.raises(KeyError, match="keep_entries"):
        td.stack_tensors("n", out_key=("n", "y"), dim=1)
    assert set(td.keys(True, True)) == {("n", "x")}


def test_joining_an_entry_given_twice() -> None:
    for keep in (False, True):
        td = TensorDict({"a": torch.zeros(2), "b": torch.ones(2), "n": {"x": torch.ones(1)}})
        assert td.stack_tensors("a", "b", ("a",), out_key="c", keep_entries=keep) is td
        assert td["c"].tolist() == [[0, 0], [1, 1], [0, 0]]
        assert set(td.keys()) == ({"a", "b", "c", "n"} if keep else {"c", "n"})
        td.cat_tensors(("n", "x"), ("n", "x"), out_key=("n", "x"), keep_entries=keep)
        assert td["n", "x"].tolist() == [1, 1]


def test_the_result_of_joining_entries_may_take_the_place_of_their_parent() -> None:
    td = TensorDict({"a": torch.zeros(2), "n": {"x": torch.ones(2)}})
    assert td.cat_tensors("a", ("n", "x"), out_key="n")["n"].tolist() == [0, 0, 1, 1]
    assert list(td.keys()) == ["n"]


@pytest.mark.parametrize(
    "op",
    [
        lambda td: td.split(2)[1],
        lambda td: td.unbind(0)[1],
        lambda td: TensorDict.stack([td, td], 1),
        lambda td: torch.stack([td, td]),
        lambda td: TensorDict.cat([td, td]),
    ],
)
def test_operation_can_be_compiled(op: Callable[[Any], Any]) -> None:
    torch.compiler.reset()
    td = make()
    result = torch.compile(op, backend="eager", fullgraph=True)(td)
    want = op(td)
    same(result, {key: want[key] for key in want.keys(True, True)}, want.batch_size)


def test_the_error_of_containers_with_other_keys_says_what_the_reference_says() -> None:
    one, two = TensorDict(a=torch.ones(2), b=torch.ones(2)), TensorDict(a=torch.ones(2), c=torch.ones(2))
    phrase = r"The sets of keys in the tensordicts to stack are exclusive.*only some of them have \['b', 'c'\]"
    for items in ([one, two], [TensorDict(n=one), TensorDict(n=two)], [two, one.select("a"), one]):
        for error in (RuntimeError, KeyError):
            with pytest.raises(error, match=phrase):
                torch.stack(items)
    assert TensorDict.maybe_dense_stack([one, two])["a"].shape == (2, 2)


@pytest.mark.parametrize("join", [torch.cat, torch.stack])
def test_the_odd_one_among_many_is_told(join: Any) -> None:
    steps = [TensorDict({"next": {"obs": torch.zeros(2), "action": torch.zeros(2)}}, [2]) for _ in range(20)]
    del steps[17]["next", "action"]
    with pytest.raises(
        KeyError, match=r"under 'next'; only some of them have \['action'\] \(number 17 of 20 lacks 'action'\)"
    ):
        join(steps)


def test_densify_of_a_container_without_lazy_stacks_is_the_container() -> None:
    td = TensorDict({"a": torch.zeros(2), "n": TensorDict({"b": torch.zeros(2)}, [2])}, [2]).lock_()
    assert td.densify() is td
    mixed = TensorDict({"n": td["n"], "s": lazy_stack([TensorDict({"a": torch.zeros(())})] * 2)}, [2])
    dense = mixed.densify()
    assert dense is not mixed and dense["n"] is mixed["n"] and type(dense["s"]) is TensorDict
