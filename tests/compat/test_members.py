"""Private members that client programs reach on containers, as they use them; expected results are the reference's."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    PersistentTensorDict,
    TensorClass,
    TensorDict,
    TensorDictBase,
    TensorDictParams,
    is_tensor_collection,
    lazy_stack,
)
from tensordict.base import NO_DEFAULT, _is_leaf_nontensor
from tensordict.utils import _is_non_tensor

TABLE = Path(__file__).parents[1] / "data" / "client-members.tsv"
# Members of the table that are attributes of the client's own.
NOT_OURS = {
    "lock": "a multiprocessing lock of TorchRL's VecNorm, interruptors and transforms",
    "_cache": "a field of physicsnemo's Mesh (see below); dicts of TorchRL's samplers and losses, tdhook's contexts",
    "_check_unlock": "TorchRL's Composite",
    "_data": "TorchRL's OpenMLEnv; verl's BatchData",
    "_depth": "TorchRL's image encoder, in model_based",
    "_dtype": "TorchRL's R3M, VC1 and VIP transforms",
    "_erase_cache": "TorchRL's LossModule",
    "_exclude": "a class method of TorchRL's step_mdp",
    "_get_metadata": "TorchRL's batched environments",
    "_get_names_idx": "TorchRL's Composite",
    "_is_locked": "TorchRL's Composite",
    "_lock_parents_weakrefs": "TorchRL's Composite",
    "_propagate_lock": "TorchRL's Composite",
    "_propagate_unlock": "TorchRL's Composite",
    "_reduce": "TorchRL's replay buffer queries; physicsnemo's losses",
    "_select": "tdhook's targets",
    "_set_metadata": "TorchRL's batched environments",
    "_td_dim_names": "TorchRL's Composite",
    "_transpose": "TorchRL's replay buffers",
    "_update": "TorchRL's VecNorm",
}
OURS = [
    "_apply_nest",
    "_erase_names",
    "_fast_apply",
    "_from_tensordict",
    "_get_str",
    "_get_sub_tensordict",
    "_has_exclusive_keys",
    "_has_names",
    "_new_unsafe",
    "_set_str",
    "_stack_onto_",
    "_sync_all",
    "clear_refs_for_compile_",
]


# Part of the API of formats that this package does not have yet.
LATER = {"from_json", "to_json", "to_parquet", "to_zarr"}


class Point(TensorClass):
    a: torch.Tensor
    n: Any = None
    s: str | None = None


def dense(folder: Path) -> Any:
    return TensorDict(a=torch.zeros(3, 2), n={"b": torch.zeros(3)}, s="x", batch_size=[3])


def stack(folder: Path) -> Any:
    return lazy_stack([TensorDict(a=torch.zeros(2), n={"b": torch.zeros(())}, s=value) for value in "xyz"])


def tensorclass(folder: Path) -> Any:
    return Point(a=torch.zeros(3, 2), n=TensorDict(b=torch.zeros(3), batch_size=[3]), s="x", batch_size=[3])


def params(folder: Path) -> Any:
    return TensorDictParams(TensorDict(a=torch.zeros(3, 2), n={"b": torch.zeros(3)}, batch_size=[3]))


def persistent(folder: Path) -> Any:
    pytest.importorskip("h5py")
    source = {"a": torch.zeros(3, 2), "n": {"b": torch.zeros(3)}}
    return PersistentTensorDict.from_dict(source, filename=folder / "file.h5", batch_size=[3])


KINDS = [dense, stack, tensorclass, params, persistent]
Make = Callable[[], Any]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    return lambda: request.param(tmp_path)


def test_all_containers_have_the_members(make: Make) -> None:
    assert [name for name in OURS if not hasattr(type(make()), name)] == []


def test_the_decisions_cover_the_table() -> None:
    names = {line.split("\t")[0] for line in TABLE.read_text().splitlines()[2:]}
    # Those two are in the table of names, of a class each.
    ours = {*OURS, "_param_td"} - {"_new_unsafe", "_sync_all"}
    assert names == ours | NOT_OURS.keys() | LATER and not ours & NOT_OURS.keys()


# --- making containers ----------------------------------------------------------------------------------------------


def test_new_unsafe_takes_entries_as_they_are() -> None:
    tensor, source = torch.zeros(3, 2), {"a": torch.zeros(3, 2)}
    source["a"] = tensor
    td = TensorDict._new_unsafe(source, batch_size=torch.Size([4]), device="meta")
    assert td["a"] is tensor and td.batch_size == torch.Size([4]) and td.device == torch.device("meta")
    td._set_str("b", tensor, inplace=False, validated=True)
    assert source.keys() == {"a"}


def test_new_unsafe_forms() -> None:
    made = TensorDict._new_unsafe(source={"a": torch.zeros(3)}, batch_size=[3], names=["time"], lock=True)
    assert made.names == ["time"] and made.is_locked and type(made) is TensorDict
    assert TensorDict._new_unsafe(a=torch.zeros(3), batch_size=3).batch_size == torch.Size([3])
    empty = TensorDict._new_unsafe({}, torch.Size([4]))
    assert empty.is_empty() and empty.batch_size == torch.Size([4])
    assert TensorDict._new_unsafe().batch_size == torch.Size([])

    class Own(TensorDict):
        pass

    assert type(Own._new_unsafe({})) is Own
    assert type(Point._new_unsafe(a=torch.zeros(3), batch_size=[3])) is Point
    assert type(TensorDictBase._new_unsafe({"a": torch.zeros(3)}, [3])) is TensorDict


def test_new_unsafe_makes_containers_of_dicts() -> None:
    """TorchRL's SAC: two sets of parameters in nested dicts."""
    one, two = params(Path()), params(Path())
    td = TensorDict._new_unsafe({"module": {"0": one, "1": two}}, batch_size=one.batch_size, names=["x"])
    assert type(td["module"]) is TensorDict and td["module", "0"] is one and td["module", "1"] is two
    assert td["module"].batch_size == torch.Size([3]) and td["module"].names == ["x"]
    assert TensorDict._new_unsafe({"s": "text", "n": 1})["s"] == "text"


