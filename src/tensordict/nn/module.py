"""Modules that read entries of a container and write others: the base class, and wrappers for any callable."""

from __future__ import annotations

import functools
import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

import torch
from torch import Tensor, nn

from tensordict.containers.dense import TensorDict
from tensordict.containers.tensordict_base import TensorDictBase
from tensordict.core.exceptions import add_note
from tensordict.core.extras import require
from tensordict.core.keys import Key, is_nested_key, path_of, unravel_key
from tensordict.nn import pickled_modules
from tensordict.nn.dispatch import entries_as_container
from tensordict.nn.skipping import must_skip
from tensordict.ops.collection import TensorCollection
from tensordict.ops.dims.indexing import unwrap_value
from tensordict.ops.entries.atomic_updates import set_all

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle
    from typing_extensions import Self

Inplace = bool | str
_INPLACE = (True, False, "empty")

C = TypeVar("C", bound=TensorCollection)
Out = TypeVar("Out", bound=TensorCollection)


class OnContainers(Protocol):
    """The type of a module call: a container gives the container that was written to; entries give entries."""

    @overload
    def __call__(self, tensordict: C, *args: Any, tensordict_out: None = None, **kwargs: Any) -> C: ...
    @overload
    def __call__(self, tensordict: TensorCollection, *args: Any, tensordict_out: Out, **kwargs: Any) -> Out: ...
    @overload
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class TensorDictModuleBase(nn.Module):
    """The base class of modules that read and write containers.

    A subclass declares `in_keys`, the entries that it reads, and `out_keys`, the entries that it writes, in the class
    or in its `__init__`. Its `forward` takes a container and returns one.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import TensorDictModuleBase
        >>> class Distance(TensorDictModuleBase):
        ...     in_keys = ["a", "b"]
        ...     out_keys = ["distance"]
        ...     def forward(self, tensordict):
        ...         return tensordict.set("distance", (tensordict["a"] - tensordict["b"]).abs())
        >>> Distance()(TensorDict(a=torch.tensor(1), b=torch.tensor(4)))["distance"]
        tensor(3)
    """

    _in_keys: list[Key]
    _out_keys: list[Key]
    # The selected out-keys, or `None`.
    _out_keys_apparent: list[Key] | None = None
    # The out-keys before a selection, for subclasses that override the `out_keys` property with a setter.
    _out_keys_unselected: list[Key] | None = None
    _selecting: RemovableHandle | None = None

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        for name in ("in_keys", "out_keys"):
            keys = cls.__dict__.get(name)
            if isinstance(keys, (list, tuple, str)):
                # The properties of this class read the keys from there.
                setattr(cls, f"_{name}", as_keys(keys, name))
                delattr(cls, name)

    @property
    def in_keys(self) -> list[Key]:
        """The keys of the entries that the module reads."""
        return self._in_keys

    @in_keys.setter
    def in_keys(self, value: Any) -> None:
        object.__setattr__(self, "_in_keys", as_keys(value, "in_keys"))

    @property
    def out_keys(self) -> list[Key]:
        """The keys of the entries in the result: all that the module writes, or the selected ones."""
        selected = self._out_keys_apparent
        keys: Any = self._out_keys if selected is None else selected
        if keys is None:
            # Losses of TorchRL that declare keys in the class set the keys of the instance to `None`.
            keys = type(self)._out_keys
        return keys  # type: ignore[no-any-return]

    @out_keys.setter
    def out_keys(self, value: Any) -> None:
        object.__setattr__(self, "_out_keys", as_keys(value, "out_keys"))
        self._stop_selecting()

    if TYPE_CHECKING:
        # Subclasses declare these in their body, and pyright does not allow a property to be replaced.
        in_keys: list[Key]  # type: ignore[no-redef]
        out_keys: list[Key]  # type: ignore[no-redef]

    @property
    def out_keys_source(self) -> list[Key]:
        """The keys of all entries that the module writes, selected or not."""
        return self._out_keys

    def select_out_keys(self, *out_keys: Key) -> Self:
        """Keep only some of the entries that the module writes. The others are removed from the result.

        An entry that the module also reads is kept. :meth:`reset_out_keys` undoes the selection. A class that overrides
        `out_keys` as a property gets the selected keys through its setter.

        Args:
            *out_keys: some of the out-keys.

        Returns:
            The module itself.

        Raises:
            ValueError: a key is not among the out-keys.
            RuntimeError: the class defines `out_keys` as a property without a setter.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from tensordict.nn import TensorDictModule
            >>> split = TensorDictModule(lambda x: (x.floor(), x.frac()), in_keys=["x"], out_keys=["whole", "rest"])
            >>> sorted(split.select_out_keys("rest")(TensorDict(x=torch.tensor(1.5))).keys())
            ['rest', 'x']
        """
        selected = self._selectable(out_keys)
        own: Any = type(self).out_keys
        if own is TensorDictModuleBase.out_keys:
            object.__setattr__(self, "_out_keys_apparent", selected)
        elif getattr(own, "fset", None) is None:
            raise RuntimeError(f"{type(self).__name__} does not support select_out_keys: out_keys has no setter")
        else:
            before = self._out_keys_unselected or self.out_keys
            self.out_keys = selected
            object.__setattr__(self, "_out_keys_unselected", before)
        if self._selecting is None:
            self._selecting = self.register_forward_hook(_drop_unselected)
        return self

    def _selectable(self, out_keys: Sequence[Key]) -> list[Key]:
        """Return the selected keys, after checking that they are out-keys."""
        selected = [unravel_key(key) for key in out_keys]
        for key in selected:
            if key not in self.out_keys:
                raise ValueError(f"cannot select {key!r}, which is none of the out-keys {self.out_keys}")
        return selected

    def reset_out_keys(self) -> Self:
        """Undo :meth:`select_out_keys`. Returns the module itself."""
        before = self._out_keys_unselected
        self._stop_selecting()
        if before is not None:
            self.out_keys = before
        return self

    def _stop_selecting(self) -> None:
        """Forget the selected keys, and remove the hook that drops the others."""
        object.__setattr__(self, "_out_keys_apparent", None)
        object.__setattr__(self, "_out_keys_unselected", None)
        if self._selecting is not None:
            self._selecting.remove()
            self._selecting = None

    @staticmethod
    def is_tdmodule_compatible(module: object) -> bool:
        """Return whether a module has in-keys and out-keys."""
        return hasattr(module, "in_keys") and hasattr(module, "out_keys")

    @overload
    def reset_parameters_recursive(self, parameters: None = None) -> None: ...
    @overload
    def reset_parameters_recursive(self, parameters: C) -> C: ...
    def reset_parameters_recursive(self, parameters: C | None = None) -> C | None:
        """Call `reset_parameters` of all submodules that have it, inner modules first.

        Args:
            parameters: a container of parameters without batch dims, with the structure of the module (see
                :meth:`TensorDict.from_module`). If given, these are reset in place, and the module's own stay
                unchanged.

        Returns:
            `None`; if `parameters` was given, a new container that shares its memory.

        Raises:
            RuntimeError: `parameters` has batch dims.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> from tensordict import TensorDict
            >>> from tensordict.nn import TensorDictModule
            >>> net = TensorDictModule(nn.Linear(2, 2), in_keys=["x"], out_keys=["y"])
            >>> zeros = TensorDict.from_module(net).data.clone().zero_()
            >>> _ = net.reset_parameters_recursive(zeros)
            >>> bool((zeros == 0).any())
            False
        """
        if parameters is None:
            self._reset_parameters(self)
            return None
        if parameters.ndim:
            raise RuntimeError(
                "reset_parameters_recursive does not support batched TensorDicts, ensure `batch_size` is empty and the "
                f"parameters have their original shapes; got batch size {list(parameters.batch_size)}"
            )
        with parameters.data.to_module(self):
            self._reset_parameters(self)
        return parameters.apply(lambda leaf: leaf.detach().requires_grad_(leaf.requires_grad))

    def _assign(self, **attributes: object) -> None:
        """Set attributes that are neither modules nor parameters. Torch's check for these would take 3 us each."""
        for name, value in attributes.items():
            object.__setattr__(self, name, value)

    def _reset_parameters(self, module: nn.Module) -> None:
        """Reset the parameters of a module and its submodules; warn if none of them can be reset."""
        if not reset_modules(module):
            warnings.warn(f"no module below {type(module).__name__} has reset_parameters", stacklevel=3)

    def __setstate__(self, state: dict[str, Any]) -> None:
        state, selecting = pickled_modules.convert_state(state)
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if selecting:
            self._selecting = self.register_forward_hook(_drop_unselected)

    def _repr_fields(self) -> dict[str, object]:
        """Return the fields for `repr`."""
        return {**self._modules, "in_keys": self.in_keys, "out_keys": self.out_keys}

    def __repr__(self) -> str:
        return repr_of_fields(self, self._repr_fields())


