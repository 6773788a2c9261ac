"""Public free functions on containers, such as `stack`, `cat` and `pad_sequence`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import torch
from torch import Tensor

from tensordict.containers.concatenated import LazyConcatenatedTensorDict
from tensordict.containers.lazy import LazyStackedTensorDict
from tensordict.containers.tensordict_base import TensorDictBase
from tensordict.convert.python_structures import refuse_exclusive_keys
from tensordict.core import ragged
from tensordict.core import torch_internals as internals
from tensordict.core.contract import Contract, is_node, merged_device, raise_key_mismatch
from tensordict.core.exceptions import KeyMismatchError, ShapeError
from tensordict.core.keys import Key, Path, joined, path_of
from tensordict.core.shapes import as_new_dim
from tensordict.ops.dims.rows import rank_values
from tensordict.ops.dims.sequences import pad_and_stack, unpad
from tensordict.ops.dims.stacking import (
    cat_containers,
    check_lazy_cat,
    lazy_stack_containers,
    maybe_dense_stack_containers,
    stack_containers,
)
from tensordict.ops.dims.token_rows import pack_rows, unpack_rows
from tensordict.ops.entries.write_plans import take_plain_entries

if TYPE_CHECKING:
    from tensordict.ops.collection import TensorCollection

    _Container = TypeVar("_Container", bound=TensorCollection)
    _Side = Literal["left", "right"]

__all__ = [
    "cat",
    "dense_stack_tds",
    "from_module",
    "from_modules",
    "is_batchedtensor",
    "lazy_cat",
    "lazy_stack",
    "maybe_dense_stack",
    "merge_tensordicts",
    "pack_sequences",
    "pad",
    "pad_sequence",
    "stack",
    "unpack_sequences",
    "unpad_sequence",
]


@overload
def stack(input: Sequence[Tensor], dim: int = ..., *, out: Tensor | None = ...) -> Tensor: ...
@overload
def stack(input: Iterable[_Container], dim: int = ..., *, out: Any = ...) -> _Container: ...
def stack(input: Iterable[Any], dim: int = 0, *, out: object = None) -> Any:
    """Stack containers along a new batch dim. Plain tensors go to :func:`torch.stack`.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict, stack
        >>> stack([TensorDict({"a": torch.zeros(3)}, [3]) for _ in range(2)])["a"].shape
        torch.Size([2, 3])

    Args:
        input: containers with the same keys and shapes.
        dim: the position of the new dim.
        out: a container of the resulting batch size to write into, in place.

    Returns:
        a new container, or `out`.

    Raises:
        KeyError: the keys differ. The error names the keys that are not in all containers.
        RuntimeError: the batch sizes or the shapes of an entry differ.
    """
    if _are_tensors(input):
        return torch.stack(input, dim, out=out)  # type: ignore[arg-type]
    return stack_containers(input, dim, out)


@overload
def cat(input: Sequence[Tensor], dim: int = ..., *, out: Tensor | None = ...) -> Tensor: ...
@overload
def cat(input: Iterable[_Container], dim: int = ..., *, out: Any = ...) -> _Container: ...
def cat(input: Iterable[Any], dim: int = 0, *, out: object = None) -> Any:
    """Concatenate containers along an existing batch dim. Plain tensors go to :func:`torch.cat`.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict, cat
        >>> cat([TensorDict({"a": torch.zeros(n)}, [n]) for n in (1, 2)])["a"].shape
        torch.Size([3])

    The arguments and errors are the same as for :func:`stack`.
    """
    if _are_tensors(input):
        return torch.cat(input, dim, out=out)  # type: ignore[arg-type]
    return cat_containers(input, dim, out)


@overload
def lazy_cat(input: Iterable[TensorDictBase], dim: int = ...) -> LazyConcatenatedTensorDict: ...
@overload
def lazy_cat(input: Iterable[_Container], dim: int = ...) -> _Container: ...
def lazy_cat(input: Iterable[Any], dim: int = 0) -> Any:
    """Concatenate containers of equal schema along their first batch dim, without copying them.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict, lazy_cat
        >>> td = lazy_cat([TensorDict(a=torch.zeros(2), batch_size=2), TensorDict(a=torch.ones(3), batch_size=3)])
        >>> td[[0, 4]]["a"], td[1:3]["a"]
        (tensor([0., 1.]), tensor([0., 1.]))

    Data in files stays there. Indexing a concatenation of memory-mapped containers reads the selected rows only.

    Args:
        input: the containers, at least one. They have the same keys, dtypes, devices and shapes, except for the number
            of rows, and the same class if they are tensorclasses.
        dim: must be 0. Use :func:`cat`, which copies, for other dims.

    Returns:
        a :class:`~tensordict.LazyConcatenatedTensorDict` that shares these containers, wrapped in their class if they
        are tensorclasses. Construct it directly to load parts when they are used.

    Raises:
        RuntimeError: the input is empty, or one differs from the first. The error names the entry.
        TypeError: one of them is not a container.
    """
    items = check_lazy_cat(input, dim)
    return items[0]._rewrap(LazyConcatenatedTensorDict(items))


@overload
def lazy_stack(input: Sequence[Tensor], dim: int = ..., *, out: Tensor | None = ...) -> Tensor: ...
@overload
def lazy_stack(
    input: Iterable[TensorDictBase], dim: int = ..., *, out: Any = ..., **kwargs: Any
) -> LazyStackedTensorDict: ...
@overload
def lazy_stack(input: Iterable[_Container], dim: int = ..., *, out: Any = ..., **kwargs: Any) -> _Container: ...
def lazy_stack(input: Iterable[Any], dim: int = 0, *, out: object = None, **kwargs: object) -> Any:
    """Stack containers along a new batch dim without copying them. Plain tensors go to :func:`torch.stack`.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict, lazy_stack
        >>> tds = [TensorDict(a=torch.zeros(n)) for n in (1, 2)]
        >>> stack = lazy_stack(tds)
        >>> stack[0] is tds[0], stack.batch_size
        (True, torch.Size([2]))

    Args:
        input: the containers. They may differ in keys and shapes.
        dim: the position of the new dim.
        out: a container of the resulting batch size to write into, in place.
        **kwargs: passed to :class:`~tensordict.LazyStackedTensorDict`.

    Returns:
        a `LazyStackedTensorDict` whose members are these containers, or `out`.

    Raises:
        RuntimeError: the input is empty, or they have different numbers of batch dims.
        TypeError: one of them is not a container.
    """
    if _are_tensors(input):
        return torch.stack(input, dim, out=out)  # type: ignore[arg-type]
    return lazy_stack_containers(input, dim, out, **kwargs)


@overload
def maybe_dense_stack(input: Sequence[Tensor], dim: int = ..., *, out: Tensor | None = ...) -> Tensor: ...
@overload
def maybe_dense_stack(
    input: Iterable[TensorDictBase], dim: int = ..., *, out: Any = ..., **kwargs: Any
) -> TensorDictBase: ...
@overload
def maybe_dense_stack(input: Iterable[_Container], dim: int = ..., *, out: Any = ..., **kwargs: Any) -> _Container: ...
def maybe_dense_stack(input: Iterable[Any], dim: int = 0, *, out: object = None, **kwargs: object) -> Any:
    """Call :func:`stack` if the containers have the same keys, shapes and devices, and :func:`lazy_stack` otherwise.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict, maybe_dense_stack
        >>> type(maybe_dense_stack([TensorDict(a=torch.zeros(n)) for n in (1, 2)])).__name__
        'LazyStackedTensorDict'

    The arguments and errors are the same as for :func:`lazy_stack`.
    """
    if _are_tensors(input):
        return torch.stack(input, dim, out=out)  # type: ignore[arg-type]
    return maybe_dense_stack_containers(input, dim, out, **kwargs)


def dense_stack_tds(td_list: Iterable[TensorCollection], dim: int | None = None) -> TensorCollection:
    """Stack containers of the same structure along a new batch dim. Lazy stacks nested in them stay lazy.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict, dense_stack_tds, lazy_stack
        >>> inner = lazy_stack([TensorDict(a=torch.zeros(n)) for n in (1, 2)])
        >>> stack = dense_stack_tds([TensorDict(x=inner), TensorDict(x=inner)], dim=0)
        >>> type(stack).__name__, stack["x"].batch_size, stack["x"].stack_dim
        ('TensorDict', torch.Size([2, 2]), 1)

    Args:
        td_list: the containers, or a lazy stack of them.
        dim: the position of the new dim. A lazy stack is stacked along its own stack dim.

    Returns:
        a container of the class of the list items. The new dim shifts the stack dims of nested lazy stacks like any
        other dim. Containers that differ in keys or shapes give a lazy stack of them.

    Raises:
        ValueError: a list was given, but no `dim`.
    """
    if isinstance(td_list, Contract) and isinstance(td_list._wrapped_container(), LazyStackedTensorDict):
        dim = td_list._wrapped_container().stack_dim
        items = list(td_list.unbind(dim))
    else:
        items = list(td_list)
    if dim is None:
        raise ValueError("dense_stack_tds needs to know along which dim to stack a list: pass dim=")
    if not items or not all(isinstance(item, Contract) for item in items):
        raise TypeError(f"dense_stack_tds stacks containers, got {[type(item).__name__ for item in items]}")
    if any(item._batch_size != items[0]._batch_size for item in items):
        return lazy_stack_containers(items, dim)  # type: ignore[no-any-return]
    dim = as_new_dim(dim, len(items[0]._batch_size))
    try:
        return _stack_densely(items, dim)  # type: ignore[no-any-return]
    except (KeyMismatchError, ShapeError, NotImplementedError):
        return lazy_stack_containers(items, dim)  # type: ignore[no-any-return]


def _stack_densely(items: Sequence[Any], dim: int) -> Any:
    first = items[0]
    if not isinstance(first._wrapped_container(), LazyStackedTensorDict):
        mappings = [item._entries for item in items]
        if any(mapping.keys() != mappings[0].keys() for mapping in mappings):
            raise_key_mismatch(mappings, ())
        entries = {}
        for name, value in mappings[0].items():
            column = [mapping[name] for mapping in mappings]
            if is_node(value) and not value._is_non_tensor:
                entries[name] = _stack_densely(column, dim)
            elif isinstance(value, Contract):
                entries[name] = stack_containers(column, dim)
            elif type(value) is not Tensor and value.is_nested:
                entries[name] = ragged.stack(column, dim)
            else:
                try:
                    entries[name] = torch.stack(column, dim)
                except RuntimeError as error:
                    raise ShapeError(str(error)) from error
        size = list(first._batch_size)
        size.insert(dim, len(items))
        names = first._names and [*first._names[:dim], None, *first._names[dim:]]
        return first._build(entries, torch.Size(size), merged_device(items, stacked=True), names)
    at = first.stack_dim
    if any(type(item) is not type(first) or item.stack_dim != at for item in items):
        raise ShapeError("nested lazy stacks must be stacked along the same dim")
    # The new dim comes before or behind the stack dim, and shifts the other one of the two.
    within, at = (dim, at + 1) if dim <= at else (dim - 1, at)
    columns = zip(*[item.unbind(item.stack_dim) for item in items], strict=True)
    return lazy_stack_containers([_stack_densely(column, within) for column in columns], at)


def pad(
    tensordict: _Container, pad_size: Sequence[int], value: float | None = 0.0, inplace: bool = False, safe: bool = True
) -> _Container:
    """Make batch dims of a container longer, filled with `value`; see :meth:`TensorDictBase.pad`.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict, pad
        >>> pad(TensorDict({"a": torch.ones(1, 2)}, [1, 2]), [0, 0, 1, 0])["a"]
        tensor([[0., 1., 1.]])
    """
    return tensordict.pad(pad_size, value, inplace=inplace, safe=safe)


def pad_sequence(
    list_of_tensordicts: Iterable[_Container],
    pad_dim: int = 0,
    padding_value: float | Mapping[Key, float] = 0.0,
    out: object = None,
    return_mask: object = False,
    padding_side: _Side | Mapping[Key, _Side] = "right",
    pad_to_multiple_of: int = 1,
) -> _Container:
    """Stack containers whose entries differ in length along one dim, after padding the shorter ones.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict, pad_sequence
        >>> batch = pad_sequence([TensorDict(a=torch.ones(n)) for n in (1, 2)], return_mask=True)
        >>> batch["a"]
        tensor([[1., 0.],
                [1., 1.]])
        >>> batch["masks", "a"]
        tensor([[ True, False],
                [ True,  True]])

    :func:`unpad_sequence` splits the batch again. :func:`collate` pads some entries only.

    Args:
        list_of_tensordicts: containers with the same keys.
        pad_dim: the dim of every entry that is padded. Negative values count from the last dim of each entry. If it is
            a batch dim, the batch sizes are padded too, and values that are no tensors are padded with `None`.
        padding_value: the value of the padding, or a mapping from (nested) keys to values. Entries that the mapping
            lacks are padded with 0.
        out: a container of the resulting batch size to write into. Its entries are written in place; entries that it
            lacks are added.
        return_mask: `True` adds an entry `"masks"`, a container of the same structure whose bools are `True` for
            elements and `False` for padding. A (nested) key adds it under this key instead. Masks have the batch dims
            and the padded dim.
        padding_side: `"right"` pads behind the elements, `"left"` before them. Or a mapping from (nested) keys to
            sides. Entries that the mapping lacks are padded on the right.
        pad_to_multiple_of: the padded length is the smallest multiple of this number that holds the longest input.

    Returns:
        a new container with one more batch dim in front, or `out`.

    Raises:
        KeyError: the keys differ, and the error names the keys that are not in all containers; or `padding_value` or
            `padding_side` has a key without an entry.
        IndexError: an entry has no dim `pad_dim`.
        RuntimeError: the list is empty, or shapes differ in another dim.
        ValueError: `padding_side` is another text, or `pad_to_multiple_of` is less than 1.
    """
    return pad_and_stack(  # type: ignore[no-any-return]
        list_of_tensordicts, pad_dim, padding_value, out, return_mask, padding_side, pad_to_multiple_of
    )


def unpad_sequence(
    padded: TensorCollection, mask: TensorCollection | Tensor | None = None, *, pad_dim: int = 0
) -> LazyStackedTensorDict:
    """Split a padded batch into rows of their own lengths, which undoes :func:`pad_sequence`.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict, pad_sequence, unpad_sequence
        >>> batch = pad_sequence([TensorDict(a=torch.ones(n)) for n in (1, 2)], return_mask=True)
        >>> [row["a"] for row in unpad_sequence(batch)]
        [tensor([1.]), tensor([1., 1.])]

    Args:
        padded: the batch. Its first batch dim counts the rows.
        mask: `True` for elements, in one contiguous run per row. Either a tensor of shape (rows, longest row) for all
            entries, or a container with the structure of `padded`, whose masks have the shapes that `pad_sequence`
            gives them. By default the entry `"masks"` of `padded`, which the rows then lack.
        pad_dim: the `pad_dim` of `pad_sequence`: a dim of the entries of a row.

    Returns:
        a lazy stack of the rows, whose tensors are views of those in `padded`. If `pad_dim` is a batch dim, the rows
        have batch sizes of their own, and values that are no tensors are cut as well. The function waits for the
        device, because lengths are read from the masks.

    Raises:
        KeyError: an entry has no mask.
        ValueError: `padded` has no batch dims; there is no mask, or it does not fit an entry; the elements of a row are
            not contiguous.
    """
    return unpad(padded, mask, pad_dim)  # type: ignore[no-any-return]


def pack_sequences(
    sequences: Iterable[TensorCollection], max_tokens: int, *, keys: Sequence[Key] | None = None
) -> LazyStackedTensorDict:
    """Pack sequences of tokens into rows of at most `max_tokens` tokens, without padding.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict, pack_sequences
        >>> rows = pack_sequences([TensorDict(ids=torch.arange(n)) for n in (3, 4, 1)], max_tokens=4)
        >>> rows[0]["tokens", "ids"], rows[0]["position_ids"], rows[0]["cu_seqlens"], rows[0]["max_seqlen"]
        (tensor([0, 1, 2, 0]), tensor([0, 1, 2, 0]), tensor([0, 3, 4], dtype=torch.int32), 3)

    A row is a container without batch dims. `flash_attn_varlen_func` of flash attention takes its `cu_seqlens` and
    `max_seqlen`. The entries of a row are:

    - `"tokens"`: the sequences, one after the other. Outputs of a model can be stored here: :func:`unpack_sequences`
      splits them, too.
    - `"position_ids"`: the position of each token in its sequence, int64.
    - `"cu_seqlens"`: the cumulative lengths of the sequences, which begin with 0, int32.
    - `"max_seqlen"`: the length of the longest sequence, an int.
    - `"indices"`: the numbers of the sequences in `sequences`, int64.
    - `"sequences"` (only with `keys`): the stack of all other entries, one element for each sequence.

    The rows are chosen by best-fit decreasing: the longest sequence comes first, and each goes to the fullest row that
    has space. This needs at most 11/9 of the smallest number of rows, and one more (D. S. Johnson, 1973). The result
    depends on the lengths only. Rows, and the sequences in them, are then sorted by number.

    Args:
        sequences: containers with the same keys and one element for each token: along their first batch dim, or along
            the first dim of each entry if they have no batch dims. They may be empty.
        max_tokens: the number of tokens that a row can hold.
        keys: the (nested) keys of the entries with one element for each token; all by default.

    Returns:
        a lazy stack of the rows. Their tensors are new; those of one entry share memory.

    Raises:
        KeyError: the keys of the sequences differ, or a sequence has no entry at one of `keys`.
        RuntimeError: there are no sequences; a sequence is longer than `max_tokens`; or an entry does not have one
            element for each token. The error names the sequence.
    """
    return pack_rows(sequences, max_tokens, keys)  # type: ignore[no-any-return]


def unpack_sequences(rows: TensorCollection | Iterable[TensorCollection]) -> LazyStackedTensorDict:
    """Split packed rows into sequences in their first order, which undoes :func:`pack_sequences`.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict, pack_sequences, unpack_sequences
        >>> rows = pack_sequences([TensorDict(ids=torch.arange(n)) for n in (3, 4, 1)], max_tokens=4)
        >>> [sequence["ids"].tolist() for sequence in unpack_sequences(rows)]
        [[0, 1, 2], [0, 1, 2, 3], [0]]

    Args:
        rows: the rows, some of them, or one row. Entries that were added to `"tokens"` are split with the others.

    Returns:
        a lazy stack of the sequences, sorted by number. Their tensors are views of the rows. The function waits for
        the device, because it reads the lengths.

    Raises:
        KeyError: a row lacks an entry that :func:`pack_sequences` writes.
        RuntimeError: there are no rows; or an entry of `"tokens"` does not have one element for each token.
        ValueError: two rows have the same sequence, because they come from two calls.
    """
    return unpack_rows(rows)  # type: ignore[no-any-return]


def group_by(tensordict: _Container, key: Key) -> tuple[Tensor | list[Any], tuple[_Container, ...]]:
    """Split the first batch dim into groups of rows that have equal values in an entry.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict, group_by
        >>> td = TensorDict(user=torch.tensor([2, 0, 2]), reward=torch.tensor([1.0, 2.0, 3.0]), batch_size=[3])
        >>> users, groups = group_by(td, "user")
        >>> users, [group["reward"] for group in groups]
        (tensor([0, 2]), [tensor([2.]), tensor([1., 3.])])

    Args:
        tensordict: a container with at least one batch dim.
        key: the entry: a tensor, or values that are hashable and have an order, such as texts. If a row has several
            values, rows are compared as a whole.

    Returns:
        the values without repetition, in ascending order, and the group of each. The values are a tensor of shape
        (groups, ...) and the dtype of the entry, or a list. A group holds its rows in their old order; it is a view of
        one copy of all rows. Sizes depend on the values, so the function waits for the device, and does not compile to
        one graph.

    Raises:
        ValueError: the container has no batch dims.
        KeyError: it has no such entry.
        TypeError: the first argument or the entry has the wrong type, or the values cannot be hashed or sorted.
    """
    if not isinstance(tensordict, Contract):
        raise TypeError(f"group_by takes a container, got {type(tensordict).__name__}")
    if not tensordict.batch_dims:
        raise ValueError("group_by groups the rows of the first batch dim, and the container has no batch dims")
    container: Any = tensordict._wrapped_container()
    entry = container._peek(path_of(key))
    if entry is None:
        raise container._make_missing_error(key)
    values: Tensor | list[Any]
    if isinstance(entry, Tensor) and not isinstance(entry, Contract):
        dim = None if entry.ndim == 1 else 0
        values, groups = torch.unique(entry, return_inverse=True, dim=dim)
    else:
        values, groups = rank_values(entry, key, "group_by")
    counts = torch.bincount(groups, minlength=len(values)).tolist()
    rows: Any = tensordict
    return values, rows._choose_rows(torch.argsort(groups, stable=True)).split(counts) if counts else ()


def merge_tensordicts(*tensordicts: _Container, callback_exist: object = None) -> _Container:
    """Merge the entries of several containers into one. If several have a key, the first one is used.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict, merge_tensordicts
        >>> a, b = TensorDict(x=0, both=0), TensorDict(y=1, both=1)
        >>> merged = merge_tensordicts(a, b, callback_exist=lambda *values: torch.stack(values))
        >>> sorted(merged.keys()), merged["both"]
        (['both', 'x', 'y'], tensor([0, 1]))

    Args:
        *tensordicts: two containers or more.
        callback_exist: a function that computes an entry which all containers have from its tensors; or a dict from
            (nested) keys to such functions.

    Returns:
        a new container with the batch size, device and names of the first one. It shares the entries, which must fit
        its batch size. It is a lazy stack if the first one is, or if another one is and cannot be made dense.

    Raises:
        KeyError: only some members of a lazy stack of another batch size have an entry.
        RuntimeError: fewer than two containers, or an entry does not fit the batch size.
        TypeError: an argument is not a container, or an entry is a container in one and a tensor in another.
    """
    if len(tensordicts) < 2:
        raise RuntimeError(f"merge_tensordicts merges at least two containers, got {len(tensordicts)}")
    for position, item in enumerate(tensordicts):
        if not isinstance(item, Contract):
            raise TypeError(f"merge_tensordicts takes containers, got {type(item).__name__} at position {position}")
    callbacks = callback_exist
    if isinstance(callback_exist, Mapping):
        callbacks = {path_of(key): function for key, function in callback_exist.items()}
    return _merge_nodes(tensordicts, len(tensordicts), callbacks, ())  # type: ignore[no-any-return]


def _merge_nodes(nodes: Sequence[Any], count: int, callbacks: Any, path: Path) -> Any:
    first, size = nodes[0], nodes[0]._batch_size
    uneven = (node for node in nodes if node._batch_size == size and _is_uneven(node))
    lazy = first if first._members() else next(uneven, None)
    if lazy is not None:
        # Merges member by member, since each may have entries of its own.
        alike = [node if node._batch_size == size else first.empty().update(node) for node in nodes]
        rows = zip(*[lazy._pieces_of(node) for node in alike], strict=True)
        merged = lazy._restack([_merge_nodes(row, count, callbacks, path) for row in rows])
        if lazy is not first:
            merged.names = first._names
        return merged
    for node in nodes:
        refuse_exclusive_keys(node, "merge_tensordicts")
    result = first.empty()
    if callbacks is None and first._device is None and result._wrapped_container() is result:
        # Dynamo cannot trace names that `:=` binds in a comprehension.
        plain = [given for given in [take_plain_entries(node, size) for node in nodes] if given is not None]
        if len(plain) == len(nodes):
            for given in plain:
                for name, value in given.items():
                    result._entries.setdefault(name, value)
            return result
    names = dict.fromkeys(name for node in nodes for name in node._entries)
    for name in names:
        key = (*path, name)
        values = [node._entries[name] for node in nodes if name in node._entries]
        tensors = [value for value in values if isinstance(value, Tensor)]
        inner = [value for value in values if is_node(value) and not value._is_non_tensor]
        if tensors and inner:
            raise TypeError(f"entry {joined(key)!r} is a container in one input and a tensor in another")
        value = values[0]
        if inner and value is inner[0]:
            value = _merge_nodes(inner, count, callbacks, key)
        if len(tensors) == count:
            callback = callbacks.get(key) if isinstance(callbacks, dict) else callbacks
            if callback is not None:
                value = callback(*values)
        result._write_name(name, value, path=key)
    return result


def _is_uneven(node: Contract) -> bool:
    """Return whether a lazy stack has entries that only some members have, or whose shapes differ."""
    members = node._members()
    if not members:
        return False
    if len({frozenset(member._structure()) for member in members}) > 1:
        return True
    leaves = [name for name, value in node._structure().items() if not is_node(value)]
    return any(type(n) is not int or n < 0 for name in leaves for n in node._shape_of(name))


def is_batchedtensor(tensor: Tensor) -> bool:
    """Return whether a tensor is batched by :func:`torch.vmap`.

    Example:
        >>> import torch
        >>> from tensordict import is_batchedtensor
        >>> seen = []
        >>> _ = torch.vmap(lambda x: seen.append(is_batchedtensor(x)) or x)(torch.zeros(2))
        >>> seen, is_batchedtensor(torch.zeros(2))
        ([True], False)
    """
    return internals.is_batched(tensor)


def _are_tensors(input: object) -> bool:
    return isinstance(input, (list, tuple)) and len(input) > 0 and isinstance(input[0], Tensor)


# Their results are locked by default; `TensorDict.from_module` has another default.
from_module = TensorDictBase.from_module
from_modules = TensorDictBase.from_modules