def test_new_unsafe_refuses() -> None:
    with pytest.raises(TypeError, match="key"):
        TensorDict._new_unsafe({0: torch.zeros(1)})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="not from both"):
        TensorDict._new_unsafe({"a": torch.zeros(1)}, b=torch.zeros(1))
    with pytest.raises(TypeError, match="key"):
        TensorDict()._set_str(0, torch.zeros(1), inplace=False, validated=True)  # type: ignore[arg-type]


def test_from_tensordict_of_a_tensorclass() -> None:
    td = TensorDict(a=torch.zeros(2))
    point = Point._from_tensordict(td)
    assert type(point) is Point and point._tensordict is td and point.n is None
    assert point._from_tensordict(td.clone()).a.tolist() == [0, 0]
    assert Point._from_tensordict(td, {"s": "k"}).s == "k"
    assert Point._from_tensordict(td.empty()).a is None
    lazy = Point._from_tensordict(TensorDict(a=torch.zeros(2), batch_size=[2]).to_lazystack(0))
    assert isinstance(lazy._tensordict, LazyStackedTensorDict)
    with pytest.raises(ValueError, match="unknown"):
        Point._from_tensordict(TensorDict(unknown=torch.zeros(2)))


def test_param_td() -> None:
    container = TensorDict(a=torch.zeros(2))
    assert TensorDictParams(container)._param_td is container


# --- one entry ------------------------------------------------------------------------------------------------------


def test_get_str(make: Make) -> None:
    container = make()
    assert container._get_str("a", None).shape == torch.Size([3, 2])
    assert container._get_str("a", NO_DEFAULT).shape == torch.Size([3, 2])
    assert container._get_str("n", None)._get_str("b", None).shape == torch.Size([3])
    assert container._get_str("none", None) is None and container._get_str("none", default=7) == 7
    assert container._get_str(("n", "b"), None) is None
    with pytest.raises(KeyError, match="none"):
        container._get_str("none", NO_DEFAULT)


