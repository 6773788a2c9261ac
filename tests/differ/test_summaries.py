"""Tests of summaries: lazy and dense ones compare, broken containers are found, differences are judged one by one."""

from __future__ import annotations

import torch

from differ.comparing import differences
from differ.excuses import find_doubt
from differ.invariants import broken_in
from differ.judging import Group, judge
from differ.summaries import summarise
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack


def test_a_lazy_stack_compares_with_a_dense_container() -> None:
    members = [TensorDict({"a": torch.arange(6.0).view(2, 3) + i, "n": {"b": torch.ones(2)}}, [2]) for i in (0, 9)]
    lazy, dense = summarise(lazy_stack(members, 1)), summarise(torch.stack(members, 1))
    assert [str(d) for d in differences(lazy, dense, "r0")] == [
        "lazy or dense at r0: reference a stack along dim 1 | ours dense"
    ]
    other = summarise(torch.stack(members[::-1], 1))
    assert {d.kind for d in differences(lazy, other, "r0")} == {"lazy or dense", "values"}


def test_stacks_of_values_compare_with_dense_ones() -> None:
    members = [TensorDict({"s": NonTensorStack("a", str(i), "c")}, [3]) for i in range(2)]
    for dim in (0, 1):
        lazy, dense = summarise(lazy_stack(members, dim)), summarise(torch.stack(members, dim))
        assert {d.kind for d in differences(lazy, dense, "r0")} == {"lazy or dense"}
    other = summarise(torch.stack(members[::-1], 1))
    assert {d.kind for d in differences(lazy, other, "r0")} == {"lazy or dense", "non-tensor values"}


def test_holders_compare_with_their_values() -> None:
    stack, one = summarise(NonTensorStack((1, 2), (1, 2))), summarise(NonTensorData((1, 2)))
    assert {d.kind for d in differences(one, summarise((1, 2)), "r0")} == {"holder or value"}
    assert {d.kind for d in differences(one, summarise((1, 3)), "r0")} == {"type"}
    assert "one value or a stack" in {d.kind for d in differences(one, stack, "r0")}
    assert "one value or a stack" not in {d.kind for d in differences(summarise(NonTensorData((1, 3))), stack, "r0")}


def test_stacks_that_cannot_be_dense_compare_part_by_part() -> None:
    values = NonTensorStack("v", "w")
    rows = [TensorDict({"n": {"a": torch.ones(2, 1 + i) + i}, "s": values}, [2]) for i in range(3)]
    whole = lazy_stack(rows, 0)
    other = lazy_stack([lazy_stack([row[i] for row in rows], 0) for i in range(2)], 1)
    assert {d.kind for d in differences(summarise(whole), summarise(other), "r0")} == {"lazy or dense"}
    wrong = lazy_stack([lazy_stack([row[i] for row in [rows[0] + 1, *rows[1:]]], 0) for i in range(2)], 1)
    assert {d.path for d in differences(summarise(whole), summarise(wrong), "r0") if d.kind == "values"} == {
        f"r0<0><{i}>[n][a]" for i in range(2)
    }
    inside = TensorDict({"n": lazy_stack([row["n"] for row in rows], 0)}, [3, 2])
    some = whole.clone().exclude("s")
    assert {d.kind for d in differences(summarise(inside), summarise(some), "r0")} == {"lazy or dense"}
    some[1]["n", "b"] = torch.ones(2)
    assert [d.path for d in differences(summarise(inside), summarise(some), "r0") if d.kind != "lazy or dense"] == [
        "r0<1>[n]"
    ]


def test_half_precision_is_rounded() -> None:
    for dtype, close in ((torch.float16, True), (torch.float32, False)):
        a, b = (summarise(TensorDict(a=torch.tensor(x, dtype=dtype))) for x in (0.35669, 0.35694))
        assert (differences(a, b, "r0") == []) is close


def test_broken_containers_are_found() -> None:
    whole = summarise(TensorDict({"n": TensorDict({"a": torch.zeros(2, 3)}, [2, 3])}, [2], names=["t"]))
    assert list(broken_in(whole, "r0")) == []
    whole["entries"][0]["entries"][0]["shape"] = [3]
    whole["entries"][0]["names"] = ["u", None]
    assert [place for place, _ in broken_in(whole, "r0")] == ["r0[n]", "r0[n][a]"]


def test_several_differences_are_judged_one_by_one() -> None:
    known = "lazy or dense at r0: reference dense | ours a stack along dim 0", "names lost by reference at r0: "
    group = Group("x.anything() | TensorDict | result | names lost by reference", 0, 1, "", "runs", "runs", [*known])
    assert judge(group)[0] in "BD"
    wrong = group._replace(key="x.anything() | TensorDict | result | names lost by reference+values")
    assert judge(wrong._replace(differences=[*known, "values at r0[a]: reference 1 | ours 2"]))[0] == "?"


def test_errors_that_the_operands_do_not_bear_out_count() -> None:
    td = TensorDict({"a": torch.zeros(2, 3)}, [2])
    errors = {
        "LockedError": (lambda: td.copy().lock_().set("b", 1), "x.set(key, 1)"),
        "DimError": (lambda: td.sum(1), "x.sum(1)"),
        "KeyMismatchError": (lambda: torch.stack([td, TensorDict(batch_size=[2])]), "torch.stack([x, y])"),
        "NamesError": (lambda: td.refine_names("a", "b"), "x.sum(1)"),
    }
    for name, (call, code) in errors.items():
        try:
            call()
        except Exception as error:
            raised = {"cls": type(error).__name__, "msg": str(error)}
        assert raised["cls"] == name
        true = [
            td.copy().lock_() if name == "LockedError" else td,
            TensorDict(q=torch.ones(2), batch_size=[2], names=["n"]),
        ]
        false = TensorDict({"a": torch.zeros(2, 3)}, [2, 3])
        assert find_doubt(raised, code, [summarise(each) for each in true]) == ""
        assert find_doubt(raised, code, [summarise(false)])
    added = {"cls": "DimError", "msg": "dim -2 is out of range: a dim added to 0 batch dims can be at -1 to 0"}
    assert find_doubt(added, "stack((x0), -2)", [summarise(td)]) == ""
    joined = {"cls": "DimError", "msg": "dim -1 is out of range: the container has 0 batch dims, so dims go from"}
    assert find_doubt(joined, "cat((x0), -1)", [summarise(td)]) == ""
    assert find_doubt(added, "torch.stack([x0, x1], -2)", [summarise(td)])
    group = Group("x.set(key, 1) | TensorDict | ours raises | LockedError", 0, 1, "", "runs", "LockedError: it is", [])
    assert judge(group)[0] == "D"
    assert judge(group._replace(differences=["unfounded at r0: reference runs | ours no operand is locked"]))[0] == "A"
