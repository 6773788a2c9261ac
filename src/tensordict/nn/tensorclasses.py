"""Modules from one tensorclass to another, and their conversion to modules that read and write containers."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar, get_args, get_origin

from torch import nn

from tensordict.containers.tensor_class import is_tensorclass
from tensordict.core.annotations import UNION
from tensordict.core.keys import Key, path_of
from tensordict.nn.dispatch import dispatch
from tensordict.nn.module import TensorDictModuleBase
from tensordict.ops.collection import TensorCollection

In = TypeVar("In")
Out = TypeVar("Out")


class TensorClassModuleBase(Generic[In, Out], ABC, nn.Module):
    """The base class of modules that take an instance of one class and return an instance of another.

    `TensorClassModuleBase[In, Out]` declares the classes: tensorclasses, or `torch.Tensor`. They are stored as
    `input_type` and `output_type`, and type checkers use them for calls. A call does not check them.

    Example:
        >>> import torch
        >>> from tensordict import TensorClass, TensorDict
        >>> from tensordict.nn import TensorClassModuleBase
        >>> class Pair(TensorClass):
        ...     a: torch.Tensor
        ...     b: torch.Tensor
        >>> class Sum(TensorClass):
        ...     total: torch.Tensor
        >>> class Add(TensorClassModuleBase[Pair, Sum]):
        ...     def forward(self, x: Pair) -> Sum:
        ...         return Sum(x.a + x.b, batch_size=x.batch_size)
        >>> Add()(Pair(torch.ones(2), torch.ones(2), batch_size=[2])).total
        tensor([2., 2.])
        >>> Add().as_td_module()(TensorDict(a=torch.ones(2), b=torch.ones(2)))["total"]
        tensor([2., 2.])
    """

    input_type: type[In]
    output_type: type[Out]

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        for base in cls.__dict__.get("__orig_bases__", ()):
            origin = get_origin(base)
            if isinstance(origin, type) and issubclass(origin, TensorClassModuleBase):
                kinds: Any = get_args(base)
                if origin is not TensorClassModuleBase:
                    # The base is a generic subclass with its own type variables: replace them by its arguments.
                    given = dict(zip(origin.__parameters__, kinds))  # type: ignore[attr-defined]
                    kinds = [given.get(kind, kind) for kind in (origin.input_type, origin.output_type)]
                cls.input_type, cls.output_type = kinds

    def __call__(self, x: In) -> Out:
        """Run the module, and its hooks, on an instance of `input_type`."""
        return super().__call__(x)  # type: ignore[no-any-return]

    @abstractmethod
    def forward(self, x: In) -> Out:
        """Compute the result.

        Args:
            x: an instance of `input_type`.

        Returns:
            An instance of `output_type`.
        """

    def as_td_module(self) -> TensorClassModuleWrapper:
        """Convert this module to one that reads and writes containers.

        Raises:
            ValueError: `input_type` or `output_type` is not a tensorclass.
        """
        return TensorClassModuleWrapper(self)


class TensorClassModuleWrapper(TensorDictModuleBase):
    """A module from one tensorclass to another, as a module that reads and writes containers.

    Its in-keys are the fields of the input class, its out-keys the fields of the output class. Fields of a nested
    tensorclass become nested keys. A field with a default may be missing.

    Args:
        module: the module, stored as `tc_module`.

    Raises:
        TypeError: `module` is not a :class:`TensorClassModuleBase`; or, when called, its result is not an instance of
            its `output_type`.
        ValueError: its `input_type` or `output_type` is not a tensorclass.
        KeyError: (when called) an entry is missing.

    Example:
        >>> import torch
        >>> from tensordict import TensorClass, TensorDict
        >>> from tensordict.nn import TensorClassModuleBase
        >>> class Point(TensorClass):
        ...     x: torch.Tensor
        >>> class Double(TensorClassModuleBase[Point, Point]):
        ...     def forward(self, point: Point) -> Point:
        ...         return point * 2
        >>> double = Double().as_td_module()
        >>> double.in_keys, double(x=torch.tensor(3)), double(TensorDict(x=torch.tensor(3), y=torch.tensor(0)))["x"]
        (['x'], tensor(6), tensor(6))
    """

    def __init__(self, module: TensorClassModuleBase[Any, Any]) -> None:
        super().__init__()
        if not isinstance(module, TensorClassModuleBase):
            raise TypeError(f"TensorClassModuleWrapper wraps a TensorClassModuleBase, got {type(module).__name__}")
        for name in ("input_type", "output_type"):
            kind = getattr(module, name, None)
            if not isinstance(kind, type) or not is_tensorclass(kind):
                raise ValueError(
                    f"the {name} of {type(module).__name__} must be a tensorclass for it to read and write containers, "
                    f"got {kind!r}: derive it from TensorClassModuleBase[In, Out]"
                )
        self.in_keys = _list_field_keys(module.input_type)
        self.out_keys = _list_field_keys(module.output_type)
        self.tc_module = module

    @dispatch(auto_batch_size=False)
    def forward(self, tensordict: Any, *args: object, tensordict_out: Any = None, **kwargs: object) -> Any:
        """Run the module.

        Args:
            tensordict: a container with the in-keys, or an instance of `input_type`; or (by :class:`dispatch`) the
                entries at the in-keys. It is not changed.
            *args, **kwargs: ignored with a `FutureWarning`.
            tensordict_out: a container to write the results into, and to return.

        Returns:
            A new container that has only the out-keys, or `tensordict_out`.
        """
        if kwargs or any(arg is not None for arg in args):
            warnings.warn(
                f"{type(self.tc_module).__name__} takes one container; further arguments are ignored", FutureWarning, 2
            )
        module = self.tc_module
        kind = module.input_type
        x = tensordict if type(tensordict) is kind else self._instance(kind, tensordict, ())
        result = module(x)
        if not isinstance(result, module.output_type):
            raise TypeError(
                f"{type(module).__name__} returned a {type(result).__name__}, but its output_type is "
                f"{module.output_type.__name__}"
            )
        copy = _unwrap_copy(result)
        return copy if tensordict_out is None else tensordict_out.update(copy)

    def _instance(self, kind: Any, container: TensorCollection, path: tuple[str, ...]) -> Any:
        """Make an instance of a tensorclass over a shallow copy of the entries that are fields."""
        container = container._wrapped_container().select(*kind._layout.names, strict=False)
        present = container.keys()
        defaults = {
            name: value if make is None else make()
            for name, value, make in kind._layout.defaults
            if name not in present
        }
        for name in kind._layout.names:
            if name not in present and name in kind._layout.required:
                key = (*path, name) if path else name
                raise KeyError(
                    f"{type(self.tc_module).__name__} reads {key!r}, a field of {kind.__name__}, not found in the "
                    f"container, which has the keys {list(container.keys(True, True))} of its fields"
                )
            field, node = _find_tensorclass(kind._layout.hint_of(name)), container._node(name)
            if node is not None and field is not None and type(node) is not field:
                container.set(name, self._instance(field, node, (*path, name)))
        return kind.from_tensordict(container, defaults)


def _list_field_keys(kind: Any) -> list[Key]:
    """Return the keys of the fields of a tensorclass."""
    keys: list[Key] = []
    for name in kind._layout.names:
        hint = kind._layout.hint_of(name)
        if _find_tensorclass(hint) is hint:
            keys += [(name, *path_of(key)) for key in _list_field_keys(hint)]
        else:
            keys.append(name)
    return keys


def _find_tensorclass(hint: object) -> Any:
    """Return the tensorclass in an annotation, alone or together with `None`; `None` for other annotations."""
    kinds = get_args(hint) if get_origin(hint) in UNION else (hint,)
    found = [kind for kind in kinds if isinstance(kind, type) and is_tensorclass(kind)]
    return found[0] if len(found) == 1 else None


def _unwrap_copy(container: TensorCollection) -> TensorCollection:
    """Return a shallow copy of the container inside a tensorclass; nested tensorclasses are unwrapped, too."""
    container = container._wrapped_container().copy()
    for name, node in container._structure().items():
        if isinstance(node, TensorCollection) and not node._is_non_tensor:
            container.set(name, _unwrap_copy(node))
    return container
