"""Keys: selection, nesting, renaming; functions over all leaves."""

from __future__ import annotations

import copy

import torch

from compile_table.forms import EVERY, GROWING, MAIN, MOST, NESTED, WRITABLE, Form
from compile_table.kinds import another

FORMS = [
    Form("select", lambda td: td.select("a"), EVERY, quick="lazy"),
    Form("select: nested", lambda td: td.select(("b", "c")), MOST, without=("tensorclass",)),
    Form("select: absent", lambda td: td.select("a", "absent", strict=False), MOST),
    Form("select: in place", lambda td: td.select("a", inplace=True), MAIN),
    Form("exclude", lambda td: td.exclude("b"), EVERY),
    Form("exclude: nested", lambda td: td.exclude(("b", "c")), MOST),
    Form("exclude: in place", lambda td: td.exclude("b", inplace=True), MAIN),
    Form("split_keys", lambda td: td.split_keys(["a"]), ("nested", "lazy", "view")),
    Form("split_keys: in place", lambda td: td.split_keys(["a"], inplace=True), NESTED),
    Form("separates", lambda td: td.separates("a"), ("nested", "lazy")),
    Form("flatten_keys", lambda td: td.flatten_keys("."), (*GROWING, "params"), quick="nested"),
    Form("flatten_keys: in place", lambda td: td.flatten_keys(".", inplace=True), ("nested", "lazy")),
    Form("unflatten_keys", lambda td: td.flatten_keys(".").unflatten_keys("."), (*GROWING, "params")),
    Form(
        "unflatten_keys: in place",
        lambda td: td.rename_key_("a", "x.a").unflatten_keys(".", inplace=True),
        ("nested", "lazy"),
    ),
    Form("rename_key_", lambda td: td.rename_key_("a", "new"), GROWING, without=("view",)),
    Form("rename_key_: nested", lambda td: td.rename_key_(("b", "c"), ("b", "d")), ("nested", "lazy")),
    Form("rename_key_: field", lambda td: td.rename_key_("a", "z"), ("tensorclass",)),
    Form("rename_keys", lambda td: td.rename_keys({"a": "new"}), ("nested", "lazy")),
    Form(
        "rename_keys: strict",
        lambda td: td.rename_keys({("b", "c"): "new", "no": "one"}, strict=False),
        ("nested", "lazy"),
    ),
    Form("replace", lambda td: td.replace({"a": td.get("a") + 1}), MOST),
    Form("replace: keyword", lambda td: td.replace(a=td.get("a") + 1), MAIN),
    Form("create_nested", lambda td: td.create_nested("new"), ("nested", "lazy", "named")),
    Form("empty", lambda td: td.empty(), MOST),
    Form("empty: nested", lambda td: td.empty(recurse=True), MOST),
    Form("filter_empty_", lambda td: td.exclude(("b", "c")).filter_empty_(), ("nested", "lazy")),
    Form("clear", lambda td: td.clear(), ("nested", "lazy")),
    Form("apply", lambda td: td.apply(lambda leaf: leaf + 1), EVERY, quick="tensorclass"),
    Form("apply: two", lambda td, other: td.apply(lambda x, y: x * y, other), MOST, another),
    Form(
        "apply: batch size",
        lambda td: td.apply(lambda leaf: leaf.sum(0), batch_size=td.batch_size[1:]),
        ("nested", "view"),
    ),
    Form(
        "apply: no batch",
        lambda td: td.apply(lambda leaf: leaf.sum(), batch_size=[]),
        ("nested", "tensorclass", "params"),
    ),
    Form("apply: in place", lambda td: td.apply(lambda leaf: leaf + 1, inplace=True), WRITABLE),
    Form("apply: None", lambda td: td.apply(lambda leaf: leaf if leaf.ndim > 2 else None), NESTED),
    Form("apply: filter_empty", lambda td: td.apply(lambda leaf: None, filter_empty=True), NESTED),
    Form("apply: out", lambda td, other: td.apply(lambda leaf: leaf + 1, out=other), NESTED, another),
    Form("apply: call_on_nested", lambda td: td.apply(lambda x: x * 2, call_on_nested=True), NESTED),
    Form("apply: method", lambda td: td.apply(torch.sin), MAIN),
    Form("apply_", lambda td: td.apply_(lambda leaf: leaf.mul_(2)), WRITABLE),
    Form("named_apply", lambda td: td.named_apply(lambda key, leaf: leaf + len(key)), MOST),
    Form(
        "named_apply: nested keys", lambda td: td.named_apply(lambda key, leaf: leaf + len(key), nested_keys=True), MAIN
    ),
    Form("clone", lambda td: td.clone(), EVERY, quick="view"),
    Form("clone: keys alone", lambda td: td.clone(False), EVERY),
    Form("copy", lambda td: td.copy(), EVERY),
    Form("__copy__", lambda td: copy.copy(td), NESTED),
    Form("__deepcopy__", lambda td: copy.deepcopy(td), NESTED),
    Form("new_zeros", lambda td: td.new_zeros(2), MAIN),
    Form("new_ones", lambda td: td.new_ones(2, 3), MAIN),
    Form("new_full", lambda td: td.new_full((2,), 3.0), MAIN),
    Form("new_empty", lambda td: td.new_empty(2).batch_size, MAIN),
    Form("new_tensor", lambda td: td.new_tensor(td), NESTED),
    Form("zeros_like", lambda td: torch.zeros_like(td), MOST),
    Form("ones_like", lambda td: torch.ones_like(td), MAIN),
    Form("full_like", lambda td: torch.full_like(td, 2.0), MAIN),
    Form("rand_like", lambda td: torch.rand_like(td), MAIN),
    Form("randn_like", lambda td: torch.randn_like(td), MAIN),
    Form("empty_like", lambda td: torch.empty_like(td).batch_size, MAIN),
    Form("fromkeys", lambda td: type(td).fromkeys(["x", "y"], 1), NESTED),
]
