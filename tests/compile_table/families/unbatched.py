"""Tensors that every element of the batch shares: `UnbatchedTensor`."""

from __future__ import annotations

import torch

from compile_table.forms import Form
from tensordict import TensorDict, UnbatchedTensor

KIND = ("unbatched",)

FORMS = [
    Form("unbatched: get", lambda td: td.get("u") * 2, KIND),
    Form(
        "unbatched: construct", lambda td: TensorDict(x=UnbatchedTensor(td.get("a")[0]), batch_size=td.batch_size), KIND
    ),
    Form("unbatched: clone", lambda td: td.clone(), KIND),
    Form("unbatched: copy", lambda td: td.copy(), KIND),
    Form("unbatched: add", lambda td: td + 1, KIND),
    Form("unbatched: index", lambda td: td[1:3], KIND),
    Form("unbatched: reshape", lambda td: td.reshape(-1), KIND),
    Form("unbatched: stack", lambda td: torch.stack([td, td]), KIND),
    Form("unbatched: unbind", lambda td: td.unbind(1), KIND),
    Form("unbatched: to", lambda td: td.to(torch.float64), KIND),
    Form("unbatched: expand", lambda td: td.expand(2, *td.batch_size), KIND),
]
