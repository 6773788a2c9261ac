"""The fields of a tensorclass: what a class body declares, and the constructor that is written for it."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from tensordict.core.annotations import is_any_of, kinds_of, resolve, scope_of
from tensordict.core.contract import Contract
from tensordict.core.exceptions import FieldError, suggest

OPTIONS = ("autocast", "frozen", "nocast", "shadow", "tensor_only")
# The arguments of every tensorclass besides its fields.
_OWN_ARGUMENTS = {
    name: inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=False if name == "lock" else None, annotation=kind
    )
    for name, kind in {
        "batch_size": Sequence[int] | int | None,
        "device": torch.device | str | int | None,
        "names": Sequence[str | None] | None,
        "non_blocking": bool | None,
        "lock": bool,
    }.items()
}
# The default of an argument that must be given, which signatures show as none, and of one that a function makes. Both
# are classes, since `torch.compile` knows these.
NOT_GIVEN = inspect.Parameter.empty


class _ToBeMade:
    """Stands for what a `default_factory` makes."""


class _ToBeRead:
    """Stands for a tensor, which `torch.compile` takes as an attribute of the class only."""


# `data` is too common a name for what a class holds: such a field stands in the place of the container's attribute.
_ALLOWED = frozenset({"data"})


@dataclass(slots=True)
class FieldTable:
    """What a tensorclass knows of its fields.

    owner: the class name, for errors.
    names: those of the fields, in order.
    taken: all that there are values of: the fields, and the arguments that only `__post_init__` sees.
    required: those of them without default.
    positional: the arguments that can be given by position.
    defaults: the fields with a default that is not `None`, with that or the function that makes it.
    fixed: the fields that are no arguments.
    masked: the container's own arguments that are fields here.
    hints: the annotations as written; `scope` holds the names that they may use.
    containers: the fields of a `tensor_only` class that may hold a container.
    resolved: the annotations themselves, each from when it is first needed.
    constructor: the function that takes the fields as its arguments.
    """

    owner: str
    names: dict[str, None]
    taken: frozenset[str]
    required: frozenset[str]
    positional: tuple[str, ...]
    defaults: list[tuple[str, Any, Callable[[], Any] | None]]
    fixed: frozenset[str]
    masked: tuple[str, ...]
    hints: dict[str, Any]
    scope: Mapping[str, Any]
    resolved: dict[str, Any] = field(default_factory=dict)
    containers: frozenset[str] = frozenset()
    constructor: Any = None

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

    def missing(self, given: Mapping[str, Any]) -> TypeError:
        """The error of a constructor that lacks some of the values that it is given."""
        missing = listed(name for name, value in given.items() if value is NOT_GIVEN)
        return TypeError(f"{self.owner}() is missing {missing}, which has no default")

    def refused(self, more: tuple[Any, ...], unknown: Mapping[str, Any]) -> TypeError:
        """The error of a constructor that is given what it does not take, by position or by name."""
        if unknown:
            if fixed := self.fixed & unknown.keys():
                return FieldError(f"{self.owner}() got {listed(fixed)}, which __init__ does not take (init=False)")
            return FieldError(f"{self.owner}() got {listed(unknown)}, {self.known()}{self.meant(unknown)}")
        count = len(self.positional)
        return TypeError(
            f"{self.owner}() takes {count} fields by position ({', '.join(self.positional)}), got {count + len(more)} "
            "arguments; batch_size and its like are given by name"
        )

    def known(self, name: str = "") -> str:
        """What errors say about the fields there are, and which of them is like `name`."""
        return f"which is no field of {self.owner}; its fields are {listed(self.names)}{suggest(name, self.names)}"

    def meant(self, names: Iterable[str]) -> str:
        """What errors say about names that are like one that a constructor takes."""
        return "".join(suggest(name, self.taken.union(_OWN_ARGUMENTS)) for name in names)

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
        # Python finds the parameter of a keyword by the identity of its name, else by comparing all names: 0.5 or 2 us
        # for the 20 fields of a class that is made at run time.
        sys.intern(name)
        if name not in cls.__dict__ and hasattr(cls, name):
            # Or the dataclass would take the property of an inherited field, or a method, for the default.
            setattr(cls, name, dataclasses.field())
    has_init = "__init__" in cls.__dict__
    # A class without fields of its own has the constructor that it inherits, unless that was written for others.
    generated = None if cls._layout is None else cls._layout.constructor
    inherits = not has_init and not own and cls.__init__ is not generated
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
    layout = FieldTable(
        cls.__name__,
        names,
        frozenset(specs),
        frozenset(name for name, f in specs.items() if f.init and _default(f) is NOT_GIVEN),
        tuple(name for name, f in specs.items() if f.init and not f.kw_only),
        [(f.name, *made) for f in fields if (made := _made(f)) != (None, None)],
        frozenset(name for name, f in specs.items() if not f.init),
        tuple(name for name in names if name in _OWN_ARGUMENTS),
        {f.name: f.type for f in fields},
        scope_of(cls, [f.type for f in fields]),
    )
    layout.constructor = _constructor(cls, base, layout, specs)
    if has_init:
        _complete_constructor(cls, layout)
    elif not inherits:
        _adopt_constructor(cls, layout)
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


def _made(f: dataclasses.Field[Any]) -> tuple[Any, Callable[[], Any] | None]:
    """The default of a field, `None` where it has none, and the function that makes it."""
    value = None if f.default is MISSING else f.default
    return value, None if f.default_factory is MISSING else f.default_factory


def _default(f: dataclasses.Field[Any]) -> Any:
    """The default of the parameter that a field is."""
    if f.default_factory is not MISSING:
        return _ToBeMade
    if isinstance(f.default, Tensor):
        return _ToBeRead
    return NOT_GIVEN if f.default is MISSING else f.default


def _constructor(
    cls: type[Any], base: type[Any], layout: FieldTable, specs: Mapping[str, dataclasses.Field[Any]]
) -> Any:
    """The function that takes the fields of a class as its arguments, written as `dataclasses` writes its own.

    Python binds the arguments; what is done with them is written once for all classes, in `TensorClass._store_fields`.
    """
    own = [name for name in _OWN_ARGUMENTS if name not in layout.masked]
    keywords = [name for name, f in specs.items() if f.init and f.kw_only]
    parameters = ["__self", *(f"{name}=None" for name in layout.positional), "*__more"]
    parameters += [*(f"{name}=None" for name in (*keywords, *own)), "**__unknown"]
    # No more than functions and classes: `torch.compile` traces these wherever they come from.
    scope: dict[str, Any] = {"__class": cls, "__construct": base._store_fields}
    scope.update({"__not_given": NOT_GIVEN, "__made": _ToBeMade, "__read": _ToBeRead})
    # Each constructor reads the defaults of its own class, also for an instance of a subclass.
    kept: dict[str, Any] = {}
    for parent in reversed(cls.__mro__):
        kept.update(vars(parent).get("_tensor_defaults", {}))
    cls._tensor_defaults = kept
    lines = [
        f"def __init__({', '.join(parameters)}):",
        "if __more or __unknown: raise __class._layout.refused(__more, __unknown)",
    ]
    if required := [name for name in specs if name in layout.required]:
        absent = " or ".join(f"{name} is __not_given" for name in required)
        lines.append(f"if {absent}: raise __class._layout.missing({_dict(required)})")
    for name, f in specs.items():
        fixed, make = _made(f)
        if make is not None:
            scope[f"__make_{name}"] = make
            lines.append(f"{f'if {name} is __made: ' if f.init else ''}{name} = __make_{name}()")
        elif _default(f) is _ToBeRead:
            kept[key := f"{cls.__module__}.{cls.__qualname__}.{name}"] = f.default
            lines.append(f"{f'if {name} is __read: ' if f.init else ''}{name} = type(__self)._tensor_defaults[{key!r}]")
        elif not f.init:
            scope[f"__fixed_{name}"] = fixed
            lines.append(f"{name} = __fixed_{name}")
    given = [name if name in own else "None" for name in _OWN_ARGUMENTS]
    lines.append(f"__construct(__self, {_dict(layout.names)}, {', '.join(given[:4])})")
    if cls._has_post_init:
        lines.append(f"__self.__post_init__({', '.join(name for name in specs if name not in layout.names)})")
    lines.append(f"if {cls._frozen or given[4]}: __self._tensordict._lock_tree()")
    text = f"def make({', '.join(scope)}):\n  " + "\n    ".join(lines) + "\n  return __init__"
    module = sys.modules.get(cls.__module__)
    made: dict[str, Any] = {}
    exec(text, {} if module is None else vars(module), made)
    function = made["make"](**scope)
    function.__qualname__ = f"{cls.__qualname__}.__init__"
    function.__defaults__ = tuple(_default(specs[name]) for name in layout.positional)
    function.__kwdefaults__ = {name: _default(specs[name]) for name in keywords} | {
        name: _OWN_ARGUMENTS[name].default for name in own
    }
    return function


def _dict(names: Iterable[str]) -> str:
    """A dict of the variables of these names, as Python writes it."""
    return "{" + ", ".join(f"{name!r}: {name}" for name in names) + "}"


def _adopt_constructor(cls: type[Any], layout: FieldTable) -> None:
    """Put the constructor of a tensorclass in the place of the dataclass's, with the signature of that one and more."""
    this, *shown = inspect.signature(cls.__init__).parameters.values()
    shown += [parameter for name, parameter in _OWN_ARGUMENTS.items() if name not in layout.masked]
    cls.__init__ = layout.constructor
    cls.__init__.__signature__ = inspect.Signature([this, *shown], return_annotation=None)
    cls.__init__.__annotations__ = {p.name: p.annotation for p in shown if p.annotation is not p.empty}
    cls.__signature__ = inspect.Signature(shown)


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

    shown += [parameter for name, parameter in _OWN_ARGUMENTS.items() if name in added]
    __init__.__signature__ = inspect.Signature([this, *shown])  # type: ignore[attr-defined]
    cls.__signature__ = inspect.Signature(shown)
    cls.__init__ = __init__


def listed(names: Iterable[str]) -> str:
    """Names as errors give them."""
    return ", ".join(map(repr, sorted(names)))
