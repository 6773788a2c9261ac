"""Pad ragged leaves to plain tensors."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from tensordict.core.ragged import REFUSALS, compact, jagged_dim, pack_elements, row_sizes


def pad(leaf: Tensor, padding: float = 0.0) -> Tensor:
    """Return a plain tensor with the rows of a ragged leaf, all padded at the end to the longest length."""
    if leaf.layout is not torch.jagged or jagged_dim(leaf) == 1:
        # Torch pads only some dtypes, and no leaves with holes. With other ragged dims, it computes no gradient.
        with contextlib.suppress(*REFUSALS):
            dense: Tensor = torch.nested.to_padded_tensor(leaf, padding)
            return dense
    leaf = compact(leaf)
    flat, sizes, ragged = pack_elements(leaf), row_sizes(leaf), 1
    if leaf.layout is torch.jagged:
        ragged = jagged_dim(leaf)
        flat, sizes = flat.movedim(ragged - 1, 0), sizes[:, ragged - 1 : ragged]
    mask = _make_mask(sizes).to(leaf.device)
    out = flat.new_full((*mask.shape, *flat.shape[1:]), padding)
    out[mask] = flat
    return out.movedim(1, ragged)


def valid(leaf: Tensor, ndim: int) -> Tensor:
    """Return a mask of the first `ndim` dims of a padded leaf: True for elements, False for padding."""
    return _make_mask(row_sizes(leaf)[:, : ndim - 1]).to(leaf.device)


def _make_mask(sizes: Tensor) -> Tensor:
    """Return a mask that is True for the elements of rows of these sizes, in a tensor that is large enough for all."""
    longest = sizes.amax(0).tolist() if len(sizes) else [0] * sizes.shape[1]
    mask = torch.ones((len(sizes), *longest), dtype=torch.bool)
    for dim, longest_here in enumerate(longest):
        within = torch.arange(longest_here) < sizes[:, dim, None]
        mask &= within.reshape(len(sizes), *[-1 if other == dim else 1 for other in range(len(longest))])
    return mask
