"""Non-tensor values: one for all elements, and one for each."""

from __future__ import annotations

import torch

from compile_table.forms import Form
from tensordict import NonTensorData, NonTensorStack, TensorDict, is_non_tensor, lazy_stack

ONE = ("values",)
BOTH = ("values", "labels")


def changed_text(td):
    td["text"] = td["text"] + "s"
    return td["text"]


FORMS = [
    Form("value: get", lambda td: td["text"], ONE, quick="values"),
    Form("value: get number", lambda td: td.get("a") * td["b", "number"], ONE),
    Form("value: get label", lambda td: td.get("labels").tolist(), ("labels",)),
    Form("value: branch", lambda td: td.get("a") if td["text"] == "word" else td.get("a") * 2, ONE),
    Form("value: set", lambda td: td.set("new", "other"), ONE),
    Form("value: set item", lambda td: td.__setitem__("new", "other"), ("nested", "values")),
    Form("value: replace", changed_text, ONE),
    Form("value: set_non_tensor", lambda td: td.set_non_tensor("new", {"x": 1}), ONE),
    Form("value: get_non_tensor", lambda td: td.get_non_tensor("text"), ONE),
    Form("value: number", lambda td: td.set("new", 3), ("scalar",)),
    Form("value: update", lambda td: td.update({"text": "other"}), ONE),
    Form("value: pop", lambda td: td.pop("text"), ONE),
    Form("value: del", lambda td: td.del_("text"), ONE),
    Form("value: add", lambda td: td + 1, BOTH),
    Form("value: apply", lambda td: td.apply(lambda leaf: leaf + 1), BOTH),
    Form("value: exp", lambda td: td.exp(), BOTH),
    Form("value: clone", lambda td: td.clone(), BOTH),
    Form("value: index", lambda td: td[0], ONE),
    Form("value: slice", lambda td: td[1:3], BOTH),
    Form("value: tensor", lambda td: td[torch.tensor([2, 0])], BOTH),
    Form("value: reshape", lambda td: td.reshape(-1), BOTH),
    Form("value: unsqueeze", lambda td: td.unsqueeze(0), BOTH),
    Form("value: expand", lambda td: td.expand(2, *td.batch_size), BOTH),
    Form("value: stack", lambda td: torch.stack([td, td * 2]), BOTH),
    Form("value: stack of unequal", lambda td: torch.stack([td, td.copy().set("text", "other")]), ONE),
    Form("value: lazy stack", lambda td: lazy_stack([td, td * 2]), BOTH),
    Form("value: lazy stack of unequal", lambda td: lazy_stack([td, td.copy().set("text", "other")]), ONE),
    Form("value: cat", lambda td: torch.cat([td, td * 2]), BOTH),
    Form("value: split", lambda td: td.split(1, 1), BOTH),
    Form("value: unbind", lambda td: td.unbind(1), BOTH),
    Form("value: permute", lambda td: td.permute(1, 0), BOTH),
    Form("value: select", lambda td: td.select("a"), BOTH),
    Form("value: exclude", lambda td: td.exclude("text", "labels"), BOTH),
    Form("value: to", lambda td: td.to(torch.float64), BOTH),
    Form("value: device", lambda td: td.to("cpu"), BOTH),
    Form("value: keys", lambda td: list(td.keys(True, True)), BOTH),
    Form("value: keys with values", lambda td: list(td.keys(True, True, is_leaf=is_non_tensor)), BOTH),
    Form("value: to_dict", lambda td: td.to_dict(), BOTH),
    Form("value: to_tensordict", lambda td: td.to_tensordict(), BOTH),
    Form("value: flatten_keys", lambda td: td.flatten_keys("."), BOTH),
    Form("value: lock", lambda td: td.lock_(), BOTH),
    Form("value: sum", lambda td: td.sum(0), BOTH),
    Form("value: compare", lambda td: (td == td).get("a"), BOTH),
    Form("value: update_", lambda td: td.update_(td * 2), ONE),
    Form("value: data", lambda td: td.data, BOTH),
    Form("value: detach", lambda td: td.detach(), BOTH),
    Form("value: zeros_like", lambda td: torch.zeros_like(td), BOTH),
    Form("value: empty", lambda td: td.empty(recurse=True), BOTH),
    Form("value: construct", lambda td: TensorDict(x=td.get("a"), y="word", batch_size=td.batch_size), ("nested",)),
    Form("value: dict", lambda td: td.set("new", NonTensorData({"x": 1, "y": [2]})), ("nested",)),
    Form("value: data of NonTensorData", lambda td: NonTensorData("word").data, ("nested",)),
    Form(
        "value: NonTensorData with a batch", lambda td: NonTensorData("word", batch_size=td.batch_size)[0], ("nested",)
    ),
    Form("value: NonTensorStack", lambda td: NonTensorStack("x", "y").tolist(), ("nested",)),
    Form("value: NonTensorStack index", lambda td: NonTensorStack("x", "y")[1], ("nested",)),
    Form(
        "value: set a NonTensorStack", lambda td: td.set("l", NonTensorStack(*["x"] * 2)), ("lazy",), without=("lazy",)
    ),
    Form("value: is_non_tensor", lambda td: [is_non_tensor(value) for value in td.values()], BOTH),
    Form("value: None", lambda td: td.set("new", None), ("nested",)),
    Form("value: function", lambda td: td.set_non_tensor("new", torch.sin), ("nested",)),
    Form("value: names", lambda td: td.names, BOTH),
]
