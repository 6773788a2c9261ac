"""The fields of a tensorclass: what a class body declares, how arguments are bound to it, how values are cast."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field
from functools import wraps
from typing import Any

from torch import Tensor

from tensordict.core import errors
from tensordict.core.annotations import is_any_of, kinds_of, resolve, scope_of
from tensordict.core.contract import Contract
from tensordict.core.errors import FieldError

OPTIONS = ("autocast", "frozen", "nocast", "shadow", "tensor_only")
# The arguments of every tensorclass besides its fields.
_OWN_ARGUMENTS = ("batch_size", "device", "names", "non_blocking", "lock")
# `data` is too common a name for what a class holds: such a field stands in the place of the container's attribute.
_ALLOWED = frozenset({"data"})


@dataclass(slots=True)
class FieldTable:
    """What a tensorclass knows of its fields.

    owner: the class name, for errors.
    names: those of the fields, in order.
    taken: all that there are values of: the fields, and `extras`.
    required: those of them without default.
    positional: the arguments that can be given by position.
    defaults: the values of arguments that are not given, or the functions that make them; a field without is `None`.
    extras: the arguments that only `__post_init__` sees.
    fixed: the fields that are no arguments.
    masked: the container's own arguments that are fields here.
    hints: the annotations as written; `scope` holds the names that they may use.
    containers: the fields of a `tensor_only` class that may hold a container.
    resolved: the annotations themselves, each from when it is first needed.
    """

    owner: str
    names: dict[str, None]
    taken: frozenset[str]
    required: frozenset[str]
    positional: tuple[str, ...]
    defaults: list[tuple[str, Any, Callable[[], Any] | None]]
    extras: tuple[str, ...]
    fixed: frozenset[str]
    masked: tuple[str, ...]
    hints: dict[str, Any]
    scope: Mapping[str, Any]
    resolved: dict[str, Any] = field(default_factory=dict)
    containers: frozenset[str] = frozenset()

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        """What of a class of a script is pickled, when that is done by value (cloudpickle, and so Ray).

        All annotations are resolved then. The names that they may use, all that the script has, stay behind.
        """
        for name in self.names:
            # An annotation that cannot be found here is not found there either, and an error only when it is needed.
            with contextlib.suppress(TypeError):
                self.hint_of(name)
        state = {name: getattr(self, name) for name in self.__slots__}
        return None, {**state, "scope": {}}

    def bind(self, args: tuple[Any, ...], values: dict[str, Any]) -> dict[str, Any]:
        """The values of fields, and of `extras`, for the arguments given by position and (as a dict) by name.

        A field that it has no value of is `None`.

        Raises:
            TypeError: a field is missing, unknown or given twice; class and field are named.
        """
        if args:
            values = self._with_positions(args, values)
        if self.fixed and (refused := self.fixed & values.keys()):
            raise FieldError(f"{self.owner}() got {listed(refused)}, which __init__ does not take (init=False)")
        for name, value, make in self.defaults:
            if name not in values:
                values[name] = value if make is None else make()
        if not self.required <= values.keys() <= self.taken:
            if unknown := values.keys() - self.taken:
                raise FieldError(f"{self.owner}() got {listed(unknown)}, {self.known()}{self.meant(unknown)}")
            raise TypeError(f"{self.owner}() is missing {listed(self.required - values.keys())}, which has no default")
        return values

    def _with_positions(self, args: tuple[Any, ...], values: dict[str, Any]) -> dict[str, Any]:
        if len(args) > len(self.positional):
            raise TypeError(
                f"{self.owner}() takes {len(self.positional)} fields by position ({', '.join(self.positional)}), got "
                f"{len(args)} arguments; batch_size and its like are given by name"
            )
        given = dict(zip(self.positional, args))
        if values:
            if twice := given.keys() & values.keys():
                raise TypeError(f"{self.owner}() got {listed(twice)} by position and by name")
            given.update(values)
        return given

    def known(self, name: str = "") -> str:
        """What errors say about the fields there are, and which of them is like `name`."""
        return f"which is no field of {self.owner}; its fields are {listed(self.names)}{errors.meant(name, self.names)}"

    def meant(self, names: Iterable[str]) -> str:
        """What errors say about names that are like one that a constructor takes."""
        return "".join(errors.meant(name, self.taken.union(_OWN_ARGUMENTS)) for name in names)

    def hint_of(self, name: str) -> Any:
        """The resolved annotation of a field.

        Raises:
            TypeError: it names what cannot be found.
        """
        if name not in self.resolved:
            self.resolved[name] = resolve(self.hints[name], self.scope, f"{self.owner}.{name}")
        return self.resolved[name]


def layout_of(cls: type[Any], base: type[Any]) -> FieldTable:
    """Make a dataclass of `cls` in place, and describe its fields; `base` has the methods that none may hide.

    Raises:
        AttributeError: a field would hide a method and the class has no `shadow`.
        TypeError: a field without default follows one with, or the class is `tensor_only` and a field neither a tensor
            nor a container.
    """
    own = inspect.get_annotations(cls)
    for name in own:
        if name not in cls.__dict__ and hasattr(cls, name):
            # Or the dataclass would take the property of an inherited field, or a method, for the default.
            setattr(cls, name, dataclasses.field())
    has_init = "__init__" in cls.__dict__
    # A class without fields of its own has the constructor that it inherits.
    inherits = not has_init and not own and cls.__init__ is not base.__init__
    dataclasses.dataclass(init=not (has_init or inherits), repr=False, eq=False)(cls)
    fields = dataclasses.fields(cls)
    if not cls._shadow:
        for f in fields:
            if (hasattr(base, f.name) and f.name not in _ALLOWED) or f.name in _OWN_ARGUMENTS:
                raise FieldError(
                    f"the field {f.name!r} of {cls.__name__} would hide the attribute of that name that every "
                    'tensorclass has: rename it, or allow it with @tensorclass(shadow=True) or TensorClass["shadow"]'
                )
    specs = {name: f for name, f in cls.__dataclass_fields__.items() if f._field_type.name != "_FIELD_CLASSVAR"}
    names = dict.fromkeys(f.name for f in fields)
    defaults = {
        name: (None if f.default is MISSING else f.default, None if f.default_factory is MISSING else f.default_factory)
        for name, f in specs.items()
        if f.default is not MISSING or f.default_factory is not MISSING or not f.init
    }
    layout = FieldTable(
        cls.__name__,
        names,
        frozenset(specs),
        frozenset(specs).difference(defaults),
        tuple(name for name, f in specs.items() if f.init and not f.kw_only),
        [(name, *made) for name, made in defaults.items() if made != (None, None) or name not in names],
        tuple(name for name in specs if name not in names),
        frozenset(name for name, f in specs.items() if not f.init),
        tuple(name for name in names if name in _OWN_ARGUMENTS),
        {f.name: f.type for f in fields},
        scope_of(cls, [f.type for f in fields]),
    )
    if has_init:
        _complete_constructor(cls, layout)
    elif not inherits:
        _adopt_constructor(cls, base, layout)
    if cls._tensor_only:
        layout.containers = _container_fields(layout)
    return layout


def _container_fields(layout: FieldTable) -> frozenset[str]:
    """The fields that may hold a container; all others are known to be tensors, or `None`."""
    found = set()
    for name in layout.names:
        try:
            kinds = kinds_of(layout.hint_of(name))
        except TypeError:
            # It names a class that is not there yet.
            found.add(name)
            continue
        if not all(is_any_of(kind, (Tensor, Contract, type(None))) for kind in kinds):
            raise TypeError(
                f"{layout.owner} is tensor_only, but its field {name!r} is annotated {layout.hints[name]!r}: "
                "annotate it as torch.Tensor or TensorDict, or as one of them or None"
            )
        if any(is_any_of(kind, (Contract,)) for kind in kinds):
            found.add(name)
    return frozenset(found)


def _adopt_constructor(cls: type[Any], base: type[Any], layout: FieldTable) -> None:
    """Put the constructor of all tensorclasses in the place of the dataclass's, whose signature it is shown with."""
    shown = list(inspect.signature(cls.__init__).parameters.values())[1:]
    own = inspect.signature(base.__init__).parameters
    shown += [own[name] for name in _OWN_ARGUMENTS if name not in layout.masked]
    cls.__signature__ = inspect.Signature(shown)
    cls.__init__ = base.__init__


