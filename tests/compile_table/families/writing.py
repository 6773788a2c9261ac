"""Writing entries, updates, locks."""

from __future__ import annotations

from typing import Any

import torch

from compile_table.calls import assign, remove
from compile_table.forms import GROWING, MAIN, NESTED, WRITABLE, Form
from compile_table.kinds import another


def set_entry(td: Any, name: str = "a") -> None:
    td.unlock_()
    td.set(name, td.get("a") * 2)
    td.lock_()


FORMS = [
    Form("set", lambda td: td.set("new", td.get("a") * 2), (*GROWING, "buffers", "params"), quick="view"),
    Form("set: field", lambda td: td.set("z", td.get("a") * 2), ("tensorclass", "lazy-tensorclass")),
    Form("set: replace", lambda td: td.set("a", td.get("a") * 2), (*WRITABLE, "named", "inside", "typed", "buffers")),
    Form("set: nested", lambda td: td.set(("new", "deep"), td.get("a") * 2), GROWING),
    Form("set: in place", lambda td: td.set("a", td.get("a") * 2, inplace=True), WRITABLE),
    Form("set: container", lambda td: td.set("new", td.get("b") * 2), GROWING),
    Form("set: dict", lambda td: td.set("new", {"x": td.get("a")}), NESTED),
    Form("set: number", lambda td: td.set("new", torch.ones(())), ("scalar",)),
    Form("set: same tensor", lambda td: td.set("new", td.get("a")), ("nested", "lazy")),
    Form("set: alias", lambda td: td.set("new", td.get("a")).get("new").mul_(2), NESTED),
    Form("set_", lambda td: td.set_("a", td.get("a") * 2), (*WRITABLE, "locked")),
    Form("set_: nested", lambda td: td.set_(("b", "c"), td.get(("b", "c")) * 2), ("nested", "lazy", "view")),
    Form("set_at_", lambda td: td.set_at_("a", torch.zeros(2, 4), 1), WRITABLE),
    Form(
        "set_at_: tensor",
        lambda td: td.set_at_("a", torch.zeros(2, 2, 4), torch.tensor([0, 1])),
        ("nested", "tensorclass"),
    ),
    Form("setdefault", lambda td: td.setdefault("new", td.get("a") * 2), GROWING),
    Form("setdefault: present", lambda td: td.setdefault("a", td.get("a") * 2), MAIN),
    Form("__setitem__: key", lambda td: assign(td, "new", td["a"] * 2), GROWING, quick="nested"),
    Form("__setitem__: nested key", lambda td: assign(td, ("b", "new"), td["a"] * 2), ("nested", "lazy", "view")),
    Form("__setitem__: replace", lambda td: assign(td, "a", td["a"] * 2), ("nested", "lazy", "view", "buffers")),
    Form("__delitem__", lambda td: remove(td, "a"), ("nested", "lazy", "view", "named")),
    Form("del_", lambda td: td.del_("a"), WRITABLE),
    Form("pop", lambda td: td.pop("a"), ("nested", "lazy", "view", "tensorclass")),
    Form("pop: default", lambda td: td.pop("absent", None), MAIN),
    Form("pop: nested", lambda td: td.pop(("b", "c")), ("nested", "lazy")),
    Form("popitem", lambda td: td.popitem(), NESTED),
    Form("update", lambda td: td.update({"a": td.get("a") * 2}), (*WRITABLE, "named", "inside"), quick="lazy"),
    Form("update: new", lambda td: td.update({"new": td.get("a") * 2, "b": {"d": td.get("a")}}), GROWING),
    Form("update: container", lambda td, other: td.update(other), WRITABLE, another),
    Form("update: clone", lambda td, other: td.update(other, clone=True), NESTED, another),
    Form("update: in place", lambda td, other: td.update(other, inplace=True), MAIN, another),
    Form("update: some keys", lambda td, other: td.update(other, keys_to_update=["a"]), MAIN, another),
    Form("update_", lambda td, other: td.update_(other), WRITABLE, another),
    Form("update_: locked", lambda td: td.update_(td * 2), ("locked",)),
    Form("update_: dict", lambda td: td.update_({"a": td.get("a") * 2}), MAIN),
    Form("update_at_", lambda td: td.update_at_(td[:1] * 2, slice(1, 2)), WRITABLE),
    Form("update_at_: int", lambda td: td.update_at_(td[0] * 2, 1), MAIN),
    Form("copy_", lambda td, other: td.copy_(other), WRITABLE, another),
    Form("copy_at_", lambda td: td.copy_at_(td[0] * 2, 1), MAIN),
    Form("lock_", lambda td: td.lock_(), (*MAIN, "view", "inside", "params")),
    Form("lock_: copy", lambda td: td.copy().lock_(), MAIN),
    Form("unlock_", lambda td: td.unlock_(), (*MAIN, "locked")),
    Form("unlock_: write", lambda td: set_entry(td), ("locked", "lazy", "tensorclass")),
    Form("set_non_tensor", lambda td: td.set_non_tensor("text", "word"), ("nested", "values")),
    Form("__setattr__: field", lambda td: setattr(td, "a", td.a * 2), ("tensorclass", "typed")),
    Form("__setattr__: new field", lambda td: setattr(td, "z", td.a * 2), ("tensorclass",)),
    Form("get: written in place", lambda td: td.get("a").mul_(2), ("nested", "tensorclass", "view")),
]