def test_get_str_gives_holders() -> None:
    assert isinstance(dense(Path())._get_str("s", None), NonTensorData)
    assert isinstance(tensorclass(Path())._get_str("s", None), NonTensorData)
    assert isinstance(stack(Path())._get_str("s", None), NonTensorStack)


def test_get_str_of_uneven_members() -> None:
    """TorchRL's `step_mdp` asks for the words of the error, of `get` as well."""
    uneven = lazy_stack([TensorDict(n={"b": torch.zeros(size)}) for size in (1, 2)])
    nested = uneven._get_str("n", None)
    for read in (lambda: nested._get_str("b", None), lambda: nested.get("b"), lambda: uneven.get(("n", "b"))):
        with pytest.raises(RuntimeError) as info:
            read()
        assert re.match("Failed to stack tensors within a tensordict", str(info.value))
        assert "('n', 'b')" in str(info.value) and "[1], [2]" in str(info.value)
    assert [leaf.shape for leaf in nested._get_str("b", None, as_list=True)] == [(1,), (2,)]


def test_set_str(make: Make) -> None:
    container = make()
    for name in ("a", "n"):
        value = torch.ones(3, 2) if name == "a" else TensorDict(c=torch.ones(3), batch_size=[3])
        assert container._set_str(name, value, validated=True, inplace=False, non_blocking=False) is container
    assert container._get_str("a", None).sum() == 6
    assert container.get(("n", "c")).sum() == 3
    assert isinstance(container, (Point, TensorDictParams)) or container._set_str(
        "q", torch.ones(3), validated=True, inplace=False
    ).get("q").shape == (3,)


def test_set_str_in_place(make: Make) -> None:
    container = make()
    assert container._set_str("a", torch.ones(3, 2), validated=True, inplace=True) is container
    assert container._get_str("a", None).sum() == 6
    with pytest.raises(KeyError, match="none"):
        container._set_str("none", torch.ones(3), validated=True, inplace=True)


def test_set_str_checks_what_is_not_validated(make: Make) -> None:
    container = make()
    with pytest.raises(RuntimeError, match="batch size"):
        container._set_str("a", torch.ones(4, 2), validated=False, inplace=False)
    assert container._get_str("a", None).shape == (3, 2)


def test_set_str_keeps_what_is_validated() -> None:
    tensor = torch.ones(4, device="meta")
    td = TensorDict(batch_size=[3], device="cpu")
    assert td._set_str("q", tensor, validated=True, inplace=False).get("q") is tensor
    assert td._set_str("s", "text", validated=True, inplace=False)["s"] == "text"


def test_set_str_of_parameters() -> None:
    made = params(Path())
    assert isinstance(made._set_str("q", torch.ones(3, 1), validated=True, inplace=False)["q"], nn.Parameter)


def test_set_str_of_a_locked_container(make: Make) -> None:
    container = make().lock_()
    with pytest.raises(RuntimeError, match="locked"):
        container._set_str("a", torch.ones(3, 2), validated=True, inplace=False)
    container._set_str("a", torch.ones(3, 2), validated=True, inplace=True)
    assert container._get_str("a", None).sum() == 6


def test_set_str_past_the_lock() -> None:
    td = dense(Path()).lock_()
    assert td._set_str("q", torch.ones(3), validated=True, inplace=False, ignore_lock=True)["q"].sum() == 3
    assert td.is_locked


# --- a function on every leaf ---------------------------------------------------------------------------------------


def test_fast_apply(make: Make) -> None:
    result = make()._fast_apply(lambda x: x + 1)
    assert result.batch_size == torch.Size([3])
    assert result.get("a").sum() == 6 and result.get(("n", "b")).sum() == 3
    assert make()._apply_nest(lambda x: x + 1).get(("n", "b")).sum() == 3


