"""The reference reads the values, stacks and tensorclasses that this package writes, and the other way round."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import torch

from reference import Reference
from tensordict import (
    LazyStackedTensorDict,
    MetaData,
    NonTensorData,
    NonTensorStack,
    TensorClass,
    TensorDict,
    TypedTensorDict,
    UnbatchedTensor,
    lazy_stack,
)

ROOT = pathlib.Path(__file__).parents[2]
ENVIRONMENTS = [".venv-behaviour", ".venv-reference"]

# The classes of both sides have to have the same name.
CLASSES = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch
from typing import Any, Optional
from tensordict import *
from tensordict import lazy_stack, tensorclass
@tensorclass
class Inner:
    a: torch.Tensor
@tensorclass
class Item:
    x: torch.Tensor
    label: str
    extra: Optional[torch.Tensor] = None
    inner: Optional[Inner] = None
"""

READ = (
    CLASSES
    + """
td = TensorDict.load_memmap(sys.argv[1])
item, named, stack = td["item"], td["named"], td["stack"]
found = {
    "keys": sorted(td.keys()),
    "values": [td["text"], td["tuple"], td["meta"], td["deep", "dict"], list(td["several"])],
    "kinds": [type(td.get(key)).__name__ for key in ("text", "meta", "several", "item", "stack", "typed", "items")],
    "batch sizes": [list(td.get(key).batch_size) for key in ("text", "meta", "several")],
    "item": [item.x.tolist(), item.label, item.extra, item.inner.a.tolist(), list(item.batch_size)],
    "stack": [[member["a"].tolist(), member["v"]] for member in stack.tensordicts],
    "named": [named.stack_dim, named["a"].tolist(), named.names[1]],
    "items": [[one.x.tolist(), one.label] for one in td["items"]],
    "typed": td["typed", "obs"].tolist(),
}
print(json.dumps(found))
"""
)

WRITE = (
    CLASSES
    + """
from tensordict import MetaData, NonTensorData, NonTensorStack
td = TensorDict({
    "text": "x",
    "list": NonTensorData([1, [2.5, None]], batch_size=[2]),
    "meta": MetaData({"a": True}, batch_size=[2]),
    "several": NonTensorStack("a", "b"),
    "wide": NonTensorStack(NonTensorStack("a", "b", "c"), NonTensorStack("d", "e", "f")),
    "across": TensorDict({
        "s": NonTensorStack(NonTensorStack("a", "b"), NonTensorStack("c", "d"), stack_dim=1),
    }, [2, 2]),
    "bytes": NonTensorData(b"x", batch_size=[2]),
    "several bytes": NonTensorStack(b"a", b"b"),
    "item": Item(torch.ones(2, 3), "cat", inner=Inner(torch.zeros(2), batch_size=[2]), batch_size=[2]),
    "items": lazy_stack([Item(torch.ones(i + 1), str(i)) for i in range(2)]),
    "stack": lazy_stack([TensorDict({"a": torch.ones(i), "v": str(i)}) for i in range(2)]),
    "dim 1": LazyStackedTensorDict(*[TensorDict({"a": torch.full((2, 1), i)}, [2]) for i in range(3)], stack_dim=1),
}, [2])
td.memmap(sys.argv[1])
inside = td.exclude("bytes", "several bytes").memmap(sys.argv[1] + "-changed", copy_existing=True)
inside.update_({"text": "changed"})
"""
)


class Inner(TensorClass):
    __module__ = "__main__"

    a: torch.Tensor


class Item(TensorClass):
    __module__ = "__main__"

    x: torch.Tensor
    label: str
    extra: torch.Tensor | None = None
    inner: Inner | None = None


class Step(TypedTensorDict):
    obs: torch.Tensor


