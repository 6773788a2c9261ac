"""`TensorCollection`, the base class of all containers, which combines the mixins of operations in `ops/`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

from tensordict.core import registry
from tensordict.core.context import BlockContext
from tensordict.ops.applying import Applying
from tensordict.ops.casting import Casting
from tensordict.ops.client_members import ClientMembers
from tensordict.ops.communicating import Communicating
from tensordict.ops.dims.gathering import Gathering
from tensordict.ops.dims.indexing import Indexing
from tensordict.ops.dims.naming import Naming
from tensordict.ops.dims.packing import Packing
from tensordict.ops.dims.padding import Padding
from tensordict.ops.dims.rows import RowChoice
from tensordict.ops.dims.shape import Shape
from tensordict.ops.dims.stacking import Stacking
from tensordict.ops.entries.adding import Adding
from tensordict.ops.entries.copying import Copying
from tensordict.ops.entries.factories import Factories
from tensordict.ops.entries.nontensor_entries import Values
from tensordict.ops.entries.restructuring import Structure
from tensordict.ops.foreign import Foreign
from tensordict.ops.mapping import Mapping
from tensordict.ops.math import torch_functions
from tensordict.ops.math.arithmetic import Arithmetic
from tensordict.ops.math.autograd import Autograd
from tensordict.ops.math.comparison import Comparison
from tensordict.ops.math.pointwise import Pointwise
from tensordict.ops.math.reducing import Reducing
from tensordict.ops.modules import Modules
from tensordict.ops.plotting import Plotting
from tensordict.ops.printing import Printing
from tensordict.ops.storing.checkpointing import Checkpointing
from tensordict.ops.storing.consolidating import Consolidating
from tensordict.ops.storing.describing import Describing
from tensordict.ops.storing.persisting import Persisting
from tensordict.ops.storing.saving import Saving
from tensordict.ops.storing.schemas import Schemas
from tensordict.ops.storing.sharing import Sharing
from tensordict.ops.storing.table_files import TableFiles

if TYPE_CHECKING:
    from torch import nn
    from typing_extensions import Unpack

    from tensordict.containers.dense import TensorDict
    from tensordict.containers.lazy import LazyStackedTensorDict
    from tensordict.containers.summary import Summary
    from tensordict.containers.tensordict_base import TensorDictBase
    from tensordict.containers.tensordict_store import TensorDictStore
    from tensordict.core.annotations import No, On
    from tensordict.core.contract import Contract
    from tensordict.nn.params import TensorDictParams
    from tensordict.ops.modules import _FromModules

    _Container = TypeVar("_Container", bound=Contract)


class TensorCollection(
    ClientMembers,
    Gathering,
    RowChoice,
    Indexing,
    Structure,
    Applying,
    Stacking,
    Padding,
    Packing,
    Shape,
    Factories,
    Schemas,
    Casting,
    Comparison,
    Pointwise,
    Arithmetic,
    Reducing,
    Autograd,
    Describing,
    Communicating,
    Copying,
    Sharing,
    Mapping,
    Consolidating,
    Foreign,
    Saving,
    Adding,
    TableFiles,
    Persisting,
    Checkpointing,
    Values,
    Modules,
    Plotting,
    Naming,
    Printing,
    BlockContext,
):
    """A container of tensors that behaves like one tensor along its batch dims.

    Every public method comes from one of the mixins above. It is implemented once, on the primitives of `Contract`
    (`core/contract.py`), which each container supplies.
    """

    if TYPE_CHECKING:
        # Methods that return another class than the container. The mixins are below these classes and cannot name them.
        def to_tensordict(self, *, retain_none: bool | None = None) -> TensorDict: ...
        def data_ptr(self, *, storage: bool = False) -> TensorDictBase: ...
        def describe(self, percentiles: Sequence[float] = ...) -> Summary: ...
        def to_store(
            self,
            *,
            backend: str = "redis",
            host: str = "localhost",
            port: int = 6379,
            db: int = 0,
            unix_socket_path: str | None = None,
            prefix: str = "tensordict",
            device: Any = None,
            **kwargs: Any,
        ) -> TensorDictStore: ...
        @overload
        @classmethod
        def lazy_stack(
            cls, input: Iterable[TensorDictBase], dim: int = ..., *, out: Any = ..., **kwargs: Any
        ) -> LazyStackedTensorDict: ...
        @overload
        @classmethod
        def lazy_stack(
            cls, input: Iterable[_Container], dim: int = ..., *, out: Any = ..., **kwargs: Any
        ) -> _Container: ...
        @classmethod
        def lazy_stack(cls, input: Iterable[Any], dim: int = 0, *, out: Any = None, **kwargs: Any) -> Any: ...
        @overload  # type: ignore[override]
        @classmethod
        def maybe_dense_stack(
            cls, input: Iterable[TensorDictBase], dim: int = ..., out: Any = ..., **kwargs: Any
        ) -> TensorDictBase: ...
        @overload
        @classmethod
        def maybe_dense_stack(
            cls, input: Iterable[_Container], dim: int = ..., out: Any = ..., **kwargs: Any
        ) -> _Container: ...
        @classmethod
        def maybe_dense_stack(cls, input: Iterable[Any], dim: int = 0, out: Any = None, **kwargs: Any) -> Any: ...
        @overload  # type: ignore[override]
        @classmethod
        def from_module(
            cls,
            module: nn.Module,
            as_module: No = ...,
            lock: bool = ...,
            use_state_dict: bool = ...,
            filter_empty: bool = ...,
        ) -> TensorDict: ...
        @overload
        @classmethod
        def from_module(
            cls,
            module: nn.Module,
            as_module: On,
            lock: bool = ...,
            use_state_dict: bool = ...,
            filter_empty: bool = ...,
        ) -> TensorDictParams: ...
        @classmethod
        def from_module(cls, module: nn.Module, *args: Any, **kwargs: Any) -> Any: ...
        @overload  # type: ignore[override]
        @classmethod
        def from_modules(
            cls, *modules: nn.Module, as_module: On, lazy_stack: bool = ..., **options: Unpack[_FromModules]
        ) -> TensorDictParams: ...
        @overload
        @classmethod
        def from_modules(
            cls, *modules: nn.Module, as_module: No = ..., lazy_stack: On, **options: Unpack[_FromModules]
        ) -> LazyStackedTensorDict: ...
        @overload
        @classmethod
        def from_modules(
            cls, *modules: nn.Module, as_module: No = ..., lazy_stack: No = ..., **options: Unpack[_FromModules]
        ) -> TensorDict: ...
        @classmethod
        def from_modules(cls, *modules: nn.Module, **options: Any) -> Any: ...

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: object = None
    ) -> Any:
        """Run a function of torch on containers; see `ops/math/torch_functions.py` for the table."""
        return torch_functions.call(func, types, args, kwargs)


# Attributes that every class has itself and that must not be copied to another class.
_OWN_ATTRIBUTES = frozenset(
    ("__module__", "__dict__", "__weakref__", "__doc__", "__annotations__", "__firstlineno__", "__static_attributes__")
)


def _flatten_mro(cls: type) -> None:
    """Copy all inherited attributes into the namespace of a class.

    At each call of a method, compiled code checks all classes of the MRO before the class that defines it. With thirty
    mixins, these checks were a third of the guards of `td * 2 + 1`.
    """
    for family in cls.__mro__[1:-1]:
        for name, value in vars(family).items():
            if name not in _OWN_ATTRIBUTES and name not in vars(cls):
                setattr(cls, name, value)


_flatten_mro(TensorCollection)
registry.speak_for(TensorCollection, TensorCollection.__mro__[1:-1])