def test_fast_apply_writes_in_place(make: Make) -> None:
    container = make()
    with torch.no_grad():
        assert container._fast_apply(lambda x: x + 1, inplace=True) is container
    assert container.get("a").sum() == 6


def test_fast_apply_keeps_empty_containers() -> None:
    td = TensorDict(a=torch.zeros(2), n={"b": torch.zeros(2)}, e={}, batch_size=[2])

    def keys(**kwargs: Any) -> list[str]:
        return sorted(td._fast_apply(lambda x: None, **kwargs).keys())

    assert keys() == keys(filter_empty=False) == ["e", "n"]
    assert td._fast_apply(lambda x: None, filter_empty=True) is None
    assert sorted(td._apply_nest(lambda x: None).keys()) == ["e"]
    assert sorted(td._apply_nest(lambda x: None, checked=True).keys()) == ["e"]


def test_fast_apply_names_leaves() -> None:
    """TorchRL's `_skip_tensordict`: values are leaves, too."""
    seen: list[Any] = []
    td = TensorDict(a=torch.zeros(2), n={"b": torch.zeros(2)}, s="x", batch_size=[2])
    td._fast_apply(
        lambda name, x, y: seen.append((name, type(x).__name__, y)),
        TensorDict(batch_size=[2]),
        named=True,
        nested_keys=True,
        default=None,
        filter_empty=True,
        is_leaf=_is_leaf_nontensor,
    )
    assert seen == [("a", "Tensor", None), (("n", "b"), "Tensor", None), ("s", "NonTensorData", None)]
    seen.clear()
    td._fast_apply(lambda name, x: seen.append(name), named=True)
    assert seen == ["a", "b"]


def test_fast_apply_on_containers() -> None:
    """TorchRL's collectors look for lazy stacks of different keys among the entries of a policy's output."""
    inner = lazy_stack([TensorDict(a=torch.zeros(1)), TensorDict(b=torch.zeros(1))])
    seen: list[Any] = []
    TensorDict(a=torch.zeros(2), n=inner, batch_size=[2])._fast_apply(seen.append, call_on_nested=True)
    assert [isinstance(x, LazyStackedTensorDict) and x._has_exclusive_keys for x in seen] == [False, True]


def test_fast_apply_does_not_look_at_shapes() -> None:
    td = TensorDict(a=torch.zeros(3, 2), batch_size=[3])
    assert td._fast_apply(lambda x: x[0])["a"].shape == (2,)
    assert td._fast_apply(lambda x: x[0], batch_size=[7]).batch_size == torch.Size([7])
    with pytest.raises(RuntimeError, match="batch size"):
        td._apply_nest(lambda x: x[0])
    with pytest.raises(RuntimeError, match="batch size"):
        td._fast_apply(lambda x: x[0], checked=False)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_fast_apply_makes_nested_tensors() -> None:
    """TorchRL's `split_trajectories(as_nested=True)`."""
    pieces = TensorDict(a=torch.arange(5.0), batch_size=[5]).split([2, 3])

    def nest(*rows: torch.Tensor) -> torch.Tensor:
        return torch.nested.nested_tensor(list(rows), layout=torch.jagged)

    nested = pieces[0]._fast_apply(nest, pieces[1], batch_size=[2, -1])
    assert nested.batch_size == torch.Size([2, -1])
    assert [row.tolist() for row in nested["a"].unbind()] == [[0, 1], [2, 3, 4]]


def test_fast_apply_options() -> None:
    td = dense(Path())
    result = td._fast_apply(lambda x: x, device="meta", names=["x"])
    assert result.device == torch.device("meta") and result.names == ["x"]
    assert not td.lock_()._fast_apply(lambda x: x).is_locked
    assert td._fast_apply(lambda x: x, propagate_lock=True).is_locked
    out = td.clone()
    before = out["a"]
    assert td._fast_apply(lambda x: x + 1, out=out) is out
    assert out["a"].sum() == 6 and before.sum() == 0
    with pytest.raises(KeyError, match="'n'"):
        td._fast_apply(lambda x, y: x, TensorDict(a=torch.zeros(3)))