def repr_of_fields(module: object, fields: Mapping[str, object]) -> str:
    """Return the `repr` of an object, with one field per line."""
    lines = ",\n".join(f"{name}={value!r}" for name, value in fields.items())
    return f"{type(module).__name__}(\n    " + lines.replace("\n", "\n    ") + ")"


def reset_modules(module: nn.Module) -> bool:
    """Call `reset_parameters` of all submodules. Returns whether any has it.

    For a given seed, the order decides which random numbers a parameter gets: children come before their parent. A
    `TensorDictModule` forwards the method to the module that it wraps, which is therefore reset twice.
    """
    found = False
    for child in module.children():
        found |= reset_modules(child)
        if hasattr(child, "reset_parameters"):
            child.reset_parameters()  # type: ignore[operator]
            found = True
    return found


def as_keys(keys: object, what: str) -> list[Key]:
    """Convert keys, or a single name, to a list of canonical keys; raises a `ValueError` for anything else."""
    if isinstance(keys, str):
        keys = [keys]
    if not isinstance(keys, Sequence) or not all(map(is_nested_key, keys)):
        raise ValueError(f"{what} must be of type list, str or tuples of str, or dict (in_keys only), got {keys!r}")
    return [unravel_key(key) for key in keys]


def _one_or_more(keys: object) -> object:
    """Wrap a single key, which may be a tuple, in a list."""
    return [keys] if is_nested_key(keys) else keys


