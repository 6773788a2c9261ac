"""Changes of shape, pieces, stacks, and names of dims."""

from __future__ import annotations

from typing import Any

import torch

from compile_table.forms import EVERY, MAIN, MOST, NESTED, Form
from compile_table.kinds import KINDS
from tensordict import collate, dense_stack_tds, lazy_stack, pad, pad_sequence
from tensordict import stack as stack_containers


def two_deep(kind: str, count: int) -> tuple[Any]:
    """A container of the size of two that are stacked."""
    return (torch.stack([KINDS[kind](count)] * 2),)


def unpack_double(td: Any) -> Any:
    flat, layout = td.pack(0)
    return layout.unpack(flat * 2)


FORMS = [
    Form("reshape", lambda td: td.reshape(-1), EVERY, quick="lazy"),
    Form("reshape: split", lambda td: td.reshape(2, -1, 2), MOST),
    Form("reshape: size", lambda td: td.reshape(torch.Size([2, -1])), MAIN),
    Form("reshape: keyword", lambda td: td.reshape(shape=[-1]), NESTED),
    Form("reshape: of its size", lambda td: td.reshape(td.numel()), MAIN),
    Form("view", lambda td: td.view(-1), MOST, quick="tensorclass"),
    Form("view: split", lambda td: td.view(2, -1, 2), MOST, without=("view",)),
    Form("view: dtype", lambda td: td.view(torch.int32), NESTED),
    Form("flatten", lambda td: td.flatten(0, 1), EVERY),
    Form("flatten: all", lambda td: td.flatten(), MAIN),
    Form("unflatten", lambda td: td.unflatten(0, (2, -1)), MOST),
    Form("unflatten: last", lambda td: td.unflatten(-1, (2, 1)), MAIN),
    Form("unsqueeze", lambda td: td.unsqueeze(0), EVERY),
    Form("unsqueeze: last", lambda td: td.unsqueeze(-1), MOST),
    Form("squeeze", lambda td: td.unsqueeze(1).squeeze(1), MOST),
    Form("squeeze: all", lambda td: td.squeeze(), ("nested", "unit", "lazy")),
    Form("squeeze: several", lambda td: td.squeeze((0, 2)), ("unit",)),
    Form("permute", lambda td: td.permute(1, 0), EVERY),
    Form("permute: list", lambda td: td.permute([1, 0]), MAIN),
    Form("permute: dims", lambda td: td.permute(dims=(-1, 0)), NESTED),
    Form("transpose", lambda td: td.transpose(0, 1), EVERY, quick="view"),
    Form("swapaxes", lambda td: td.swapaxes(0, 1), MAIN),
    Form("swapdims", lambda td: td.swapdims(0, 1), MAIN),
    Form("movedim", lambda td: td.movedim(0, 1), MAIN),
    Form("moveaxis", lambda td: td.moveaxis((0, 1), (1, 0)), MAIN),
    Form("expand", lambda td: td.expand(2, *td.batch_size), MOST),
    Form("expand: -1", lambda td: td.unsqueeze(0).expand(2, -1, -1), MAIN),
    Form("expand: size", lambda td: td.expand(torch.Size([5, *td.batch_size])), MAIN),
    Form("expand_as", lambda td: td[:1].expand_as(td), MOST),
    Form("broadcast_to", lambda td: td[:1].broadcast_to(td.batch_size), MAIN),
    Form("repeat", lambda td: td.repeat(2, 1), MOST),
    Form("repeat_interleave", lambda td: td.repeat_interleave(2, dim=0), MOST),
    Form("tile", lambda td: td.tile((2, 1)), MAIN),
    Form("flip", lambda td: td.flip(0), MOST),
    Form("flip: two dims", lambda td: td.flip((0, 1)), MAIN),
    Form("fliplr", lambda td: td.fliplr(), MAIN),
    Form("flipud", lambda td: td.flipud(), MAIN),
    Form("roll", lambda td: td.roll(1, 0), MOST),
    Form("roll: two dims", lambda td: td.roll((1, 2), (0, 1)), MAIN),
    Form("rot90", lambda td: td.rot90(), MAIN),
    Form("atleast_1d", lambda td: td.atleast_1d(), ("nested", "scalar")),
    Form("atleast_2d", lambda td: td.atleast_2d(), ("nested", "scalar", "single")),
    Form("atleast_3d", lambda td: td.atleast_3d(), MAIN),
    Form("contiguous", lambda td: td.contiguous(), EVERY),
    Form("contiguous: of a view", lambda td: td.transpose(0, 1).contiguous(), MAIN),
    Form("split", lambda td: td.split(2), MOST),
    Form("split: second dim", lambda td: td.split(1, 1), MOST),
    Form("split: list", lambda td: td.split([1, 1], 1), MAIN),
    Form("split: rest", lambda td: td.split([1, td.shape[0] - 1], 0), MAIN),
    Form("chunk", lambda td: td.chunk(2), MOST),
    Form("chunk: second dim", lambda td: td.chunk(2, 1), MAIN),
    Form("tensor_split", lambda td: td.tensor_split(2), MAIN),
    Form("tensor_split: at places", lambda td: td.tensor_split((1, 2)), MAIN),
    Form("unbind", lambda td: td.unbind(1), MOST),
    Form("unbind: outer", lambda td: td.unbind(0), ("outer",)),
    Form("unbind: first", lambda td: td.unbind(0)[-1], NESTED),
    Form("stack", lambda td: torch.stack([td, td * 2]), EVERY, quick="tensorclass"),
    Form("stack: dim", lambda td: torch.stack([td, td * 2], 1), MOST),
    Form("stack: last dim", lambda td: torch.stack([td, td * 2], -1), MAIN),
    Form("tensordict.stack", lambda td: stack_containers([td, td * 2], 0), MAIN),
    Form("stack: method", lambda td: type(td).stack([td, td * 2], 0), NESTED),
    Form("stack: out", lambda td, other: torch.stack([td, td * 2], out=other), NESTED, two_deep),
    Form("stack: of slices", lambda td: torch.stack([td[:2], td[2:4]]), MAIN),
    Form("lazy_stack", lambda td: lazy_stack([td, td * 2]), MOST, quick="nested"),
    Form("lazy_stack: dim", lambda td: lazy_stack([td, td * 2], 1), MAIN),
    Form("lazy_stack: leaf", lambda td: lazy_stack([td, td * 2]).get("a"), MAIN),
    Form("maybe_dense_stack", lambda td: type(td).maybe_dense_stack([td, td * 2]), NESTED),
    Form("dense_stack_tds", lambda td: dense_stack_tds(lazy_stack([td, td * 2])), MAIN),
    Form("cat", lambda td: torch.cat([td, td * 2]), EVERY, quick="view"),
    Form("cat: dim", lambda td: torch.cat([td, td * 2], 1), MOST),
    Form("cat: method", lambda td: type(td).cat([td, td * 2], 0), NESTED),
    Form("cat: of pieces", lambda td: torch.cat(list(td.split(2))), MAIN),
    Form("pad", lambda td: td.pad([0, 1, 2, 0]), MAIN),
    Form("pad: function", lambda td: pad(td, [1, 2, 0, 0], value=3.0), MAIN),
    Form("pad_sequence", lambda td: pad_sequence([td, td[1:]]), MAIN),
    Form("pack", lambda td: td.double().pack()[0], MAIN),
    Form("pack: back", lambda td: unpack_double(td.double()), MAIN),
    Form("pad_sequence: left", lambda td: pad_sequence([td, td[1:]], padding_side="left"), MAIN),
    Form("collate", lambda td: collate([(td, td), (td, td)])[0], MAIN),
    Form("pad_sequence: mask", lambda td: pad_sequence([td, td[1:]], return_mask=True), MAIN),
    Form("to_lazystack", lambda td: td.to_lazystack(1), ("nested", "named", "tensorclass")),
    Form("to_padded_tensor", lambda td: td.to_padded_tensor(), ("nested", "ragged")),
    Form("densify", lambda td: td.densify(), ("nested", "ragged")),
    Form(
        "stack_tensors",
        lambda td: td.copy().set("e", td.get("a") + 1).stack_tensors("a", "e", out_key="s", dim=2),
        NESTED,
    ),
    Form(
        "cat_tensors", lambda td: td.copy().set("e", td.get("a") + 1).cat_tensors("a", "e", out_key="s", dim=-1), NESTED
    ),
    Form("stack_from_tensordict", lambda td: td.select("a").stack_from_tensordict(0), NESTED),
    Form("cat_from_tensordict", lambda td: td.get("b").cat_from_tensordict(0), MAIN),
    Form("names: set", lambda td: setattr(td, "names", ["x", "y"]), MAIN),
    Form("refine_names", lambda td: td.refine_names("x", ...), MAIN),
    Form("rename", lambda td: td.rename("x", "y"), MOST),
    Form("rename: one", lambda td: td.rename(time="t"), ("named",)),
    Form("rename_", lambda td: td.rename_("x", "y"), MAIN),
    Form("permute: names", lambda td: (td.permute(1, 0), td[:, 0], td.unsqueeze(1), td.sum(0)), ("named",)),
    Form("stack: names", lambda td: torch.stack([td, td]), ("named",)),
    Form("sum: named dim", lambda td: td.sum(0), ("named",)),
    Form("auto_batch_size_", lambda td: td.auto_batch_size_(), ("nested", "tensorclass")),
    Form("auto_batch_size_: dims", lambda td: td.auto_batch_size_(1), ("nested", "tensorclass")),
]