def test_apply_nest_expands_parameters() -> None:
    """TorchRL's losses with several value networks."""
    made = TensorDictParams(TensorDict(w=torch.ones(3), inner={"v": torch.ones(2)}))

    def expanded(param: Any) -> Any:
        if is_tensor_collection(param):
            return param._apply_nest(expanded, batch_size=[2, *param.shape], filter_empty=False, call_on_nested=True)
        return nn.Parameter(param.data.expand(2, *param.shape).clone())

    result = made._apply_nest(expanded, batch_size=[2], filter_empty=False, call_on_nested=True)
    assert result.batch_size == result["inner"].batch_size == torch.Size([2])
    assert result["w"].shape == (2, 3) and isinstance(result["inner", "v"], nn.Parameter)


def test_apply_nest_on_values() -> None:
    """TorchRL's OpenX data sets."""

    def spread(value: Any) -> Any:
        return value.maybe_to_stack() if isinstance(value, NonTensorData) else value

    for container in (dense(Path()), tensorclass(Path())):
        result = container._apply_nest(spread, is_leaf=lambda cls: issubclass(cls, torch.Tensor) or _is_non_tensor(cls))
        assert isinstance(result._get_str("s", None), NonTensorStack) and type(result) is type(container)


# --- parts of the batch ---------------------------------------------------------------------------------------------


def members(count: int = 3, **entries: Any) -> list[Any]:
    return [TensorDict(a=torch.full((2,), i), n={"b": torch.tensor(i)}, **entries) for i in range(count)]


def test_stack_onto(make: Make) -> None:
    container = make()
    if isinstance(container, (TensorDictParams, PersistentTensorDict)):
        pytest.skip("storages are in memory, and no parameters")
    assert container._stack_onto_(members(), 0) is container
    assert container.get("a").tolist() == [[0, 0], [1, 1], [2, 2]] and container.get(("n", "b")).tolist() == [0, 1, 2]


def test_stack_onto_writes_into_a_slice_of_a_storage(tmp_path: Path) -> None:
    """TorchRL's storages, memory-mapped ones and locked ones too."""
    source = TensorDict(a=torch.zeros(3, 2), n={"b": torch.zeros(3)}, batch_size=[3])
    for storage in (source.clone(), source.clone().lock_(), source.clone().memmap_(tmp_path)):
        storage[1:]._stack_onto_(members(2), dim=0)
        assert storage["a"].tolist() == [[0, 0], [0, 0], [1, 1]]


def test_stack_onto_other_dims() -> None:
    for dim in (1, -1):
        td = TensorDict(a=torch.zeros(2, 3, 1), batch_size=[2, 3])
        td._stack_onto_([TensorDict(a=torch.full((2, 1), i), batch_size=[2]) for i in range(3)], dim)
        assert td["a"].squeeze(-1).tolist() == [[0, 1, 2]] * 2


def test_stack_onto_takes_the_entries_that_both_have() -> None:
    td = TensorDict(a=torch.zeros(3, 2), n={"b": torch.zeros(3)}, batch_size=[3])
    td._stack_onto_(members(c=torch.ones(1)), 0)
    assert td.keys() == {"a", "n"} and td["a"].sum() == 6
    td._stack_onto_([TensorDict(a=torch.ones(2)) for _ in range(3)], 0)
    assert td["a"].sum() == 6 and td["n", "b"].tolist() == [0, 1, 2]


