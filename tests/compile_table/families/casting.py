"""Dtypes, devices, gradients, and copies in one buffer."""

from __future__ import annotations

from typing import Any

import torch

from compile_table.calls import call_method
from compile_table.forms import EVERY, MAIN, MOST, NESTED, Form
from tensordict import is_inexact

CASTS = [
    "bfloat16", "bool", "complex128", "complex32", "complex64", "double", "float", "float16", "float32", "float64",
    "half", "int", "int16", "int32", "int64", "int8", "uint8", "uint16", "uint32", "uint64",
]  # fmt: skip


def add_gradients(td: Any) -> Any:
    leaf = td.detach().clone().requires_grad_()
    (leaf * 2).sum(reduce=True).backward()
    return leaf.grad


FORMS = [
    *(
        Form(
            name,
            call_method(name),
            MOST if name in ("double", "int") else NESTED,
            quick="nested" if name == "double" else None,
        )
        for name in CASTS
    ),
    Form("type", lambda td: td.type(torch.float64), MAIN),
    Form("to: dtype", lambda td: td.to(torch.float64), EVERY),
    Form("to: device", lambda td: td.to("cpu"), EVERY),
    Form("to: device object", lambda td: td.to(torch.device("cpu")), MAIN),
    Form("to: both", lambda td: td.to("cpu", torch.float16), MAIN),
    Form("to: keyword", lambda td: td.to(dtype=torch.float64), MAIN),
    Form("to: other", lambda td: td.to(td.double()), NESTED),
    Form("to: batch size", lambda td: td.to(batch_size=td.batch_size[:1]), NESTED),
    Form("to: non_blocking", lambda td: td.to("cpu", non_blocking=True), NESTED),
    Form("to: filter", lambda td: td.to(torch.float64, cast_filter=is_inexact), MAIN),
    Form("double: filter", lambda td: td.double(cast_filter=lambda key, leaf: "a" in key), MOST, quick="lazy"),
    Form("to: meta", lambda td: td.to("meta").batch_size, NESTED),
    Form("cpu", lambda td: td.cpu(), MOST),
    Form("auto_device_", lambda td: td.auto_device_(), MAIN),
    Form("clear_device_", lambda td: td.clear_device_(), (*MAIN, "named")),
    Form("clear_refs_for_compile_", lambda td: td.clear_refs_for_compile_(), (*MAIN, "locked")),
    Form("as_tensor", lambda td: td.as_tensor(), NESTED),
    Form("full_tensor", lambda td: td.full_tensor(), NESTED),
    Form("data", lambda td: td.data, MOST),
    Form("data: written", lambda td: td.data.mul_(2), ("nested", "lazy", "params")),
    Form("detach", lambda td: td.detach(), (*MOST, "params"), quick="params"),
    Form("detach_", lambda td: td.detach_(), MAIN),
    Form("grad", lambda td: td.grad, ("nested", "params")),
    Form("requires_grad_", lambda td: td.requires_grad_(), MAIN),
    Form("requires_grad_: False", lambda td: td.requires_grad_(False), ("nested", "params")),
    Form(
        "backward",
        lambda td: td.sum(reduce=False).apply(lambda leaf: leaf.sum(), batch_size=[]).backward(),
        ("params",),
    ),
    Form("backward: leaves", add_gradients, ("nested",)),
    Form("zero_grad", lambda td: td.zero_grad(), ("nested", "params")),
    Form("autograd: grad", lambda td: torch.autograd.grad((td * 2).sum(reduce=True), td.get("a")), ("params",)),
    Form("consolidate", lambda td: td.consolidate(), NESTED),
    Form("consolidate: twice", lambda td: td.consolidate().clone(), NESTED),
]
