"""`collate`, a `collate_fn` for data loaders, and the entry for containers in torch's table of such functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import default_collate

from tensordict.core import torch_internals as internals
from tensordict.core.contract import Contract
from tensordict.core.exceptions import ShapeError
from tensordict.core.keys import Path, joined, path_of
from tensordict.ops.dims.ragged_stacks import nest_leaves
from tensordict.ops.dims.sequences import SequencePadding
from tensordict.ops.dims.stacking import maybe_dense_stack_containers
from tensordict.ops.dims.token_rows import pack_rows

if TYPE_CHECKING:
    from typing import Literal

    from tensordict.core.keys import Key

    _Side = Literal["left", "right"]


class _Forms(NamedTuple):
    """The options of `collate`: how entries of different lengths are batched."""

    padding: dict[Path, float]
    nested: list[Path]
    mask_key: Any
    side: Any
    multiple: int
    max_tokens: int | None
    pack_keys: Sequence[Key] | None


def collate(
    batch: Any,
    *,
    pad_keys: Mapping[Key, float] | None = None,
    nested_keys: Sequence[Key] | None = None,
    mask_key: Key | None = None,
    padding_side: _Side | Mapping[Key, _Side] = "right",
    pad_to_multiple_of: int = 1,
    max_tokens: int | None = None,
    pack_keys: Sequence[Key] | None = None,
) -> Any:
    """Batch the samples of a data loader. Samples are containers, or tuples and dicts with containers in them.

    Example:
        >>> import torch
        >>> from functools import partial
        >>> from torch.utils.data import DataLoader
        >>> from tensordict import TensorDict, collate
        >>> samples = [(TensorDict(ids=torch.arange(n)), n) for n in (1, 3)]
        >>> fn = partial(collate, pad_keys={"ids": -1}, mask_key="mask")
        >>> batch, length = next(iter(DataLoader(samples, batch_size=2, collate_fn=fn)))
        >>> batch["ids"], length
        (tensor([[ 0, -1, -1],
                [ 0,  1,  2]]), tensor([1, 3]))
        >>> batch["mask", "ids"]
        tensor([[ True, False, False],
                [ True,  True,  True]])

    The first sample decides. Containers are stacked, lazily where their keys or shapes differ, as
    :func:`maybe_dense_stack` does. Tensors are stacked. Tuples, named tuples and mappings are batched item by item.
    Anything else goes to :func:`torch.utils.data.default_collate`. A data loader without `collate_fn` treats containers
    in the same way.

    Args:
        batch: a list of samples. Anything else is returned unchanged, such as the container that a batch sampler read
            as a whole.
        pad_keys: a mapping from (nested) keys to padding values. These entries are padded along their first dim to the
            longest sample and stacked; see :func:`pad_sequence`. The samples must not have batch dims.
        nested_keys: the (nested) keys of entries that become nested tensors of the layout `torch.jagged`. All other
            entries must have equal shapes, or be padded.
        mask_key: store a container with the masks of the padded entries under this key.
        padding_side: the side of the padding, or a mapping from keys in `pad_keys` to sides; see :func:`pad_sequence`.
        pad_to_multiple_of: the padded lengths are multiples of this number.
        max_tokens: pack the samples into rows of at most this number of tokens; see :func:`pack_sequences`.
        pack_keys: with `max_tokens`, the (nested) keys of the entries with one element for each token. All other
            entries are stacked. By default all entries are packed.

    Returns:
        the batch. Its tensors are copies. With `max_tokens`, a lazy stack of rows.

    Raises:
        KeyError: a sample lacks one of these entries.
        ValueError: the options contradict each other, `mask_key` is an entry of the samples, the samples have batch
            dims (with `pad_keys`), or other entries differ in shape (with `nested_keys`).
        RuntimeError: tuples have different lengths; or, with `max_tokens`, a sample has more tokens.
    """
    if not isinstance(batch, list) or not batch:
        return batch
    padded = bool(pad_keys or nested_keys) or mask_key is not None
    if padded and max_tokens is not None:
        raise ValueError(
            "max_tokens packs samples without padding: omit pad_keys, nested_keys and mask_key, or max_tokens"
        )
    if pack_keys is not None and max_tokens is None:
        raise ValueError("pack_keys names the entries that max_tokens packs into rows; pass max_tokens, too")
    if not pad_keys and (padding_side != "right" or pad_to_multiple_of != 1):
        raise ValueError("padding_side and pad_to_multiple_of are about the entries in pad_keys, and there are none")
    if padded or max_tokens is not None:
        padding = {path_of(key): value for key, value in (pad_keys or {}).items()}
        nested = [path_of(key) for key in _as_keys(nested_keys)]
        forms = _Forms(padding, nested, mask_key, padding_side, pad_to_multiple_of, max_tokens, pack_keys)
        return _collate_samples(batch, forms)
    return _collate_samples(batch, None)


def _as_keys(keys: Any) -> Sequence[Any]:
    if isinstance(keys, str):
        raise TypeError(f"nested_keys is a list of keys, got the text {keys!r}; pass [{keys!r}]")
    return () if keys is None else keys


def _collate_samples(samples: Sequence[Any], forms: _Forms | None) -> Any:
    first = samples[0]
    if isinstance(first, Contract):
        return maybe_dense_stack_containers(samples) if forms is None else _collate_containers(samples, forms)
    if isinstance(first, Tensor):
        return torch.stack(tuple(samples))
    if isinstance(first, Mapping):
        return {key: _collate_samples([sample[key] for sample in samples], forms) for key in first}
    if isinstance(first, tuple):
        if any(len(sample) != len(first) for sample in samples):
            raise ShapeError(f"the samples are tuples of different lengths, {sorted({len(one) for one in samples})}")
        columns = [_collate_samples(column, forms) for column in zip(*samples, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else tuple(columns)
    return default_collate(list(samples))


def _collate_containers(samples: Sequence[Any], forms: _Forms) -> Any:
    padding, nested, mask_key, side, multiple, max_tokens, pack_keys = forms
    if max_tokens is not None:
        return pack_rows(samples, max_tokens, pack_keys)
    named = [*padding, *nested]
    if both := [joined(path) for path in nested if path in padding]:
        raise ValueError(f"collate got {both} in both pad_keys and nested_keys")
    if mask_key is not None and not padding:
        raise ValueError("mask_key stores the masks of padded entries, and there are no pad_keys")
    for number, sample in enumerate(samples):
        for path in named:
            if not sample._has(path):
                raise KeyError(f"collate: sample {number} has no entry {joined(path)!r}")
        if mask_key is not None and sample._has(path_of(mask_key)):
            raise ValueError(f"mask_key={mask_key!r} is an entry of sample {number}; pass a key that is free")
        if padding and sample._batch_size:
            raise ShapeError(
                f"pad_keys pads the first dim of entries, and that is a batch dim of sample {number} "
                f"(batch_size={list(sample._batch_size)}); use pad_sequence, or samples without batch dims"
            )
    first, containers = samples[0], [sample._wrapped_container() for sample in samples]
    rest = [container.exclude(*map(joined, named)) for container in containers]
    result = maybe_dense_stack_containers(rest)
    if nested and result._members() is not None:
        raise ShapeError(
            f"nested_keys={[joined(path) for path in nested]} needs other entries that can be stacked, and some differ "
            "in keys or shapes: name entries of different lengths in pad_keys or nested_keys"
        )
    if padding:
        picked = [container.select(*map(joined, padding)) for container in containers]
        padded, masks = SequencePadding(0, padding, mask_key is not None, side, multiple).run(picked)
        result.update(padded)
        if masks is not None:
            first._check_field(path_of(mask_key)[0])
            if result._members() is not None:
                result = result.copy()  # the members share nested containers with the samples
            result.set(mask_key, masks)
    for path in nested:
        column = [container._peek(path) for container in containers]
        if not all(isinstance(leaf, Tensor) and not isinstance(leaf, Contract) for leaf in column):
            raise TypeError(f"nested_keys needs tensors, and {joined(path)!r} is a {type(column[0]).__name__}")
        result.set(joined(path), nest_leaves(column, torch.jagged, path))
    return first._rewrap(result)


def _collate_by_default(batch: Any, *, collate_fn_map: object = None) -> Any:
    """Batch containers for `default_collate`: a container, or a sequence of samples."""
    return batch if isinstance(batch, Contract) else maybe_dense_stack_containers(batch)


# Torch documents this table for user-defined types. It also covers their subclasses.
internals.collate_functions[Contract] = _collate_by_default