def _drop_unselected(module: TensorDictModuleBase, args: object, output: object) -> None:
    """Implement `select_out_keys` as a forward hook. Results of `dispatch` contain only selected entries already."""
    if isinstance(output, TensorCollection):
        kept = (*module.out_keys, *module.in_keys)
        for key in module._out_keys_unselected or module.out_keys_source:
            if key not in kept and output._has(path := path_of(key)):
                output.del_(key)
                # Do not leave containers that held nothing else.
                while (path := path[:-1]) and output.get(path).is_empty():
                    output.del_(path)


class TensorDictModule(TensorDictModuleBase):
    """A function or module that reads its arguments from a container, and writes its results into it.

    It can also be called with the arguments themselves, by position or by name; see :class:`dispatch`. Attributes that
    it lacks are looked up in the wrapped object.

    Args:
        module: a function, an `nn.Module` or any other callable.
        in_keys: the key, or the list of keys, of the entries to pass as arguments, in order. Or a mapping from argument
            names to keys.
        out_keys: the key, or the list of keys, for the results. Results for `"_"` are discarded. If the call returns a
            dict or container that has all out-keys, these entries are the results.
        out_to_in_map: `False` reads a mapping in `in_keys` in the other direction, from keys to argument names.
        inplace: `True` writes into the given container, `False` or `None` into a new one without batch size, `"empty"`
            into an empty one of its kind. `forward(..., tensordict_out=)` takes precedence.
        method: the method to call, instead of the object itself.
        method_kwargs: keyword arguments for it.
        strict: raise an error for a missing entry, instead of passing `None`.
        get_kwargs: keyword arguments for :meth:`TensorDict.get`, for ragged entries.

    Raises:
        ValueError: invalid keys, an unknown `inplace`, or a `module` that is not callable.
        AttributeError: `module` has no such `method`.
        KeyError: (when called) an entry is missing, and `strict` is set or the call fails without the entry.
        RuntimeError: (when called) the number of results differs from the number of out-keys.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import TensorDictModule
        >>> net = TensorDictModule(nn.Linear(3, 4), in_keys=["obs"], out_keys=[("policy", "logits")])
        >>> net(TensorDict(obs=torch.zeros(5, 3), batch_size=[5]))["policy", "logits"].shape
        torch.Size([5, 4])
        >>> net(torch.zeros(5, 3)).shape, net.in_features
        (torch.Size([5, 4]), 3)
    """

    if TYPE_CHECKING:
        __call__: OnContainers

    # The names of the arguments, if `in_keys` is a mapping.
    _kwargs: list[str] | None = None
    _get_kwargs: dict[str, Any] | None = None

    def __init__(
        self,
        module: Callable[..., Any],
        in_keys: Key | Sequence[Key] | Mapping[Any, Any],
        out_keys: Key | Sequence[Key],
        *,
        out_to_in_map: bool | None = None,
        inplace: Inplace | None = True,
        method: str | None = None,
        method_kwargs: dict[str, Any] | None = None,
        strict: bool = False,
        get_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if isinstance(in_keys, Mapping):
            names, keys = (in_keys.values(), in_keys) if out_to_in_map is False else (in_keys, in_keys.values())
            self._kwargs = [str(name) for name in names]
            in_keys = list(keys)
        elif out_to_in_map is not None:
            warnings.warn(
                f"out_to_in_map={out_to_in_map} has no effect, because in_keys is not a mapping", stacklevel=2
            )
        if inplace is not None and inplace not in _INPLACE:
            raise ValueError(f"inplace must be True, False or 'empty', got {inplace!r}")
        if method is None and not callable(module):
            raise ValueError(
                f"{type(module).__name__} is not callable: give a function, an nn.Module, or the name of a `method`"
            )
        if method is not None and not callable(getattr(module, method, None)):
            raise AttributeError(f"{type(module).__name__} has no method {method!r}")
        self.module = module
        self._assign(
            in_keys=_one_or_more(in_keys),
            out_keys=_one_or_more(out_keys),
            inplace=inplace,
            method=method,
            method_kwargs=method_kwargs or {},
            strict=strict,
            _get_kwargs=get_kwargs or None,
        )

    def forward(self, tensordict: Any = None, *args: Any, tensordict_out: Any = None, **kwargs: Any) -> Any:
        """Read the in-keys, call the module, and write its results to the out-keys.

        Args:
            tensordict: a container, or (as by :class:`dispatch`) the entry at the first in-key.
            *args: the entries at the other in-keys.
            tensordict_out: a container to write into, instead of the one that is read.
            **kwargs: entries by name, and further arguments of the call.

        Returns:
            The container that was written into, or the entries.
        """
        # The decorators `dispatch` and `set_skip_existing` would add two calls with `*args, **kwargs`, 0.8 us.
        if not isinstance(tensordict, TensorCollection):
            return entries_as_container(self, TensorDictModule.forward, (tensordict, *args), tensordict_out, kwargs)
        if args:
            raise TypeError(f"{type(self).__name__} takes one container, or entries, got {len(args)} values more")
        if must_skip(self, tensordict):
            return tensordict
        # Read `__dict__` directly: attribute access takes 20 ns here, because the class defines `__getattr__`; a dict
        # takes 8. Names that a subclass may define as properties are read as attributes.
        own = self.__dict__
        reading: dict[str, Any] | None = own.get("_get_kwargs")
        entries, arguments = tensordict._entries, []
        for key in self.in_keys:
            if reading is not None:
                value = tensordict.get(key, None, **reading)
            else:
                value = entries.get(key) if type(key) is str else tensordict.get(key, None)
            if type(value) is not Tensor:
                value = unwrap_value(value)
                if value is None and self.strict:
                    raise self._missing(tensordict)
            arguments.append(value)
        try:
            if self.method is not None or own.get("_kwargs") is not None:
                results = self._call_module(arguments, **kwargs)
            else:
                module = own.get("_callable")
                if module is None or "module" in own["_modules"]:
                    module = self.module
                results = module(*arguments, **kwargs) if kwargs else module(*arguments)
        except Exception as error:
            if any(argument is None for argument in arguments):
                raise self._missing(tensordict) from error
            shapes = [list(item.shape) if isinstance(item, Tensor) else type(item).__name__ for item in arguments]
            add_note(error, f"raised in {self._describe()}, given {', '.join(map(str, shapes))}")
            raise
        if tensordict_out is None:
            inplace = self.inplace
            tensordict_out = tensordict if inplace is True else output_of(tensordict, inplace or False)
        keys = self._out_keys
        if type(results) is Tensor and len(keys) == 1:
            # A single tensor result is the usual case. This takes a third of `_write_to_tensordict`, 1 us less.
            key = keys[0]
            if type(key) is not str:
                tensordict_out._write(key, results)
            elif key != "_":
                tensordict_out._write_name(key, results)
            return tensordict_out
        return self._write_to_tensordict(tensordict, self._as_results(results), tensordict_out)

    @property
    def module(self) -> Any:
        """The wrapped object."""
        # A property, because attribute access would fail first, and then call `__getattr__` twice: 3 us.
        own = self.__dict__
        module = own["_modules"].get("module")
        if module is None:
            module = own.get("_callable")
            if module is None:
                raise AttributeError("nothing is wrapped yet")
        return module

    @module.setter
    def module(self, value: object) -> None:
        # `nn.Module.__setattr__` calls this for all values but modules. The function has another name in `__dict__`,
        # because Dynamo 2.11 reads `__dict__["module"]` as the attribute, and this property would call itself.
        self.__dict__["_callable"] = value

    def _call_module(self, tensors: Sequence[object], **kwargs: object) -> Any:
        """Call the chosen method, and pass arguments by name if `in_keys` is a mapping."""
        module = self.module
        if self.method is not None:
            module = getattr(module, self.method)
            kwargs = {**self.method_kwargs, **kwargs}
        if self._kwargs is None:
            return module(*tensors, **kwargs)
        return module(**dict(zip(self._kwargs, tensors)), **kwargs)

    def _missing(self, tensordict: TensorCollection) -> KeyError:
        missing = [key for key in self.in_keys if tensordict.get(key, None) is None]
        return KeyError(
            f"{self._describe()} reads {', '.join(map(repr, missing))}, not found in the container, which has the "
            f"keys {list(tensordict.keys(True, True))}"
        )

    def _describe(self) -> str:
        """Describe the module for an error message."""
        module = self.module
        name = getattr(module, "__name__", type(module).__name__)
        return f"{type(self).__name__}({name}, in_keys={self.in_keys}, out_keys={self._out_keys})"

    def _as_results(self, results: object) -> Sequence[object]:
        """Return one result per out-key."""
        keys = self._out_keys
        if type(results) is not Tensor:
            if type(results) is tuple or (isinstance(results, (tuple, list)) and len(keys) > 1):
                if len(results) == len(keys):
                    return results
                raise self._make_count_error(f"{len(results)} values")
            if isinstance(results, (dict, TensorDictBase)) and (found := _find_results(results, keys)) is not None:
                return found
            if results is None:
                if not keys:
                    return ()
                raise self._make_count_error("None")
        if len(keys) != 1:
            raise self._make_count_error(f"one {type(results).__name__}")
        return (results,)

    def _make_count_error(self, returned: str) -> RuntimeError:
        return RuntimeError(
            f"{self._describe()} returned {returned} for {len(self._out_keys)} out_keys: it must return one value for "
            "each; write what is not needed to '_'"
        )

    def _write_to_tensordict(
        self,
        tensordict: TensorCollection,
        tensors: Sequence[object],
        tensordict_out: TensorCollection | None = None,
        out_keys: Sequence[Key] | None = None,
    ) -> TensorCollection:
        """Write all results to the out-keys, or none if one fails. Returns the container that was written into."""
        if tensordict_out is None:
            tensordict_out = output_of(tensordict, self.inplace)
        keys = self._out_keys if out_keys is None else out_keys
        if "_" in keys:
            kept = [pair for pair in zip(keys, tensors) if pair[0] != "_"]
            keys, tensors = [key for key, _ in kept], [value for _, value in kept]
        if len(keys) == 1:
            tensordict_out.set(keys[0], tensors[0])
        elif keys:
            set_all(tensordict_out, keys, tensors)
        return tensordict_out

    @property
    def is_functional(self) -> bool:
        """Always `False`; kept for programs that ask whether the module was made stateless."""
        return False

    @property
    def device(self) -> torch.device:
        """The device of the first parameter; the CPU for a module without parameters."""
        for parameter in self.parameters():
            return parameter.device
        return torch.device("cpu")

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # guarded: like any `__getattr__`
            if name in ("module", "_modules") or name.startswith("__"):
                raise
            return getattr(self.module, name)

    def _repr_fields(self) -> dict[str, object]:
        return {"module": self.module, "in_keys": self.in_keys, "out_keys": self.out_keys}

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        if isinstance(state.get("_callable"), FunctionType):
            state["_callable"] = _PickledFunction(state["_callable"])
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        own = self.__dict__
        if "module" in own:
            # The pickle was written by the reference.
            own["_callable"] = own.pop("module")
        if isinstance(own.get("_callable"), _PickledFunction):
            own["_callable"] = own["_callable"].function


def _find_results(results: Any, keys: Sequence[Key]) -> list[Any] | None:
    """Return the results at the keys of a dict (of dicts) or container; `None` unless it has all of them."""
    found = []
    for key in keys:
        value = results.get(key, None)
        if value is None and type(key) is not str:
            value = results
            for name in key:
                value = value.get(name) if isinstance(value, Mapping) else None
        if value is None:
            return None
        found.append(value)
    return found


def output_of(tensordict: TensorCollection, inplace: Inplace | None) -> TensorCollection:
    """Return the container for the results."""
    if inplace is True or inplace is None:
        return tensordict
    return TensorDict() if inplace is False else tensordict.empty()


class _PickledFunction:
    """A function that is pickled by name or, if it cannot be imported by name, by value with cloudpickle."""

    def __init__(self, function: FunctionType) -> None:
        self.function = function

    def __reduce__(self) -> tuple[object, ...]:
        try:
            pickle.dumps(self.function)
        except (pickle.PicklingError, AttributeError):  # not compiled: it pickles
            cloudpickle = require("cloudpickle", "cloudpickle")
            return cloudpickle.loads, (cloudpickle.dumps(self.function),)
        return _same, (self.function,)

    def __deepcopy__(self, memo: object) -> FunctionType:
        return self.function


def _same(value: FunctionType) -> FunctionType:
    return value


class Forwarding(TensorDictModuleBase):
    """The base of modules that look up the attributes that they lack in the module that they wrap."""

    # The name of the wrapped module.
    _forwards_to: str

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # guarded: like any `__getattr__`
            inner = self._forwards_to
            if inner not in self.__dict__.get("_modules", ()) or name.startswith("__"):  # guarded: never absent
                raise
            return getattr(self._modules[inner], name)


class TensorDictModuleWrapper(Forwarding):
    """A module that behaves like the module it wraps. Subclasses change parts of it.

    Args:
        td_module: the wrapped module.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import TensorDictModule, TensorDictModuleWrapper
        >>> class Noisy(TensorDictModuleWrapper):
        ...     def forward(self, tensordict):
        ...         return super().forward(tensordict.set("x", tensordict["x"] + torch.randn(3)))
        >>> noisy = Noisy(TensorDictModule(nn.Linear(3, 4), in_keys=["x"], out_keys=["y"]))
        >>> noisy.in_keys, noisy(TensorDict(x=torch.ones(3)))["y"].shape
        (['x'], torch.Size([4]))
    """

    _forwards_to = "td_module"

    def __init__(self, td_module: TensorDictModuleBase) -> None:
        super().__init__()
        self.td_module = td_module

    @property  # type: ignore[misc]  # the wrapped module's are set there
    def out_keys(self) -> list[Key]:
        """The out-keys of the wrapped module."""
        return self.td_module.out_keys

    @property
    def out_keys_source(self) -> list[Key]:
        """All keys that the wrapped module writes."""
        return self.td_module.out_keys_source

    def select_out_keys(self, *out_keys: Key) -> Self:
        """Select out-keys of the wrapped module. Returns the wrapper."""
        self.td_module.select_out_keys(*out_keys)
        return self

    def reset_out_keys(self) -> Self:
        """Undo :meth:`select_out_keys` of the wrapped module. Returns the wrapper."""
        self.td_module.reset_out_keys()
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module."""
        return self.td_module(*args, **kwargs)


class WrapModule(TensorDictModuleBase):
    """Turn a function from containers to containers into a module, for :class:`TensorDictSequential`.

    Args:
        func: takes a container and returns one.
        inplace: update the given container with the result, and return it.
        in_keys: the keys that `func` reads. Only other code asks for them; none by default.
        out_keys: the keys that `func` writes, likewise.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import WrapModule
        >>> flatten = WrapModule(lambda td: td.reshape(-1))
        >>> flatten(TensorDict(x=torch.ones(2, 3), batch_size=[2, 3])).batch_size
        torch.Size([6])
    """

    # Pickles of the reference contain no keys.
    _in_keys: list[Key] = []  # noqa: RUF012 (replaced, never changed)
    _out_keys: list[Key] = []  # noqa: RUF012

    def __init__(
        self,
        func: Callable[[Any], Any],
        *,
        inplace: bool = False,
        in_keys: Sequence[Key] | None = None,
        out_keys: Sequence[Key] | None = None,
    ) -> None:
        super().__init__()
        self.func = func
        self.inplace = inplace
        self.in_keys = as_keys(in_keys or [], "in_keys")
        self.out_keys = as_keys(out_keys or [], "out_keys")

    def forward(self, data: Any) -> Any:
        """Call the function."""
        result = self.func(data)
        return data.update(result) if self.inplace and result is not data else result


class as_tensordict_module:  # a function to its callers, as in the public API
    """Decorate a function or a method, so that it is called with a container.

    Args:
        in_keys: the keys of its arguments; see :class:`TensorDictModule`.
        out_keys: the keys for its results.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import as_tensordict_module
        >>> @as_tensordict_module(in_keys=["x"], out_keys=["y"])
        ... def double(x):
        ...     return 2 * x
        >>> double(TensorDict(x=torch.tensor(2)))["y"]
        tensor(4)
    """

    def __init__(self, *, in_keys: Key | Sequence[Key], out_keys: Key | Sequence[Key]) -> None:
        self.in_keys = as_keys(_one_or_more(in_keys), "in_keys")
        self.out_keys = as_keys(_one_or_more(out_keys), "out_keys")

    def __call__(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a function."""
        as_function = TensorDictModule(func, self.in_keys, self.out_keys)
        # A method gets its object as the first argument, and is bound at the call.
        is_method = "." in func.__qualname__.rpartition("<locals>.")[2]

        @functools.wraps(func)
        def wrapped(*args: object, **kwargs: object) -> Any:
            if not is_method:
                return as_function(*args, **kwargs)
            bound = functools.partial(func, args[0])
            return TensorDictModule(bound, self.in_keys, self.out_keys)(*args[1:], **kwargs)

        return wrapped