@pytest.mark.reference
def test_reference_reads_ours(reference: Reference, tmp_path: pathlib.Path) -> None:
    members = [TensorDict({"a": torch.full((2,), i)}, [2], names=["x"]) for i in range(2)]
    td = TensorDict(
        {
            "text": "x",
            "tuple": NonTensorData((1, float("nan")), batch_size=[2]),
            "meta": MetaData("m", batch_size=[2]),
            "deep": {"dict": NonTensorData({"a": [1]})},
            "several": NonTensorStack("a", (2,)),
            "item": Item(torch.ones(2, 3), "cat", inner=Inner(torch.zeros(2), batch_size=[2]), batch_size=[2]),
            "items": lazy_stack([Item(torch.ones(i + 1), str(i)) for i in range(2)]),
            "stack": lazy_stack([TensorDict({"a": torch.ones(i), "v": ("t", i)}) for i in range(2)]),
            "named": LazyStackedTensorDict(*members, stack_dim=1, stack_dim_name="time"),
            "typed": Step(obs=torch.ones(2), batch_size=[2]),
            # Entries that the reference does not know and must skip.
            "unbatched": UnbatchedTensor(torch.ones(5)),
        },
        [2],
        names=["x"],
    )
    td.memmap_(tmp_path / "x", share_non_tensor=True)
    td.update_({"text": "written through"})
    assert json.loads(reference.run(READ, tmp_path / "x")) == {
        "keys": sorted(set(td.keys()) - {"unbatched"}),
        "values": ["written through", [1, None], "m", {"a": [1]}, ["a", [2]]],
        "kinds": ["NonTensorData", "MetaData", "NonTensorStack", "Item", "LazyStackedTensorDict", "TensorDict", "Item"],
        "batch sizes": [[2], [2], [2]],
        "item": [[[1, 1, 1]] * 2, "cat", None, [0, 0], [2]],
        "stack": [[[], ["t", 0]], [[1], ["t", 1]]],
        # The older one has no names there.
        "named": [1, [[0, 1], [0, 1]], "time" if reference.environment == ".venv-reference" else None],
        "items": [[[1], "0"], [[1, 1], "1"]],
        "typed": [1, 1],
    }


@pytest.mark.reference
def test_reference_reads_our_pickles(reference: Reference, tmp_path: pathlib.Path) -> None:
    td = TensorDict({"v": NonTensorData(b"x"), "s": NonTensorStack(b"a", "b")})
    td.memmap(tmp_path, allow_pickle=True)
    program = CLASSES + "td = TensorDict.load_memmap(sys.argv[1], allow_pickle=True); print([td['v'], *td['s']])"
    assert reference.run(program, tmp_path).strip() == str([b"x", b"a", "b"])


@pytest.mark.reference
def test_ours_reads_the_reference(reference: Reference, tmp_path: pathlib.Path) -> None:
    reference.run(WRITE, tmp_path / "x")
    with pytest.raises(RuntimeError, match="'bytes'.*allow_pickle=True"):
        TensorDict.load_memmap(tmp_path / "x")
    td: Any = TensorDict.load_memmap(tmp_path / "x", allow_pickle=True)
    assert (td["text"], td["list"], td["meta"], td["bytes"]) == ("x", [1, [2.5, None]], {"a": True}, b"x")
    assert all(td.get(key).batch_size == (2,) for key in ("text", "list", "meta", "bytes", "several"))
    assert (td["several"], td["several bytes"], td["wide"]) == (["a", "b"], [b"a", b"b"], [list("abc"), list("def")])
    assert td.get("wide").batch_size == (2, 3)
    assert (td["across", "s"], td.get(("across", "s")).stack_dim) == ([["a", "c"], ["b", "d"]], 1)
    item = td["item"]
    assert type(item) is Item and type(item.inner) is Inner and item.extra is None
    assert (item.x.tolist(), item.label, item.inner.a.tolist()) == ([[1, 1, 1]] * 2, "cat", [0, 0])
    assert [(one.x.tolist(), one.label) for one in td["items"]] == [([1], "0"), ([1, 1], "1")]
    assert [(one["a"].tolist(), one["v"]) for one in td["stack"]] == [([], "0"), ([1], "1")]
    assert td["dim 1"].stack_dim == 1 and td["dim 1"]["a"].squeeze(-1).tolist() == [[0, 1, 2]] * 2
    assert TensorDict.load_memmap(tmp_path / "x-changed")["text"] == "changed"
    # Saved again, it is what the reference wrote.
    td.memmap(tmp_path / "again", copy_existing=True, allow_pickle=True)
    for path in sorted((tmp_path / "x").rglob("meta.json")):
        theirs = json.loads(path.read_text())
        mine = json.loads((tmp_path / "again" / path.relative_to(tmp_path / "x")).read_text())
        versions = ("_format_version", "_class", "stack_dim_name")
        # The newer one does not write down the fields that are None.
        kept = {key: x for key, x in mine.items() if key in theirs or not (key.startswith("_") or x is None)}
        assert kept == {key: value for key, value in theirs.items() if key not in versions}, path
