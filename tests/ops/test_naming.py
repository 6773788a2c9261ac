"""Names of dims: the constructor, nested containers with dims of their own, wildcards."""

from __future__ import annotations

import pytest
import torch

from tensordict import TensorDict, lazy_stack
from tensordict.core.exceptions import NamesError


def make() -> TensorDict:
    inner = TensorDict({"x": torch.zeros(2, 3, 4)}, [2, 3, 4], names=[None, None, "own"])
    return TensorDict({"a": torch.zeros(2, 3), "n": inner}, [2, 3], names=["t", "e"])


def test_the_constructor_names_nested_containers_and_leaves_the_source_alone() -> None:
    inner = TensorDict({"x": torch.zeros(2, 3, 4)}, [2, 3, 4])
    td = TensorDict({"n": inner}, [2, 3], names=("t", "e"))
    assert td["n"].names == ["t", "e", None]
    assert inner.names == [None, None, None]
    with pytest.raises(RuntimeError, match=r"'n'.*'p'.*'t'"):
        TensorDict({"n": inner.rename("p", ...)}, [2, 3], names=["t", "e"])
    with pytest.raises(ValueError, match="do not fit"):
        TensorDict(batch_size=[2], names=["t", "e"])


def test_dims_of_nested_containers_keep_their_own_names() -> None:
    td = make()
    assert td["n"].names == ["t", "e", "own"]
    assert td.rename(t="T")["n"].names == ["T", "e", "own"]
    assert td.sum("t")["n"].names == ["e", "own"]
    assert td[0]["n"].names == ["e", "own"]
    assert td.permute(1, 0)["n"].names == ["e", "t", "own"]
    assert td.rename(None)["n"].names == [None, None, "own"]
    assert torch.stack([td, td])["n"].names == [None, "t", "e", "own"]
    assert td["n"].sum("own").names == ["t", "e"]


def test_a_name_that_a_nested_container_uses_is_refused_and_nothing_changes() -> None:
    td = make()
    for call in (lambda: td.rename_(t="own"), lambda: setattr(td, "names", ["own", "e"]), lambda: td.rename(e="own")):
        with pytest.raises(ValueError, match=r"'n'.*'own'"):
            call()
        assert td.names == ["t", "e"] and td["n"].names == ["t", "e", "own"]


def test_wildcards_and_swaps() -> None:
    td = TensorDict(batch_size=[1, 2, 3, 4], names=list("abcd"))
    assert td.rename("w", ..., "z").names == ["w", "b", "c", "z"]
    assert td.rename("...", "z").names == ["a", "b", "c", "z"]
    assert td.rename(a="b", b="a").names == ["b", "a", "c", "d"]
    assert td.rename(c=None).names == ["a", "b", None, "d"]
    assert td.rename("w", "x", "y", "z", ...).names == list("wxyz")
    with pytest.raises(ValueError, match="do not fit 4"):
        td.rename("v", "w", "x", "y", "z", ...)
    assert td.names == list("abcd")


def test_locked_containers_can_be_renamed() -> None:
    td = make().lock_()
    assert td.rename_(t="T").is_locked
    assert td["n"].names == ["T", "e", "own"]
    assert not td.rename(T="t").is_locked


def test_names_that_are_missing_agree_with_any() -> None:
    a, b = TensorDict(batch_size=[2], names=["t"]), TensorDict(batch_size=[2])
    assert torch.stack([a, b]).names == [None, None]
    assert torch.cat([a, a]).names == ["t"]
    with pytest.raises(ValueError, match=r"dim 0 is named 't' .* position 0 and 's' .* position 2"):
        torch.cat([a, b, a.rename("s")])
    with pytest.raises(NamesError, match="'t'.*'s'"):
        torch.stack([a, a.rename("s")], out=TensorDict(batch_size=[2, 2]))


def test_indices_of_every_kind_keep_the_names_of_the_dims_that_stay() -> None:
    td = TensorDict({"a": torch.zeros(2, 3, 4)}, [2, 3, 4], names=["x", "y", "z"])
    assert td[:, 0].names == ["x", "z"]
    assert td[None, ..., -1].names == [None, "x", "y"]
    assert td[torch.tensor([0, 1])].names == ["x", "y", "z"]
    assert td[torch.zeros(5, 6, dtype=torch.long)].names == ["x", "x", "y", "z"]
    assert td[torch.ones(2, dtype=torch.bool)].names == ["x", "y", "z"]
    assert td[torch.ones(2, 3, dtype=torch.bool)].names == [None, "z"]
    assert td[:, [0, 2]].names == ["x", "y", "z"]


def test_shape_operations() -> None:
    td = TensorDict({"a": torch.zeros(2, 3, 1)}, [2, 3, 1], names=["x", "y", "z"])
    assert td.squeeze().names == ["x", "y"]
    assert td.unsqueeze(1).names == ["x", None, "y", "z"]
    assert td.transpose(0, 2).names == ["z", "y", "x"]
    assert td.movedim(0, -1).names == ["y", "z", "x"]
    assert td.expand(2, 3, 5).names == ["x", "y", "z"]
    assert [item.names for item in td.unbind(1)] == [["x", "z"]] * 3
    assert td.flatten(0, 1).names == [None, "z"]
    assert td.view(6).names == [None]


def test_reductions_by_name() -> None:
    td = TensorDict({"a": torch.rand(2, 3, 4)}, [2, 3], names=["env", "time"])
    torch.testing.assert_close(td.sum("time")["a"], td["a"].sum(1))
    torch.testing.assert_close(td.mean(("time", "env"))["a"], td["a"].mean((0, 1)))
    assert td.max("env").indices.names == ["time"]
    assert td.cummax("time").values.names == ["env", "time"]
    assert td.any("env", keepdim=True).names == ["env", "time"]
    torch.testing.assert_close(td.softmax("time")["a"], td["a"].softmax(1))
    with pytest.raises(IndexError, match=r"'step'.*'env', 'time'"):
        td.sum("step")


def test_containers_that_only_some_members_have_are_named_too() -> None:
    nested = TensorDict({"d": TensorDict({}, [3, 4])}, [3])
    stack = lazy_stack([nested, TensorDict({}, [3])], 1)
    stack.names = ["t", "u"]
    assert nested["d"].names == ["t", None]
    nested["d"].names = ["t", "u2"]
    with pytest.raises(ValueError, match="u2"):
        stack.names = ["u2", "v"]
    assert stack.names == ["t", "u"] and nested["d"].names == ["t", "u2"]
