"""The field table of a tensorclass and its generated constructor, for `TensorClass.__init_subclass__`."""

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
from tensordict.ops.dims.rows import LATER_METHODS

OPTIONS = ("autocast", "frozen", "nocast", "shadow", "skip_post_init_on_rebuild", "tensor_only")
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
# The default of an argument that must be given. Signatures show such an argument without default. This and the two
# defaults below are classes, because `torch.compile` can trace classes in default arguments.
NOT_GIVEN = inspect.Parameter.empty


class _FactoryDefault:
    """The default of an argument whose value a `default_factory` makes."""


class _TensorDefault:
    """The default of an argument whose default is a tensor. `torch.compile` needs it as an attribute of the class."""


# Names of fields that may hide an attribute of the container. `data` is too common a field name to refuse.
_ALLOWED = LATER_METHODS | {"data"}


@dataclass(slots=True)
class FieldTable:
    """The fields of a tensorclass.

    owner: the class name, for errors.
    names: the names of the fields, in order.
    accepted: the names of the fields and of the arguments that only `__post_init__` gets (`InitVar`).
    required: the arguments without default.
    positional: the arguments that can be given by position.
    defaults: the fields with a default other than `None`, each with its default and its `default_factory`.
    fixed: the fields that are not arguments (`init=False`).
    masked: the arguments of every tensorclass (such as `device`) that are fields here.
    hints: the annotations as written. `scope` holds the names that they may use.
    containers: the fields of a `tensor_only` class that may hold a container.
    resolved: the evaluated annotations, each added when it is first needed.
    constructor: the generated `__init__`.
    """

    owner: str
    names: dict[str, None]
    accepted: frozenset[str]
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
        """Return the state for pickling a class by value, as cloudpickle and Ray do for a class of a script.

        Evaluates all annotations, so that the pickle need not contain their scope: all globals of the script.
        """
        for name in self.names:
            # An annotation that cannot be evaluated raises later, when it is needed.
            with contextlib.suppress(TypeError):
                self.hint_of(name)
        state = {name: getattr(self, name) for name in self.__slots__}
        return None, {**state, "scope": {}}

    def missing_arguments_error(self, given: Mapping[str, Any]) -> TypeError:
        """Return the error for a constructor call without a required argument."""
        missing = quote_names(name for name, value in given.items() if value is NOT_GIVEN)
        return TypeError(f"{self.owner}() is missing {missing}, which has no default")

    def bad_arguments_error(self, more: tuple[Any, ...], unknown: Mapping[str, Any]) -> TypeError:
        """Return the error for a constructor call with too many positional arguments or an unknown keyword."""
        if unknown:
            if fixed := self.fixed & unknown.keys():
                return FieldError(f"{self.owner}() got {quote_names(fixed)}, which __init__ does not take (init=False)")
            hint = f"{self.describe_fields()}{self.suggest_arguments(unknown)}"
            return FieldError(f"{self.owner}() got {quote_names(unknown)}, {hint}")
        count = len(self.positional)
        return TypeError(
            f"{self.owner}() takes {count} fields by position ({', '.join(self.positional)}), got {count + len(more)} "
            "arguments; batch_size and its like are given by name"
        )

    def describe_fields(self, name: str = "") -> str:
        """Return the part of an error that lists the fields, and suggests one whose name is similar to `name`."""
        return f"which is no field of {self.owner}; its fields are {quote_names(self.names)}{suggest(name, self.names)}"

    def suggest_arguments(self, names: Iterable[str]) -> str:
        """Return the part of an error that suggests arguments with similar names."""
        return "".join(suggest(name, self.accepted.union(_OWN_ARGUMENTS)) for name in names)

    def hint_of(self, name: str) -> Any:
        """Return the evaluated annotation of a field.

        Raises:
            TypeError: the annotation uses a name that does not exist.
        """
        if name not in self.resolved:
            self.resolved[name] = resolve(self.hints[name], self.scope, f"{self.owner}.{name}")
        return self.resolved[name]

    def tensorclass_of(self, name: str) -> Any:
        """Return the tensorclass that a field is annotated with, alone or together with `None`; `None` for others."""
        with contextlib.suppress(TypeError):  # an annotation that cannot be evaluated
            kinds = [kind for kind in kinds_of(self.hint_of(name)) if kind is not type(None)]
            if len(kinds) == 1 and is_any_of(kinds[0], (Contract,)) and hasattr(kinds[0], "_layout"):
                return kinds[0]
        return None


