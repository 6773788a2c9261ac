"""Conversion from and to other structures, and construction."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree

from compile_table.forms import EVERY, MAIN, MOST, NESTED, Form
from compile_table.kinds import Pair, Typed
from tensordict import (
    NonTensorData,
    TensorDict,
    TensorDictParams,
    from_any,
    from_dict,
    from_pytree,
    from_tuple,
    fromkeys,
    make_tensordict,
    unravel_key,
    unravel_key_list,
)

Point = namedtuple("Point", ["x", "y"])


@dataclass
class Record:
    x: Any
    y: Any


def state_of(td: Any) -> Any:
    other = td * 0
    other.load_state_dict(td.state_dict())
    return other


FORMS = [
    Form("to_dict", lambda td: td.to_dict(), EVERY, quick="lazy"),
    Form("to_dict: retain_none", lambda td: td.to_dict(retain_none=False), MAIN),
    Form("to_tensordict", lambda td: td.to_tensordict(), EVERY, quick="tensorclass"),
    Form("to_namedtuple", lambda td: td.to_namedtuple(), ("nested", "lazy")),
    Form("to_pytree", lambda td: td.to_pytree(), NESTED),
    Form("to_struct_array", lambda td: td.to_struct_array(), ("flat",)),
    Form("from_struct_array", lambda td: TensorDict.from_struct_array(td.to_struct_array()), ("flat",)),
    Form("numpy", lambda td: td.numpy(), ("nested", "flat")),
    Form("tolist", lambda td: td.tolist(), NESTED),
    Form("state_dict", lambda td: td.state_dict(), ("nested", "lazy", "params"), quick="nested"),
    Form("load_state_dict", state_of, ("nested", "lazy")),
    Form("from_dict", lambda td: TensorDict.from_dict({"x": td.get("a"), "n": {"y": td.get("a")}}), NESTED),
    Form("from_dict: auto", lambda td: TensorDict.from_dict({"x": td.get("a") * 2}, auto_batch_size=True), NESTED),
    Form(
        "from_dict: batch dims",
        lambda td: TensorDict.from_dict({"x": td.get("a")}, auto_batch_size=True, batch_dims=1),
        NESTED,
    ),
    Form(
        "from_dict: batch size", lambda td: TensorDict.from_dict({"x": td.get("a")}, batch_size=td.batch_size), NESTED
    ),
    Form("from_dict: function", lambda td: from_dict({"x": td.get("a")}), NESTED),
    Form("from_dict_instance", lambda td: td.from_dict_instance({"a": td.get("a") * 2}), NESTED),
    Form("from_tuple", lambda td: TensorDict.from_tuple((td.get("a"), td.get("a") * 2)), NESTED),
    Form("from_tuple: function", lambda td: from_tuple((td.get("a"), td.get("a") * 2)), NESTED),
    Form("from_namedtuple", lambda td: TensorDict.from_namedtuple(Point(td.get("a"), td.get("a") * 2)), NESTED),
    Form("from_dataclass", lambda td: TensorDict.from_dataclass(Record(td.get("a"), td.get("a") * 2)), NESTED),
    Form("from_any", lambda td: TensorDict.from_any({"x": [td.get("a")], "y": (td.get("a"),)}), NESTED),
    Form("from_any: function", lambda td: from_any({"x": td.get("a")}), NESTED),
    Form("from_list", lambda td: TensorDict.from_list([{"x": td.get("a")}, {"x": td.get("a") * 2}]), NESTED),
    Form("from_pytree", lambda td: from_pytree({"x": td.get("a"), "y": [td.get("a")]}), NESTED),
    Form("from_pytree: class method", lambda td: TensorDict.from_pytree({"x": td.get("a")}), NESTED),
    Form("from_schema", lambda td: TensorDict.from_schema({"x": ((3,), torch.float32)}).batch_size, NESTED),
    Form("fromkeys: function", lambda td: fromkeys(["x"], 1), NESTED),
    Form("make_tensordict", lambda td: make_tensordict({"x": td.get("a")}, batch_size=td.batch_size), NESTED),
    Form("make_tensordict: auto", lambda td: make_tensordict(x=td.get("a"), auto_batch_size=True), NESTED),
    Form("unravel_key", lambda td: td.get(unravel_key(("b", ("c",)))), NESTED),
    Form("unravel_key_list", lambda td: [td.get(key) for key in unravel_key_list(["a", ("b", ("c",))])], NESTED),
    Form(
        "TensorDict",
        lambda td: TensorDict({"x": td.get("a") + 1, "n": {"y": td.get("a")}}, td.batch_size),
        MAIN,
        quick="nested",
    ),
    Form("TensorDict: keywords", lambda td: TensorDict(x=td.get("a") + 1, batch_size=td.batch_size), MAIN),
    Form("TensorDict: no batch", lambda td: TensorDict(x=td.get("a") + 1), MAIN),
    Form("TensorDict: names", lambda td: TensorDict(x=td.get("a"), batch_size=td.batch_size, names=["t", "e"]), NESTED),
    Form("TensorDict: device", lambda td: TensorDict(x=td.get("a"), batch_size=td.batch_size, device="cpu"), NESTED),
    Form("TensorDict: lock", lambda td: TensorDict(x=td.get("a"), batch_size=td.batch_size, lock=True), NESTED),
    Form("TensorDict: container", lambda td: TensorDict(td, td.batch_size[:1]), NESTED),
    Form("TensorDict: value", lambda td: TensorDict(x=td.get("a"), text="word", batch_size=td.batch_size), NESTED),
    Form("TensorDict: batch of int", lambda td: TensorDict(x=td.get("a"), batch_size=td.shape[0]), NESTED),
    Form("TensorDict: empty", lambda td: TensorDict({}, td.batch_size), NESTED),
    Form("TensorDict: numbers", lambda td: TensorDict(x=1, y=2.0, z=[1, 2]), NESTED),
    Form("TensorDictParams", lambda td: TensorDictParams(td).get("a") * 2, NESTED),
    Form("NonTensorData", lambda td: td.copy().set("text", NonTensorData("word", batch_size=td.batch_size)), NESTED),
    Form("tensorclass", lambda td: Pair(a=td.get("a"), b=td.get("b"), batch_size=td.batch_size), MAIN, quick="lazy"),
    Form("tensorclass: no batch", lambda td: Pair(td.get("a"), td.get("b")), NESTED),
    Form("tensorclass: text", lambda td: Pair(a=td.get("a"), z="word", batch_size=td.batch_size), NESTED),
    Form("tensorclass: device", lambda td: Pair(a=td.get("a"), batch_size=td.batch_size, device="cpu"), NESTED),
    Form("tensorclass: from_tensordict", lambda td: Pair.from_tensordict(td), ("nested", "lazy", "view")),
    Form("tensorclass: from_dict", lambda td: Pair.from_dict({"a": td.get("a"), "b": {"c": td.get("a")}}), NESTED),
    Form("TypedTensorDict", lambda td: Typed(a=td.get("a"), b=td.get("b"), batch_size=td.batch_size), NESTED),
    Form("tree_map", lambda td: _pytree.tree_map(lambda leaf: leaf * 2, td), MOST),
    Form("tree_leaves", lambda td: [leaf * 2 for leaf in _pytree.tree_leaves(td)], MAIN),
    Form("tree_map: two", lambda td: _pytree.tree_map(lambda x, y: x + y, td, td * 2), MAIN),
]