def test_stack_onto_values() -> None:
    for values in ("q", NonTensorStack("x", "y", "z")):
        td = TensorDict(a=torch.zeros(3, 2), s=values, batch_size=[3])
        td._stack_onto_([TensorDict(a=torch.ones(2), s=str(i)) for i in range(3)], 0)
        assert td["s"] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("items", "dim", "error"),
    [
        (members(2), 0, RuntimeError),
        (members(4), 0, RuntimeError),
        ([TensorDict(a=torch.ones(5), n={"b": torch.ones(())}) for _ in range(3)], 0, RuntimeError),
        (members(), 1, IndexError),
    ],
)
def test_stack_onto_what_does_not_fit(items: list[Any], dim: int, error: type[Exception]) -> None:
    td = TensorDict(a=torch.zeros(3, 2), n={"b": torch.zeros(3)}, batch_size=[3])
    with pytest.raises(error):
        td._stack_onto_(items, dim)
    assert td["a"].sum() == 0 and td["a"].shape == (3, 2)


@pytest.mark.parametrize("kind", [dense, tensorclass], ids=lambda kind: kind.__name__)
def test_sub_tensordict_writes_through(kind: Any) -> None:
    """TorchRL's VD4RL data sets put the next pixels into all steps but the last."""
    td = kind(Path())
    assert td._get_sub_tensordict(range(1)).batch_size[0] == 1
    part = td._get_sub_tensordict(slice(0, -1))
    assert part.batch_size == torch.Size([2]) and type(part) is type(td)
    part.set("a", torch.ones(2, 2), inplace=True)
    part.set(("n", "pixels"), torch.ones(2), inplace=True)
    assert td.get("a").sum(1).tolist() == [2, 2, 0] and td.get(("n", "pixels")).tolist() == [1, 1, 0]
    part.update({"n": {"more": torch.ones(2)}})
    assert td.get(("n", "more")).tolist() == [1, 1, 0]
    part.zero_()
    assert td.get("a").sum() == 0 and td.get(("n", "more")).sum() == 0


def test_sub_tensordict_of_other_indices() -> None:
    td = TensorDict(batch_size=[4, 3], names=["x", "y"])
    for index, size, names in [((slice(None), 1), (4,), ["x"]), ((..., 2), (4,), ["x"]), (0, (3,), ["y"])]:
        part = td._get_sub_tensordict(index)
        assert part.batch_size == torch.Size(size) and part.names == names
        part["new"] = torch.ones(size)
        assert td["new"][index].sum() == size[0]
    columns = lazy_stack([td._get_sub_tensordict((slice(None), j)) for j in range(3)], 1)
    assert columns.batch_size == td.batch_size


def test_sub_tensordict_of_a_lazy_stack() -> None:
    lazy = stack(Path())
    lazy._get_sub_tensordict(slice(0, 2)).set_("a", torch.ones(2, 2))
    assert lazy["a"].sum(1).tolist() == [2, 2, 0]


def test_sub_tensordict_that_would_be_a_copy(tmp_path: Path) -> None:
    for container, index in [(dense(tmp_path), torch.tensor([0, 2])), (persistent(tmp_path), slice(0, 2))]:
        with pytest.raises(IndexError, match="copy"):
            container._get_sub_tensordict(index)


def test_sub_tensordict_of_a_locked_container() -> None:
    td = dense(Path()).lock_()
    part = td._get_sub_tensordict(slice(0, 2))
    with pytest.raises(RuntimeError, match="locked"):
        part.set("new", torch.ones(2))
    assert "new" not in td.keys() and "new" not in part.keys()
    part.set_("a", torch.ones(2, 2))
    assert td["a"].sum() == 4


def test_copies_of_a_sub_tensordict_stand_alone() -> None:
    td = dense(Path())
    part = td._get_sub_tensordict(slice(0, 2))
    for other in (part.clone(), part.copy(), copy.deepcopy(part), pickle.loads(pickle.dumps(part))):
        other["new"] = torch.ones(2)
        assert other["new"].sum() == 2 and "new" not in td.keys() and "new" not in part.keys()


