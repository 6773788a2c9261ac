"""Reductions over dims, over all elements, and over all entries."""

from __future__ import annotations

import torch

from compile_table.calls import call_method
from compile_table.forms import EVERY, MAIN, MOST, NESTED, WRITABLE, Form

SIMPLE = ["sum", "mean", "prod", "nansum", "nanmean", "std", "var", "amax", "amin"]
PAIRED = ["max", "min", "cummax", "cummin"]


FORMS = [
    *(
        Form(
            f"{name}: all elements",
            call_method(name),
            MOST if name == "sum" else NESTED,
            quick="lazy" if name == "sum" else None,
        )
        for name in SIMPLE
    ),
    *(
        Form(
            f"{name}: dim",
            call_method(name, dim=0),
            WRITABLE if name == "mean" else MAIN,
            quick="view" if name == "mean" else None,
        )
        for name in SIMPLE
    ),
    *(Form(f"{name}: keepdim", call_method(name, dim=0, keepdim=True), NESTED) for name in SIMPLE),
    *(
        Form(f"{name}: to one tensor", call_method(name, reduce=True), NESTED)
        for name in SIMPLE
        if name not in ("std", "var")
    ),
    *(Form(f"{name}: dim", call_method(name, dim=0), MAIN) for name in PAIRED),
    *(Form(f"{name}: values alone", call_method(name, dim=0, return_indices=False), NESTED) for name in PAIRED),
    Form("max: all elements", lambda td: td.max(), MAIN),
    Form("min: all elements", lambda td: td.min(), MAIN),
    Form("sum: two dims", lambda td: td.sum(dim=(0, 1)), MAIN),
    Form("sum: last dim", lambda td: td.sum(-1), MAIN),
    Form("sum: feature", lambda td: td.sum(dim="feature"), MAIN),
    Form("mean: feature", lambda td: td.mean(dim="feature"), MAIN),
    Form("sum: dtype", lambda td: td.sum(dim=0, dtype=torch.float64), MAIN),
    Form("mean: every kind", lambda td: td.mean(0), EVERY),
    Form("any", lambda td: (td > 0.5).any(), MAIN),
    Form("any: dim", lambda td: (td > 0.5).any(0), MAIN),
    Form("all", lambda td: (td > 0.5).all(), MAIN),
    Form("all: dim", lambda td: (td > 0.5).all(0), MAIN),
    Form("logsumexp", lambda td: td.logsumexp(0), MAIN),
    Form("logsumexp: keepdim", lambda td: td.logsumexp(dim=0, keepdim=True), MAIN),
    Form("quantile", lambda td: td.quantile(0.5, dim=0), MAIN),
    Form("norm", lambda td: td.norm(), MOST),
    Form("norm: dtype", lambda td: td.norm(dtype=torch.float64), NESTED),
    Form("sum: of norms", lambda td: sum(td.norm().values(True, True)), NESTED),
    Form("std: correction", lambda td: td.std(dim=0, correction=0), MAIN),
]