def _complete_constructor(cls: type[Any], layout: FieldTable) -> None:
    """Have the constructor that a class defines take the arguments of every tensorclass, too.

    One that hands its keywords on, as in `super().__init__(**kwargs)`, takes them already.
    """
    own = cls.__init__
    this, *shown = inspect.signature(own).parameters.values()
    cls.__signature__ = inspect.Signature(shown)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in shown):
        return
    taken = {parameter.name for parameter in shown}.union(layout.masked, ["non_blocking"])
    added = frozenset(_OWN_ARGUMENTS) - taken

    @wraps(own)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        given = {name: kwargs.pop(name) for name in added if name in kwargs} if kwargs else None
        if not given:
            own(self, *args, **kwargs)
            return
        lock = given.pop("lock", False)
        begun = self._begin(**given) if given else None
        own(self, *args, **kwargs)
        if begun is not None and self._tensordict is not begun:
            raise TypeError(
                f"{cls.__name__}() got {listed(given)}, but its own __init__ calls super().__init__() without: have it "
                "take them, or **kwargs, and hand them on"
            )
        if lock:
            self._tensordict._lock_tree()

    shown += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False if name == "lock" else None)
        for name in _OWN_ARGUMENTS
        if name in added
    ]
    __init__.__signature__ = inspect.Signature([this, *shown])  # type: ignore[attr-defined]
    cls.__signature__ = inspect.Signature(shown)
    cls.__init__ = __init__


def listed(names: Iterable[str]) -> str:
    """Names as errors give them."""
    return ", ".join(map(repr, sorted(names)))