def make_field_table(cls: type[Any], base: type[Any], kw_only: bool = False) -> FieldTable:
    """Make `cls` a dataclass in place and return its field table. No field may hide an attribute of `base`.

    With `kw_only`, the fields that `cls` itself declares are given by name only.

    Raises:
        AttributeError: a field would hide an attribute, and the class was not made with `shadow=True`.
        TypeError: a field without default follows one with a default, or a field of a `tensor_only` class is neither a
            tensor nor a container.
    """
    own = inspect.get_annotations(cls)
    for name in own:
        # Python matches keywords by identity first, which takes 0.5 us instead of 2 us for 20 fields. Names of classes
        # that are made at run time are not interned otherwise.
        sys.intern(name)
        if name not in cls.__dict__ and hasattr(cls, name):
            # Otherwise the dataclass would use an inherited property or method as the default of the field.
            setattr(cls, name, dataclasses.field())
    has_init = "__init__" in cls.__dict__
    # A class without fields of its own keeps an inherited `__init__`, unless that is a generated one.
    generated = None if cls._layout is None else cls._layout.constructor
    inherits = not has_init and not own and cls.__init__ is not generated
    has_replace = "__replace__" in cls.__dict__
    dataclasses.dataclass(init=not (has_init or inherits), repr=False, eq=False, kw_only=kw_only)(cls)
    if not has_replace and "__replace__" in cls.__dict__:
        # From Python 3.13 on, dataclasses define one that loses the batch size; see `TensorClass.__replace__`.
        del cls.__replace__
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
        frozenset(name for name, f in specs.items() if f.init and _parameter_default(f) is NOT_GIVEN),
        tuple(name for name, f in specs.items() if f.init and not f.kw_only),
        [(f.name, *made) for f in fields if (made := _split_default(f)) != (None, None)],
        frozenset(name for name, f in specs.items() if not f.init),
        tuple(name for name in names if name in _OWN_ARGUMENTS),
        {f.name: f.type for f in fields},
        scope_of(cls, [f.type for f in fields]),
    )
    layout.constructor = _write_constructor(cls, base, layout, specs)
    if has_init:
        _complete_constructor(cls, layout)
    elif not inherits:
        _adopt_constructor(cls, layout)
    if cls._tensor_only:
        layout.containers = _container_fields(layout)
    return layout


def _container_fields(layout: FieldTable) -> frozenset[str]:
    """Return the fields of a `tensor_only` class that may hold a container. All others hold a tensor or `None`."""
    found = set()
    for name in layout.names:
        try:
            kinds = kinds_of(layout.hint_of(name))
        except TypeError:
            # The annotation names a class that is not defined yet.
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


def _split_default(f: dataclasses.Field[Any]) -> tuple[Any, Callable[[], Any] | None]:
    """Return the default and the `default_factory` of a field, each `None` if the field lacks it."""
    value = None if f.default is MISSING else f.default
    return value, None if f.default_factory is MISSING else f.default_factory


def _parameter_default(f: dataclasses.Field[Any]) -> Any:
    """Return the default of the constructor argument for a field."""
    if f.default_factory is not MISSING:
        return _FactoryDefault
    if isinstance(f.default, Tensor):
        return _TensorDefault
    return NOT_GIVEN if f.default is MISSING else f.default


