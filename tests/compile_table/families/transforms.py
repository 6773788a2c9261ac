"""Transforms and control flow of torch over containers."""

from __future__ import annotations

from typing import Any

import torch
from torch._higher_order_ops.while_loop import while_loop
from torch.utils.checkpoint import checkpoint

from compile_table.forms import MAIN, NESTED, Form
from compile_table.kinds import another
from tensordict import TensorDict, merge_tensordicts


@torch.compiler.nested_compile_region
def region(td: Any) -> Any:
    return td * 2 + 1


def choose(td: Any) -> Any:
    tree = torch.cond(
        td.get("a").sum() > 0,
        lambda tree: (TensorDict(tree) * 2).to_dict(),
        lambda tree: (TensorDict(tree) + 1).to_dict(),
        (td.to_dict(),),
    )
    return TensorDict(tree, td.batch_size)


def repeat(td: Any) -> Any:
    tree = while_loop(
        lambda number, _: number < 3,
        lambda number, tree: (number + 1, (TensorDict(tree) * 2).to_dict()),
        (torch.tensor(0), td.to_dict()),
    )[1]
    return TensorDict(tree, td.batch_size)


def branch_in_python(td: Any) -> Any:
    return td * 2 if td.shape[0] > 2 else td


FORMS = [
    Form(
        "vmap",
        lambda td: torch.vmap(lambda row: row * 2)(td),
        (*MAIN, "outer", "inside", "lazy-tensorclass"),
        quick="lazy",
    ),
    Form("vmap: two", lambda td, other: torch.vmap(lambda x, y: x + y)(td, other), MAIN, another),
    Form("vmap: in_dims", lambda td: torch.vmap(lambda row: row.get("a").sum(), in_dims=1)(td), MAIN),
    Form("vmap: out_dims", lambda td: torch.vmap(lambda row: row * 2, out_dims=1)(td), NESTED),
    Form(
        "vmap: None",
        lambda td, other: torch.vmap(lambda x, y: x + y.get("a").sum(), in_dims=(0, None))(td, other),
        NESTED,
        another,
    ),
    Form(
        "vmap: construct",
        lambda td: torch.vmap(lambda row: TensorDict(x=row.get("a"), batch_size=row.batch_size))(td),
        NESTED,
    ),
    Form("vmap: nested", lambda td: torch.vmap(torch.vmap(lambda row: row * 2))(td), MAIN),
    Form("vmap: set", lambda td: torch.vmap(lambda row: row.copy().set("n", row.get("a") * 2))(td), NESTED),
    Form("torch.func.grad", lambda td: torch.func.grad(lambda td: (td.get("a") ** 2).sum())(td), MAIN),
    Form(
        "torch.func.grad_and_value",
        lambda td: torch.func.grad_and_value(lambda td: (td.get("a") ** 2).sum())(td),
        NESTED,
    ),
    Form("checkpoint", lambda td: checkpoint(lambda td: td * 2, td, use_reentrant=False), MAIN),
    Form("region", lambda td: region(td), NESTED),
    Form("region: twice", lambda td: region(region(td)), NESTED),
    Form("cond", choose, NESTED),
    Form("while_loop", repeat, NESTED),
    Form("branch on a size", branch_in_python, MAIN),
    Form("loop over rows", lambda td: sum(td[row].get("a").sum() for row in range(3)), MAIN),
    Form("merge_tensordicts", lambda td: merge_tensordicts(td.select("a"), td.exclude("a")), NESTED),
    Form("list of containers", lambda td: [td, td * 2], NESTED),
    Form("dict of containers", lambda td: {"x": td, "y": {"z": td * 2}}, NESTED),
]
