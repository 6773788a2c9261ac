"""TensorDictBase: the base of containers that are used like a dict of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from types import GenericAlias
from typing import TYPE_CHECKING, Any, ClassVar, Literal, overload

import torch

from tensordict.core.exceptions import ShapeError
from tensordict.core.keys import Path
from tensordict.ops.collection import TensorCollection
from tensordict.ops.entries.write_plans import Resize, Write

if TYPE_CHECKING:
    from concurrent.futures import Future

    from torch import Tensor
    from typing_extensions import Unpack

    from tensordict.containers.dense import TensorDict
    from tensordict.containers.lazy import LazyStackedTensorDict
    from tensordict.containers.persistent_tensordict import PersistentTensorDict
    from tensordict.core.keys import Key
    from tensordict.io.remote.urls import StorageOptions
    from tensordict.ops.storing.persisting import OpenH5, OpenZarr


class TensorDictBase(TensorCollection):
    """The base of containers that are used like a dict of tensors.

    `isinstance(td, collections.abc.MutableMapping)` is true. The class is registered and not derived, because the
    metaclass of `MutableMapping` makes `isinstance` ten times slower.
    """

    if TYPE_CHECKING:
        # Methods whose result has another class than the container. Wrappers return their own class.
        def to_lazystack(self, dim: int = 0) -> LazyStackedTensorDict: ...
        def to_h5(
            self,
            filename: object,
            *,
            durable: bool = False,
            progress: bool | None = None,
            overwrite: bool = False,
            storage_options: StorageOptions | None = None,
            **kwargs: object,
        ) -> PersistentTensorDict: ...
        @classmethod
        def from_h5(cls, filename: object, **options: Unpack[OpenH5]) -> PersistentTensorDict: ...
        def to_zarr(
            self,
            filename: object,
            *,
            allow_pickle: bool | None = None,
            durable: bool = False,
            progress: bool | None = None,
            overwrite: bool = False,
            storage_options: StorageOptions | None = None,
            **kwargs: object,
        ) -> PersistentTensorDict: ...
        @classmethod
        def from_zarr(
            cls, filename: object, *, allow_pickle: bool | None = None, **options: Unpack[OpenZarr]
        ) -> PersistentTensorDict: ...

    @classmethod
    def __class_getitem__(cls, item: object) -> GenericAlias:
        """Allow `TensorDict[str, Frame]` in annotations, as `dict[str, Frame]`."""
        return GenericAlias(cls, item)


MutableMapping.register(TensorDictBase)


class FixedSize(TensorCollection):
    """A container whose batch size, in `_size`, cannot be changed."""

    _size: torch.Size
    # For the error: what the batch size belongs to, what it follows from, and what to do instead.
    _size_reason: ClassVar[tuple[str, str, str]]

    @property
    def _batch_size(self) -> torch.Size:
        return self._size

    @_batch_size.setter
    def _batch_size(self, size: torch.Size) -> None:
        self._refuse_size(size)

    def _refuse_size(self, size: torch.Size) -> None:
        if size != self._size:
            what, origin, instead = self._size_reason
            raise ShapeError(
                f"the batch size {list(self._size)} of {what} follows from {origin} and cannot become {list(size)}; "
                f"{instead}"
            )

    def _plan_write(self, write: Write, source: Any, prefix: Path = ()) -> None:
        if isinstance(write, Resize):
            self._refuse_size(source)
        super()._plan_write(write, source, prefix)


if TYPE_CHECKING:

    class GivesTensorDicts(TensorDictBase):
        """The types of common operations that return a `TensorDict` instead of the class itself.

        For type checkers only. They believe that the remaining operations return the class itself.
        """

        @overload
        def __getitem__(self, index: Key) -> Any: ...
        @overload
        def __getitem__(self, index: Any) -> TensorDict: ...
        def __getitem__(self, index: object) -> Any: ...
        def __iter__(self) -> Iterator[TensorDict]: ...  # type: ignore[override]
        def unbind(self, dim: int = 0) -> tuple[TensorDict, ...]: ...  # type: ignore[override]
        def split(  # type: ignore[override]
            self, split_size: int | Sequence[int] | Tensor, dim: int = 0
        ) -> tuple[TensorDict, ...]: ...
        def chunk(self, chunks: int, dim: int = 0) -> tuple[TensorDict, ...]: ...  # type: ignore[override]
        @overload  # type: ignore[override]
        def apply(self, fn: Callable[[Any], Any], **options: Any) -> TensorDict: ...
        @overload
        def apply(self, fn: Callable[..., Any], *others: Any, **options: Any) -> TensorDict: ...
        def apply(self, fn: Callable[..., Any], *others: object, **options: object) -> TensorDict: ...
        @overload  # type: ignore[override]
        def named_apply(self, fn: Callable[[Any, Any], Any], **options: Any) -> TensorDict: ...
        @overload
        def named_apply(self, fn: Callable[..., Any], *others: Any, **options: Any) -> TensorDict: ...
        def named_apply(self, fn: Callable[..., Any], *others: object, **options: object) -> TensorDict: ...
        @property
        def data(self) -> TensorDict: ...  # type: ignore[override]
        @property
        def grad(self) -> TensorDict | None: ...  # type: ignore[override]
        def __abs__(self) -> TensorDict: ...  # type: ignore[override]
        def __invert__(self) -> TensorDict: ...  # type: ignore[override]
        def __neg__(self) -> TensorDict: ...  # type: ignore[override]
        def abs(self) -> TensorDict: ...  # type: ignore[override]
        def detach(self) -> TensorDict: ...  # type: ignore[override]
        def exp(self) -> TensorDict: ...  # type: ignore[override]
        def log(self) -> TensorDict: ...  # type: ignore[override]
        def neg(self) -> TensorDict: ...  # type: ignore[override]
        def sqrt(self) -> TensorDict: ...  # type: ignore[override]
        def sigmoid(self) -> TensorDict: ...  # type: ignore[override]
        def tanh(self) -> TensorDict: ...  # type: ignore[override]
        def isnan(self) -> TensorDict: ...  # type: ignore[override]
        def isfinite(self) -> TensorDict: ...  # type: ignore[override]
        def __add__(self, other: object) -> TensorDict: ...  # type: ignore[override]
        def __and__(self, other: object) -> TensorDict: ...  # type: ignore[override]
        def __eq__(self, other: object) -> TensorDict: ...  # type: ignore[override]
        def __floordiv__(self, other: object) -> TensorDict: ...  # type: ignore[override]
        def __ge__(self, other: object) -> TensorDict: ...  # type: ignore[override]
        def __gt__(self, other: object) -> TensorDict: ...  # type: ignore[override]
        def __le__(self, other: object) -> TensorDict: ...  # type: ignore[override]
        def __lt__(self, other: object) -> TensorDict: ...  # type: ignore[override]
        def __mod__(self, other: object) -> TensorDict: ...  # type: ignore[override]
        def __mul__(self, other: object) -> TensorDict: ...  # type: ignore[override]
        def __ne__(self, other: object) -> TensorDict: ...  # type: ignore[override]
        def __or__(self, other: object) -> TensorDict: ...  # type: ignore[override]
        def __pow__(self, other: object) -> TensorDict: ...  # type: ignore[override]
        def __radd__(self, other: object) -> TensorDict: ...  # type: ignore[override]
        def __rmul__(self, other: object) -> TensorDict: ...  # type: ignore[override]
        def __rsub__(self, other: object) -> TensorDict: ...  # type: ignore[override]
        def __rtruediv__(self, other: object) -> TensorDict: ...  # type: ignore[override]
        def __sub__(self, other: object) -> TensorDict: ...  # type: ignore[override]
        def __truediv__(self, other: object) -> TensorDict: ...  # type: ignore[override]
        def div(self, other: object, *, default: object = None) -> TensorDict: ...  # type: ignore[override]
        def maximum(self, other: object, *, default: object = None) -> TensorDict: ...  # type: ignore[override]
        def minimum(self, other: object, *, default: object = None) -> TensorDict: ...  # type: ignore[override]
        def mul(self, other: object, *, default: object = None) -> TensorDict: ...  # type: ignore[override]
        def pow(self, other: object, *, default: object = None) -> TensorDict: ...  # type: ignore[override]
        def add(self, other: object, *, alpha: object = None, default: object = None) -> TensorDict: ...  # type: ignore[override]
        def sub(self, other: object, *, alpha: object = None, default: object = None) -> TensorDict: ...  # type: ignore[override]
        def copy(self) -> TensorDictBase: ...  # type: ignore[override]
        @overload  # type: ignore[override]
        def consolidate(
            self, filename: Any = ..., *, return_early: Literal[True], **options: Any
        ) -> Future[TensorDict]: ...
        @overload
        def consolidate(self, filename: Any = ..., **options: Any) -> TensorDict: ...
        def consolidate(self, filename: object = ..., **options: object) -> Any: ...
        def select(self, *keys: object, **options: object) -> TensorDictBase: ...  # type: ignore[override]
        def exclude(self, *keys: object, **options: object) -> TensorDictBase: ...  # type: ignore[override]
        def expand(  # type: ignore[override]
            self, *args: object, size: object = None, shape: object = None, inplace: bool = ...
        ) -> TensorDict: ...
        def flatten_keys(  # type: ignore[override]
            self, separator: str = ..., inplace: bool = ..., is_leaf: object = ...
        ) -> TensorDict: ...
        def unflatten_keys(self, separator: str = ..., inplace: bool = ...) -> TensorDict: ...  # type: ignore[override]
        def reshape(self, *args: object, **options: object) -> TensorDict: ...  # type: ignore[override]
        def view(self, *shape: object, size: object = ..., batch_size: object = ...) -> TensorDict: ...  # type: ignore[override]
        def permute(self, *args: object, dims: object = ...) -> TensorDict: ...  # type: ignore[override]
        def squeeze(self, dim: int | tuple[int, ...] | None = ...) -> TensorDict: ...  # type: ignore[override]
        def unsqueeze(self, dim: int) -> TensorDict: ...  # type: ignore[override]

else:
    GivesTensorDicts = TensorDictBase