def _write_constructor(
    cls: type[Any], base: type[Any], layout: FieldTable, specs: Mapping[str, dataclasses.Field[Any]]
) -> Any:
    """Generate the `__init__` of a class from text, as `dataclasses` does.

    The generated function only binds the arguments. `TensorClass._store_fields` stores them, for all classes.
    """
    own = [name for name in _OWN_ARGUMENTS if name not in layout.masked]
    keywords = [name for name, f in specs.items() if f.init and f.kw_only]
    parameters = ["__self", *(f"{name}=None" for name in layout.positional), "*__more"]
    parameters += [*(f"{name}=None" for name in (*keywords, *own)), "**__unknown"]
    # Only functions and classes: `torch.compile` traces them in any scope.
    scope: dict[str, Any] = {"__class": cls, "__construct": base._store_fields}
    scope.update({"__not_given": NOT_GIVEN, "__made": _FactoryDefault, "__read": _TensorDefault})
    # The keys contain the class name, so that each constructor reads the defaults of its own class even when it runs
    # for an instance of a subclass.
    kept: dict[str, Any] = {}
    for parent in reversed(cls.__mro__):
        kept.update(vars(parent).get("_tensor_defaults", {}))
    cls._tensor_defaults = kept
    lines = [
        f"def __init__({', '.join(parameters)}):",
        "if __more or __unknown: raise __class._layout.bad_arguments_error(__more, __unknown)",
    ]
    if required := [name for name in specs if name in layout.required]:
        absent = " or ".join(f"{name} is __not_given" for name in required)
        lines.append(f"if {absent}: raise __class._layout.missing_arguments_error({_dict(required)})")
    for name, f in specs.items():
        fixed, make = _split_default(f)
        if make is not None:
            scope[f"__make_{name}"] = make
            lines.append(f"{f'if {name} is __made: ' if f.init else ''}{name} = __make_{name}()")
        elif _parameter_default(f) is _TensorDefault:
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
    function.__defaults__ = tuple(_parameter_default(specs[name]) for name in layout.positional)
    function.__kwdefaults__ = {name: _parameter_default(specs[name]) for name in keywords} | {
        name: _OWN_ARGUMENTS[name].default for name in own
    }
    return function


def _dict(names: Iterable[str]) -> str:
    """Return Python source for a dict from these names to the variables of the same names."""
    return "{" + ", ".join(f"{name!r}: {name}" for name in names) + "}"


def _adopt_constructor(cls: type[Any], layout: FieldTable) -> None:
    """Replace the `__init__` of the dataclass by the generated one, and extend its signature."""
    this, *shown = inspect.signature(cls.__init__).parameters.values()
    shown += [parameter for name, parameter in _OWN_ARGUMENTS.items() if name not in layout.masked]
    cls.__init__ = layout.constructor
    cls.__init__.__signature__ = inspect.Signature([this, *shown], return_annotation=None)
    cls.__init__.__annotations__ = {p.name: p.annotation for p in shown if p.annotation is not p.empty}
    cls.__signature__ = inspect.Signature(shown)


def _complete_constructor(cls: type[Any], layout: FieldTable) -> None:
    """Wrap the `__init__` that a class defines, so that it also accepts the arguments of every tensorclass.

    An `__init__` with `**kwargs` is left alone: it can pass them to `super().__init__`.
    """
    own = cls.__init__
    this, *shown = inspect.signature(own).parameters.values()
    cls.__signature__ = inspect.Signature(shown)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in shown):
        return
    accepted = {parameter.name for parameter in shown}.union(layout.masked, ["non_blocking"])
    added = frozenset(_OWN_ARGUMENTS) - accepted

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
                f"{cls.__name__}() got {quote_names(given)}, but its own __init__ calls super().__init__() without: "
                "let it take these arguments, or **kwargs, and pass them on"
            )
        if lock:
            self._tensordict._lock_tree()

    shown += [parameter for name, parameter in _OWN_ARGUMENTS.items() if name in added]
    __init__.__signature__ = inspect.Signature([this, *shown])  # type: ignore[attr-defined]
    cls.__signature__ = inspect.Signature(shown)
    cls.__init__ = __init__


def quote_names(names: Iterable[str]) -> str:
    """Return names in quotes, sorted, for errors."""
    return ", ".join(map(repr, sorted(names)))
