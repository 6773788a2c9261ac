"""Lazy stacks: members, stack dims, stacks of unequal members, stacks inside stacks."""

from __future__ import annotations

from typing import Any

import torch

from compile_table.calls import assign
from compile_table.forms import Form
from compile_table.kinds import a_mask, make_nested
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack


def loop_over_members(td: Any) -> Any:
    return sum(member.get("a").sum() for member in td.tensordicts)


def grow(td: Any) -> Any:
    stack = lazy_stack([td, td * 2])
    stack.append(td * 3)
    stack.insert(0, td * 4)
    stack.extend([td * 5])
    return stack


def grow_given(stack: Any) -> Any:
    stack.append(stack.tensordicts[0] * 3)
    stack.extend([stack.tensordicts[0] * 5])
    return stack


def write_a_member(td: Any) -> Any:
    td.tensordicts[0].set("new", td.tensordicts[0].get("a") * 2)
    return td.keys()


def nested_stack(td: Any) -> Any:
    return lazy_stack([lazy_stack([td, td * 2]), lazy_stack([td * 3, td * 4])])


FORMS = [
    Form("lazy_cat: get", lambda td: td.get("a"), ("concatenated",)),
    Form("lazy_cat: index", lambda td: td[1], ("concatenated",)),
    Form("lazy_cat: add", lambda td: td + 1, ("concatenated",)),
    Form("lazy_cat: keys", lambda td: list(td.keys()), ("concatenated",)),
    Form("lazy_cat: batch size", lambda td: td.batch_size, ("concatenated",)),
    Form("lazy: members", loop_over_members, ("lazy", "outer", "lazy-tensorclass", "uneven"), quick="lazy"),
    Form("lazy: stack dim", lambda td: td.stack_dim, ("lazy", "outer")),
    Form("lazy: number of members", lambda td: len(td.tensordicts), ("lazy", "outer")),
    Form("lazy: append", grow, ("nested",), quick="nested"),
    Form("lazy: append to the argument", grow_given, ("lazy", "outer", "lazy-tensorclass")),
    Form("vmap: stack dim", lambda td: torch.vmap(lambda row: row * 2, in_dims=1, out_dims=1)(td), ("lazy", "nested")),
    Form(
        "vmap: result of a lazy stack", lambda td: torch.vmap(lambda row: lazy_stack([row, row + 1]))(td), ("nested",)
    ),
    Form("lazy: write a member", lambda td: list(write_a_member(td)), ("lazy",)),
    Form("lazy: get as a list", lambda td: td.get("a", as_list=True), ("lazy", "outer", "uneven")),
    Form("lazy: get as a padded tensor", lambda td: td.get("u", as_padded_tensor=True), ("uneven",)),
    Form("lazy: keys of unequal members", lambda td: list(lazy_stack([td, td.select("a")]).keys()), ("nested",)),
    Form("lazy: read from unequal members", lambda td: lazy_stack([td, td.select("a")]).get("a"), ("nested",)),
    Form("lazy: construct", lambda td: LazyStackedTensorDict(td, td * 2, stack_dim=1), ("nested", "tensorclass")),
    Form("lazy: lazy_stack method", lambda td: LazyStackedTensorDict.lazy_stack([td, td * 2], 1), ("nested",)),
    Form("lazy: maybe_dense_stack equal", lambda td: LazyStackedTensorDict.maybe_dense_stack([td, td]), ("nested",)),
    Form(
        "lazy: maybe_dense_stack unequal",
        lambda td: LazyStackedTensorDict.maybe_dense_stack([td, td.select("a")]),
        ("nested",),
    ),
    Form("lazy: add", lambda td: td + 1, ("outer", "uneven")),
    Form("lazy: add a stack", lambda td: td + td * 2, ("outer", "uneven", "lazy")),
    Form("lazy: add a dense container", lambda td: td + td.contiguous(), ("outer", "lazy")),
    Form("lazy: compare", lambda td: td == td.contiguous(), ("outer", "lazy")),
    Form("lazy: sum", lambda td: td.sum(0), ("outer",)),
    Form("lazy: sum of all", lambda td: td.sum(), ("outer",)),
    Form("lazy: mean over the stack dim", lambda td: td.mean(1), ("lazy",)),
    Form("lazy: apply", lambda td: td.apply(lambda leaf: leaf + 1), ("outer", "uneven")),
    Form("lazy: named_apply", lambda td: td.named_apply(lambda key, leaf: leaf + len(key)), ("outer", "uneven")),
    Form("lazy: set", lambda td: td.set("new", td.get("a") * 2), ("outer", "uneven")),
    Form("lazy: update", lambda td: td.update(td * 2), ("outer", "uneven")),
    Form("lazy: update_", lambda td: td.update_(td * 2), ("outer", "uneven")),
    Form("lazy: assign a member", lambda td: assign(td, 0, td[1] * 2), ("outer",)),
    Form("lazy: assign along the stack", lambda td: assign(td, (slice(None), 0), td[:, 1] * 2), ("lazy",)),
    Form("lazy: assign by a mask", lambda td, mask: assign(td, mask, 1), ("lazy",), a_mask),
    Form("lazy: contiguous", lambda td: td.contiguous(), ("outer",)),
    Form("lazy: clone", lambda td: td.clone(), ("outer", "uneven")),
    Form("lazy: reshape", lambda td: td.reshape(-1), ("outer",)),
    Form("lazy: permute", lambda td: td.permute(2, 0, 1), ("outer",)),
    Form("lazy: unsqueeze", lambda td: td.unsqueeze(0), ("outer", "uneven")),
    Form("lazy: transpose", lambda td: td.transpose(0, 1), ("outer",)),
    Form("lazy: unbind members", lambda td: td.unbind(1), ("uneven",)),
    Form("lazy: stack of stacks", lambda td: torch.stack([td, td * 2]), ("outer", "uneven")),
    Form("lazy: cat of stacks", lambda td: torch.cat([td, td * 2], 1), ("outer",)),
    Form("lazy: nested", lambda td: nested_stack(td).get("a"), ("nested", "tensorclass")),
    Form("lazy: nested index", lambda td: nested_stack(td)[0, 1], ("nested",)),
    Form("lazy: nested slice", lambda td: nested_stack(td)[:, 0], ("nested",)),
    Form("lazy: inside a container", lambda td: td.get("b").get("c") * 2, ("inside",)),
    Form("lazy: inside, stacked again", lambda td: torch.stack([td, td]), ("inside",)),
    Form("lazy: inside, add", lambda td: td + 1, ("inside",)),
    Form(
        "lazy: in an entry",
        lambda td: TensorDict(s=lazy_stack([td, td * 2], 1), batch_size=td.batch_size[:1]),
        ("nested",),
    ),
    Form("lazy: to", lambda td: td.to(torch.float64), ("outer", "uneven")),
    Form("lazy: lock", lambda td: td.lock_(), ("outer",)),
    Form("lazy: is a stack", lambda td: isinstance(td, LazyStackedTensorDict), ("lazy", "nested")),
    Form("lazy: select", lambda td: td.select("a"), ("outer", "uneven")),
    Form("lazy: names", lambda td: td.names, ("outer",)),
    Form("lazy: batch size", lambda td: td.batch_size, ("outer", "uneven")),
    Form("lazy: made inside", lambda td: lazy_stack([make_nested(4), make_nested(4)]).get("a") + 1, ("nested",)),
    Form("lazy: of a loop", lambda td: lazy_stack([td[row] for row in range(3)]), ("nested", "tensorclass")),
    Form("lazy: uneven to padded", lambda td: td.to_padded_tensor(), ("uneven",)),
    Form("lazy: uneven values", lambda td: list(td.select("a").values()), ("uneven",)),
    Form("lazy: item of a tensorclass", lambda td: td[:, 0].a * 2, ("lazy-tensorclass",)),
    Form("lazy: field of tensorclasses", lambda td: td.a * 2, ("lazy-tensorclass",)),
    Form("lazy: set a field of tensorclasses", lambda td: setattr(td, "z", td.a * 2), ("lazy-tensorclass",)),
]
