"""The mixin of operations that choose rows, the elements along the first batch dim: `filter`, `sort_by`, `sample`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tensordict.core.contract import Contract
from tensordict.core.exceptions import ShapeError
from tensordict.core.key_views import is_non_tensor
from tensordict.core.keys import joined, path_of
from tensordict.ops.assertions import list_differences

if TYPE_CHECKING:
    from typing_extensions import Self

    from tensordict.core.keys import Key

# The methods below. Programs that were written before them may have fields and parameters of these names, which win.
LATER_METHODS = frozenset({"allclose", "filter", "head", "sample", "sort_by", "where_value"})


class RowChoice(Contract):
    """The methods `filter`, `head`, `sample`, `sort_by`, `where_value` and `allclose`.

    A row is an element along the first batch dim. On a concatenation, such as a data set, the results are views of the
    chosen rows.
    """

    def filter(self, fn: Callable[[Self], Any]) -> Self:
        """Choose the rows for which a function returns true.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(x=torch.arange(4), day=["mon", "tue", "mon", "sun"], batch_size=[4])
            >>> td.filter(lambda rows: (rows["x"] > 0) & (rows["day"] == "mon"))["x"]
            tensor([2])

        Args:
            fn: takes this container and returns a mask: a boolean tensor of shape (rows,). On a concatenation and on a
                data set, it is called with the rows of one part after the other, and reads only the entries that it
                uses.

        Returns:
            the same as `td[mask]`: a copy; on a concatenation, a data set or a file, a view that reads rows when they
            are used. The function waits for the device.

        Raises:
            TypeError: `fn` returns something else than a mask.
            RuntimeError: the mask has another shape, or the container has no batch dims.
        """
        _check_rows(self, "filter")
        inner = self._wrapped_container()
        if not inner._shows_rows:
            return self._index(_as_row_mask(fn(self), self))
        masks = []
        for rows in inner._row_blocks():
            block = self._index(rows)
            masks.append(_as_row_mask(fn(block), block).cpu())
        found = torch.cat(masks).nonzero().flatten() if masks else torch.zeros(0, dtype=torch.int64)
        return self._choose_rows(found)

    def head(self, n: int = 5) -> Self:
        """Return the first `n` rows, or all if there are fewer. The same as `td[:n]`, a view.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict(x=torch.arange(9), batch_size=[9]).head(3)["x"]
            tensor([0, 1, 2])

        Raises:
            ValueError: `n` is negative.
            RuntimeError: the container has no batch dims.
        """
        _check_rows(self, "head")
        if n < 0:
            raise ValueError(f"head returns the first n rows, where n is 0 or more, got n={n}")
        return self._index(slice(0, n))

    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Self:
        """Choose `n` different rows at random, in random order.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(x=torch.arange(9), batch_size=[9])
            >>> td.sample(3, generator=torch.Generator().manual_seed(0)).batch_size
            torch.Size([3])

        Args:
            n: the number of rows.
            generator: the source of randomness; by default torch's own.

        Returns:
            a copy; on a concatenation, a data set or a file, a view.

        Raises:
            ValueError: `n` is negative, or there are fewer rows.
            RuntimeError: the container has no batch dims.
        """
        rows = _check_rows(self, "sample")
        if not 0 <= n <= rows:
            raise ValueError(f"sample chooses different rows, and there are {rows:,}, got n={n}")
        order = (
            torch.randperm(rows)
            if generator is None
            else torch.randperm(rows, generator=generator, device=generator.device)
        )
        return self._choose_rows(order[:n])

    def sort_by(self, key: Key, descending: bool = False) -> Self:
        """Sort the rows by the values of an entry. Rows with equal values keep their order.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(reward=torch.tensor([1.0, 3.0, 2.0]), batch_size=[3])
            >>> td.sort_by("reward", descending=True).head(2)["reward"]
            tensor([3., 2.])

        Args:
            key: the nested key of a tensor with one number for each row (NaN comes last), or of values that are
                hashable and have an order, such as texts.
            descending: begin with the largest value.

        Returns:
            a copy; on a concatenation, a data set or a file, a view.

        Raises:
            KeyError: there is no such entry.
            TypeError: the entry is a container, or its values cannot be sorted.
            RuntimeError: the entry has several numbers for each row, or the container has no batch dims.
        """
        rows = _check_rows(self, "sort_by")
        entry = _get_entry(self, key)
        if isinstance(entry, Tensor) and not isinstance(entry, Contract):
            if entry.is_nested or entry.numel() != rows:
                raise ShapeError(
                    f"sort_by needs one number for each row, and entry {joined(path_of(key))!r} has the shape "
                    f"{list(entry.shape)}: sort by a column of it, td.set('rank', td[{key!r}][:, 0]).sort_by('rank')"
                )
            ranks = entry.detach().reshape(rows)
        else:
            ranks = rank_values(entry, key, "sort_by")[1]
        return self._choose_rows(torch.argsort(ranks, stable=True, descending=descending))

    def where_value(self, key: Key, value: object) -> Tensor:
        """Return a mask of the elements whose non-tensor value equals `value`, such as a text.

        Example:
            >>> from tensordict import TensorDict
            >>> td = TensorDict(day=["mon", "tue", "mon"], unit="s", batch_size=[3])
            >>> td.where_value("day", "mon"), td.where_value("unit", "m")
            (tensor([ True, False,  True]), tensor([False, False, False]))

        `td["day"] == "mon"` gives the same mask if the elements have values of their own. If all elements share one
        value, `td["unit"]` is that value, so the comparison gives a bool, and this method a mask.

        Args:
            key: the nested key.
            value: any value.

        Returns:
            a boolean tensor of the batch size, on the device of this container.

        Raises:
            KeyError: there is no such entry.
            TypeError: the entry is a tensor or a container.
            RuntimeError: the entry is ragged.
        """
        entry = _get_entry(self, key)
        if not is_non_tensor(entry):
            raise TypeError(
                f"where_value compares values that are no tensors, and entry {joined(path_of(key))!r} is a "
                f"{type(entry).__name__}; compare a tensor with ==, as in td[{key!r}] == value"
            )
        if -1 in entry._batch_size:
            raise ShapeError(
                f"entry {joined(path_of(key))!r} has the ragged batch size {list(entry._batch_size)}, and a mask has "
                "rows of one length: compare the members of the lazy stack one by one"
            )
        found: Tensor = entry._compare_with_value(value, torch.eq)
        return found

    def allclose(self, other: object, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> bool:
        """Test whether all tensors are close to the tensors of another container, and all values equal.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(x=torch.ones(3))
            >>> td.allclose(td + 1e-7), td.allclose(td + 1)
            (True, False)

        Args:
            other: a container with the same keys.
            rtol, atol, equal_nan: as for :func:`torch.allclose`.

        Returns:
            False also if dtypes, shapes or devices differ; :func:`assert_close` names the differences. On a
            concatenation or a data set, the rows of one part after the other are read and compared.

        Raises:
            KeyError: the keys differ. The error names the keys that only one of the containers has.
            TypeError: `other` is not a container.
        """
        if not isinstance(other, Contract):
            raise TypeError(f"allclose compares two containers, got a {type(other).__name__}")
        options = {"rtol": rtol, "atol": atol, "equal_nan": equal_nan}
        inner = self._wrapped_container()
        if not inner._shows_rows or self._batch_size != other._batch_size:
            return not list_differences(self, other, options)
        blocks = inner._row_blocks() or [slice(0, 0)]
        return not any(list_differences(self._index(rows), other._index(rows), options) for rows in blocks)

    # --- views of a concatenation -------------------------------------------------------------------------------------

    # True if `_view_at` gives a view of chosen rows, and `_row_blocks` the runs of rows that lie together.
    _shows_rows: bool = False

    def _choose_rows(self, at: Tensor) -> Self:
        """Return the rows at these positions, which are 0 or more: a view, if this container gives such views."""
        inner = self._wrapped_container()
        return self._rewrap(inner._view_at(at)) if inner._shows_rows else self._index(at)

    if TYPE_CHECKING:

        def _view_at(self, at: Tensor) -> Any: ...
        def _row_blocks(self) -> Sequence[slice]: ...


def rank_values(entry: Any, key: object, caller: str) -> tuple[list[Any], Tensor]:
    """Return the values of an entry without repetition, in ascending order, and the number of the value of each row.

    Raises:
        TypeError: the entry holds no values, or they cannot be hashed or have no order.
    """
    if not is_non_tensor(entry):
        raise TypeError(f"{caller} needs an entry of tensors or values, and {key!r} is a {type(entry).__name__}")
    rows = [_to_hashable(row) for row in entry.tolist()]
    try:
        values = sorted(set(rows))
    except TypeError as error:
        raise TypeError(f"{caller}: the values of {key!r} must be hashable and have an order: {error}") from None
    numbers = {value: number for number, value in enumerate(values)}
    return values, torch.tensor([numbers[row] for row in rows], dtype=torch.int64)


def _to_hashable(row: Any) -> Any:
    return tuple(map(_to_hashable, row)) if isinstance(row, list) else row


def _get_entry(container: Contract, key: Any) -> Any:
    """Return an entry, as a holder if it is no tensor. Raise a `KeyError` if it is missing."""
    inner: Any = container._wrapped_container()
    entry = inner._peek(path_of(key))
    if entry is None:
        raise inner._make_missing_error(key)
    return entry


def _check_rows(container: Contract, caller: str) -> int:
    """Return the number of rows. Raise if the container has no batch dims."""
    size = container._batch_size
    if not size:
        raise ShapeError(f"{caller} chooses rows along the first batch dim, and the container has no batch dims")
    return size[0]


def _as_row_mask(mask: Any, container: Contract) -> Tensor:
    """Check the result of a function that filters rows."""
    if not isinstance(mask, Tensor) or mask.dtype is not torch.bool:
        kind = f"a tensor of {mask.dtype}" if isinstance(mask, Tensor) else repr(mask)[:80]
        raise TypeError(
            f"filter needs a function that returns a boolean tensor with one element for each row, got {kind}; "
            'td.where_value("key", value) compares the texts of an entry, also if all rows share one text'
        )
    rows = container._batch_size[0]
    if mask.shape != (rows,):
        raise ShapeError(
            f"filter needs a mask of shape [{rows}], with one element for each row, got {list(mask.shape)}; reduce the "
            "other dims, as in mask.flatten(1).all(1)"
        )
    return mask
