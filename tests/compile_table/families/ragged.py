"""Ragged leaves: nested tensors in containers."""

from __future__ import annotations

import torch

from compile_table.forms import Form
from tensordict import TensorDict

KIND = ("ragged",)

FORMS = [
    Form("ragged: get", lambda td: td.get("r") * 2, KIND, quick="ragged"),
    Form("ragged: add", lambda td: td + 1, KIND),
    Form("ragged: multiply by itself", lambda td: td * td, KIND),
    Form("ragged: exp", lambda td: td.exp(), KIND),
    Form("ragged: add_", lambda td: td.add_(1), KIND),
    Form("ragged: clamp", lambda td: td.clamp(0.2, 0.5), KIND),
    Form("ragged: compare", lambda td: td > 0.5, KIND),
    Form("ragged: apply", lambda td: td.apply(lambda leaf: leaf + 1), KIND),
    Form("ragged: clone", lambda td: td.clone(), KIND),
    Form("ragged: keys alone", lambda td: td.clone(False), KIND),
    Form("ragged: select", lambda td: td.select("r"), KIND),
    Form("ragged: set", lambda td: td.set("new", td.get("r") * 2), KIND),
    Form("ragged: construct", lambda td: TensorDict(r=td.get("r") * 2, batch_size=td.batch_size), KIND),
    Form("ragged: to", lambda td: td.to(torch.float64), KIND),
    Form("ragged: double", lambda td: td.double(), KIND),
    Form("ragged: to_dict", lambda td: td.to_dict(), KIND),
    Form("ragged: keys", lambda td: list(td.keys()), KIND),
    Form("ragged: batch size", lambda td: td.batch_size, KIND),
    Form("ragged: unbind", lambda td: td.unbind(0)[0].get("r"), KIND),
    Form("ragged: last row", lambda td: td[-1], KIND),
    Form("ragged: rows", lambda td: td[1:3], KIND),
    Form("ragged: tensor", lambda td: td[torch.tensor([2, 0])], KIND),
    Form("ragged: steps", lambda td: td[::2], KIND),
    Form("ragged: unsqueeze", lambda td: td.unsqueeze(-1), KIND),
    Form("ragged: zeros_like", lambda td: torch.zeros_like(td), KIND),
    Form("ragged: padded", lambda td: td.get("r").to_padded_tensor(0.0), KIND),
    Form("ragged: sum of values", lambda td: td.get("r").values().sum(), KIND),
    Form("ragged: sum", lambda td: td.sum(reduce=True), KIND),
    Form("ragged: lock", lambda td: td.lock_(), KIND),
    Form("ragged: update", lambda td: td.update({"r": td.get("r") + 1}), KIND),
    Form("ragged: pop", lambda td: td.pop("r"), KIND),
    Form("ragged: flatten_keys", lambda td: TensorDict(n=td, batch_size=td.batch_size).flatten_keys("."), KIND),
    Form("ragged: detach", lambda td: td.detach(), KIND),
    Form("ragged: get_item_shape", lambda td: td.get_item_shape("a"), KIND),
]