@pytest.mark.parametrize(
    ("entries", "exclusive"),
    [
        ([{"a": torch.zeros(2)}, {"a": torch.zeros(3)}], False),
        ([{"a": torch.zeros(2)}, {"a": torch.zeros(2), "b": torch.zeros(1)}], True),
        ([{"a": torch.zeros(2)}, {"b": torch.zeros(2)}], True),
        ([{"n": {"x": torch.zeros(1)}}, {"n": {"y": torch.zeros(1)}}], True),
        ([{"a": torch.zeros(2)}, {"a": {"c": torch.zeros(2)}}], True),
    ],
)
def test_exclusive_keys(entries: list[Any], exclusive: bool) -> None:
    lazy = LazyStackedTensorDict(*map(TensorDict, entries), stack_dim=0)
    assert lazy._has_exclusive_keys is exclusive
    if all("n" in entry for entry in entries):
        assert lazy.get("n")._has_exclusive_keys is exclusive
    assert lazy_stack([lazy, lazy])._has_exclusive_keys is exclusive


def test_exclusive_keys_of_others(make: Make) -> None:
    assert make()._has_exclusive_keys is False
    assert NonTensorStack("a", "b")._has_exclusive_keys is False


# --- names and state ------------------------------------------------------------------------------------------------


def test_names(make: Make) -> None:
    container = make()
    assert container._has_names() is False
    container.names = ["time"]
    assert container._has_names() is True
    assert container._erase_names() is None
    assert container._has_names() is False and container.names == [None]


def test_sync_all(make: Make) -> None:
    assert make()._sync_all() is None


def test_clear_refs_for_compile(make: Make) -> None:
    container = make().lock_()
    assert container.clear_refs_for_compile_() is container and container.is_locked


def test_clear_refs_in_compiled_code() -> None:
    """TorchRL's losses: a locked container is made and returned by compiled code."""

    @torch.compile(fullgraph=True, backend="eager")
    def made(x: torch.Tensor) -> Any:
        return TensorDict(a=x, n={"b": x + 1}).lock_().clear_refs_for_compile_()

    td = made(torch.zeros(2))
    assert td.is_locked and td["n"].is_locked
    with pytest.raises(RuntimeError, match="nested in a locked one"):
        td["n"].unlock_()
    assert not td.unlock_()["n"].is_locked


def test_fast_apply_and_entries_in_compiled_code() -> None:
    @torch.compile(fullgraph=True, backend="eager")
    def stepped(td: Any) -> Any:
        out = td._fast_apply(lambda x: x + 1, filter_empty=True)
        return out._set_str("c", td._get_str("a", None) * 2, inplace=False, validated=True)

    result = stepped(TensorDict(a=torch.ones(2), n={"b": torch.ones(2)}, batch_size=[2]))
    assert result["n", "b"].tolist() == [2, 2] and result["c"].tolist() == [2, 2]


def test_a_field_called_cache() -> None:
    """physicsnemo's meshes."""

    class Mesh(TensorClass):
        points: torch.Tensor
        _cache: TensorDict | None = None

    mesh = Mesh(torch.zeros(3))
    assert mesh._cache is None
    mesh._cache = TensorDict(cell={})
    mesh._cache["cell", "areas"] = torch.ones(2)
    assert (
        mesh._cache.get(("cell", "areas"), None).sum() == 2 and mesh.clone()._cache.get(("cell", "none"), None) is None
    )


def test_transform_keys() -> None:
    td = TensorDict({"a": torch.ones(2, 3), "n": {"b": torch.zeros(2), "gone": torch.zeros(2), "s": "text"}}, [2])
    put = {"a": ("p", "a"), "n": "N", "b": "B", "s": "s"}
    for container in (td, lazy_stack(list(td.unbind(0)))):
        renamed = container._transform_keys(put.get)
        assert set(renamed.keys(True)) == {"p", ("p", "a"), "N", ("N", "B"), ("N", "s")}
        assert type(renamed) is type(container) and renamed.batch_size == (2,)
        assert (renamed["p", "a"] == 1).all() and renamed["N", "s"] == container["n", "s"]
    assert td._transform_keys(str.upper)["A"] is td["a"]
