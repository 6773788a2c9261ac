"""Indexing by numbers, slices, tensors, lists, masks, names of dims, and assignment by each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from compile_table.calls import assign
from compile_table.forms import EVERY, MAIN, MOST, Form
from compile_table.kinds import a_mask, a_row_mask, rows_of_numbers

READ: dict[str, Callable[[Any], Any]] = {
    "int": lambda td: td[1],
    "last": lambda td: td[-1],
    "two ints": lambda td: td[1, 1],
    "slice": lambda td: td[1:3],
    "slice from behind": lambda td: td[-2:],
    "slice to behind": lambda td: td[:-1],
    "steps": lambda td: td[::2],
    "full slice": lambda td: td[:],
    "slice of size": lambda td: td[: td.shape[0] // 2],
    "slice of size and int": lambda td: td[: td.shape[0] // 2, 0],
    "second dim": lambda td: td[:, 1],
    "second dim slice": lambda td: td[:, 1:],
    "int and slice": lambda td: td[2, :2],
    "ellipsis": lambda td: td[...],
    "ellipsis and int": lambda td: td[..., 0],
    "None": lambda td: td[None],
    "None inside": lambda td: td[:, None],
    "None and int": lambda td: td[0, None],
    "tuple": lambda td: td[(slice(None), 0)],
    "empty tuple": lambda td: td[()],
    "list": lambda td: td[[0, 2]],
    "list of second dim": lambda td: td[:, [1, 0]],
    "list of bools": lambda td: td[:, [True, False]],
    "two lists": lambda td: td[[0, 1], [1, 0]],
    "range": lambda td: td[range(2)],
    "True": lambda td: td[True],
    "tensor": lambda td: td[torch.tensor([2, 0])],
    "tensor of two dims": lambda td: td[torch.tensor([[2, 0], [1, 1]])],
    "tensor of no dim": lambda td: td[torch.tensor(1)],
    "two tensors": lambda td: td[torch.tensor([2, 0]), torch.tensor([1, 1])],
    "slice and tensor": lambda td: td[1:, torch.tensor([1, 1])],
    "tensor and None": lambda td: td[torch.tensor([1, 0]), None],
    "arange": lambda td: td[torch.arange(td.shape[0])],
    "permutation": lambda td: td[torch.randperm(td.shape[0])],
    "argsort": lambda td: td[td.get(("b", "c")).sum(-1).argsort(descending=True)],
    "row of a row": lambda td: td[1][0],
    "key of a row": lambda td: td[1].get("a"),
    "row of a key": lambda td: td.get("b")[1],
}
ASSIGN: dict[str, Callable[[Any], Any]] = {
    "int": lambda td: assign(td, 0, td[1].clone()),
    "number": lambda td: assign(td, 0, 2.0),
    "slice": lambda td: assign(td, slice(0, 2), td[2:4].clone()),
    "slice number": lambda td: assign(td, slice(1, None), 0),
    "second dim": lambda td: assign(td, (slice(None), 1), td[:, 0].clone()),
    "list": lambda td: assign(td, [0, 1], td[2:4] * 2),
    "tensor": lambda td: assign(td, torch.tensor([0, 2]), td[:2] * 2),
    "ellipsis": lambda td: assign(td, ..., td * 2),
    "broadcast": lambda td: assign(td, slice(0, 2), td[3].clone()),
    "two ints": lambda td: assign(td, (1, 1), td[0, 0].clone()),
}

FORMS = [
    *(
        Form(
            f"__getitem__: {name}",
            call,
            MOST,
            quick={"tensor": "lazy", "slice": "nested", "int": "tensorclass"}.get(name),
        )
        for name, call in READ.items()
    ),
    Form("__getitem__: int of every kind", lambda td: td[0], EVERY),
    Form("__getitem__: slice of every kind", lambda td: td[1:3], EVERY),
    Form("__getitem__: tensor given", lambda td, rows: td[rows], MOST, rows_of_numbers),
    Form("__getitem__: mask", lambda td, mask: td[mask], MAIN, a_mask),
    Form("__getitem__: row mask", lambda td, mask: td[mask], MAIN, a_row_mask),
    Form("__getitem__: where of a mask", lambda td, mask: td[torch.where(mask)], MAIN, a_mask),
    Form("__getitem__: named dim", lambda td: td[:, 0].names, ("named",)),
    Form("__getitem__: value", lambda td: (td[0].get("text"), td[0].get("a")), ("values",)),
    Form("__getitem__: label", lambda td: td[0], ("labels",)),
    Form("__getitem__: ragged row", lambda td: td[1].get("r") * 2, ("ragged",)),
    Form("__getitem__: uneven row", lambda td: td[1], ("uneven",)),
    Form("__getitem__: uneven member", lambda td: td[:, 1].get("u"), ("uneven",)),
    Form("__getitem__: outer", lambda td: (td[0], td[:, 1], td[0, 1], td[:, 1:3]), ("outer",), quick="outer"),
    Form("__getitem__: outer tensor", lambda td: td[torch.tensor([1, 0, 1])], ("outer",)),
    Form("__getitem__: outer both", lambda td: td[torch.tensor([1, 0]), torch.tensor([0, 2])], ("outer",)),
    *(
        Form(
            f"__setitem__: {name}",
            call,
            (*MAIN, "view") if name == "slice" else MAIN,
            quick={"tensor": "nested"}.get(name),
        )
        for name, call in ASSIGN.items()
    ),
    Form("__setitem__: mask", lambda td, mask: assign(td, mask, 0), MAIN, a_mask),
    Form("__setitem__: row mask", lambda td, mask: assign(td, mask, 0), MAIN, a_row_mask),
    Form("__setitem__: locked", lambda td: assign(td, 0, td[1].clone()), ("locked", "named")),
    Form("__getitem__: assigned in place", lambda td: td[0].mul_(2), MAIN),
    Form("gather", lambda td: td.gather(0, torch.tensor([0, 1])), (*MOST, "params")),
    Form("gather: last dim", lambda td: td.gather(-1, torch.zeros(td.batch_size, dtype=torch.int64)), MAIN),
    Form("head", lambda td: td.head(2), MAIN, quick="nested"),
    Form("sample", lambda td: td.sample(2), MAIN),
    Form("sort_by", lambda td: td[:, 0].select("b").sort_by(("b", "c")), MAIN, quick="nested"),
    Form("filter", lambda td: td.filter(lambda rows: rows.get(("b", "c"))[:, 0] > 0.3), MAIN),
    Form("allclose", lambda td: td if td.allclose(td + 0) else td * 2, MAIN),
    Form("where_value", lambda td: td.where_value("text", "word"), ("values",)),
    Form("where_value of labels", lambda td: td.where_value("labels", "b"), ("labels",)),
    Form("texts equal", lambda td: ~(td["labels"] == "b"), ("labels",)),
    Form("narrow", lambda td: td.narrow(0, 1, 2), MOST),
    Form("narrow: second dim", lambda td: td.narrow(1, 0, 1), MAIN),
    Form("masked_select", lambda td, mask: td.masked_select(mask), MAIN, a_mask),
    Form("masked_select: in place", lambda td, mask: td.masked_select(mask, inplace=True), ("nested",), a_mask),
    Form("masked_fill", lambda td, mask: td.masked_fill(mask, 0.0), MOST, a_mask),
    Form("masked_fill_", lambda td, mask: td.masked_fill_(mask, 0.0), (*MAIN, "view"), a_mask),
    Form("where", lambda td, mask: td.where(mask, td * 2), MOST, a_mask, quick="nested"),
    Form("where: number", lambda td, mask: td.where(mask, 0.0), MAIN, a_mask),
    Form("where: torch", lambda td, mask: torch.where(mask, td, td * 2), MAIN, a_mask),
]
