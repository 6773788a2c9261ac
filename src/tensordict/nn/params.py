"""TensorDictParams: a container that is also a module, with its leaves as parameters and buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, MutableMapping, ValuesView
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from torch import Tensor, compiler, nn, no_grad
from torch.nn.parameter import is_lazy

from tensordict.containers.dense import TensorDict
from tensordict.containers.tensordict_base import GivesTensorDicts
from tensordict.containers.wrapper import Wrapper
from tensordict.core import pytree, registry
from tensordict.core.contract import Clones, Contract, is_node
from tensordict.core.exceptions import ContainerExpected, ModuleError, SaveError
from tensordict.core.keys import Path, entry_of, is_nested_key, path_of
from tensordict.core.signatures import refuse_unknown, spells
from tensordict.core.uninitialized import uninitialized_like
from tensordict.io.formats import pickled_containers
from tensordict.io.specification import is_stored_as_class
from tensordict.memory.mapped import MemoryMappedTensor
from tensordict.ops.dims.rows import LATER_METHODS
from tensordict.ops.entries.copying import TRANSIENT
from tensordict.ops.entries.write_plans import Update, Write
from tensordict.ops.modules import as_buffer, is_buffer, is_parameter

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from tensordict.ops.storing.saving import LoadInto

__all__ = ["TensorDictParams"]

# Looked up once: while Dynamo traces a compiled function, it replaces the attribute, and cannot trace its replacement.
_INIT_MODULE = nn.Module.__init__

Convert = Literal["auto", "parameter", "buffer"]
_CHOICES = ("auto", "parameter", "buffer")


class _Registered(MutableMapping[str, Any]):  # guarded: `_path` reads all names
    """The parameters or the other leaves of a container, as the dict of parameters or buffers of a module.

    This is a live view: every leaf written to the container is registered at once. Nested keys are joined by dots.
    """

    def __init__(self, container: Any, parameters: bool) -> None:
        self._container = container
        self._parameters = parameters

    def _collect_leaves(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        _register(self._container, "", self._parameters, found)
        return found

    def _find(self, name: str) -> Path | None:
        for path, leaf in self._container._walk():
            if ".".join(path) == name and is_parameter(leaf) is self._parameters:
                return path  # type: ignore[no-any-return]
        return None

    def _path(self, name: str) -> Path:
        path = self._find(name)
        if path is None:
            raise KeyError(name)
        return path

    def __getitem__(self, name: str) -> Any:
        return self._container.get(self._path(name))

    def __setitem__(self, name: str, value: Any) -> None:
        if not self._parameters:
            value = as_buffer(value)
        path = self._find(name)
        if path is None:
            # A new attribute, or `register_buffer`.
            self._container.set(name, value)
        else:
            node, last = self._container._find_parent(path)
            node._entries[last] = value

    def __delitem__(self, name: str) -> None:
        self._container.del_(self._path(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._collect_leaves())

    def __len__(self) -> int:
        return len(self._collect_leaves())

    def items(self) -> Any:
        return self._collect_leaves().items()

    def values(self) -> Any:
        return self._collect_leaves().values()


def _register(container: Any, prefix: str, parameters: bool, found: dict[str, Any]) -> None:
    """Collect the leaves of a container that are parameters, or all others, by dotted name."""
    entries = container._entries
    if not isinstance(entries, dict):
        for path, leaf in container._walk():
            if is_parameter(leaf) is parameters:
                found[prefix + ".".join(path)] = leaf
        return
    for name, value in entries.items():
        kind = type(value)
        if kind is nn.Parameter:
            if parameters:
                found[prefix + name] = value
        elif kind is TensorDict or (kind is not Tensor and is_node(value)):
            _register(value, f"{prefix}{name}.", parameters, found)
        elif is_parameter(value) is parameters:
            found[prefix + name] = value


@registry.register
class TensorDictParams(Wrapper, GivesTensorDicts, nn.Module):  # type: ignore[misc]  # apply() is that of containers
    """A container of parameters and buffers that can be part of a module.

    `parameters()`, `state_dict()` and `to()` of the surrounding module reach its leaves, and an optimizer can train
    them. It wraps a container without copying it: floating point tensors become parameters in place, and tensors of
    other dtypes are buffers. The names of parameters are the nested keys, joined by dots. Entries are also attributes.

    Written tensors become parameters or buffers. In-place writes (`update_`, `set_`, `zero_`, ...) bypass autograd;
    in-place arithmetic needs `torch.no_grad()`, as for any parameter. Results of operations are plain containers (or
    tensorclasses, if it wraps one). Only `clone`, `copy`, `to` and similar methods give a `TensorDictParams` with its
    own parameters, and so does `torch.utils._pytree.tree_map` with a function that returns a parameter for each
    parameter. Saving it saves the wrapped container.

    Args:
        parameters: a container or a dict. Tensors are not copied. The structure is copied if the container is locked or
            mapped from files.
        no_convert: `False` or `"auto"` converts as above. `True` or `"buffer"` keeps tensors that are not parameters as
            buffers. `"parameter"` converts all tensors to parameters (integers without gradients).
        lock: lock the container.
        **kwargs: the entries, instead of `parameters`.

    Raises:
        TypeError: `parameters` is neither a container nor a mapping, or it makes its entries on reading, such as a lazy
            stack; or entries were given twice.
        ValueError: `no_convert` is unknown.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict, TensorDictParams
        >>> params = TensorDictParams(TensorDict(weight=torch.zeros(3, 4), inner={"bias": torch.zeros(3)}))
        >>> [name for name, _ in params.named_parameters()]
        ['weight', 'inner.bias']
        >>> params["scale"] = torch.ones(1)
        >>> type(params["scale"]).__name__, len(list(params.parameters()))
        ('Parameter', 3)
    """

    # Saves and state dicts store the wrapped container.
    _stored_as = "TensorDict"
    # Lazy stacks keep their members; tensors written to the members become parameters.
    _wraps_stacks = False

    _holds_parameters = True

    # A slot and not an attribute of the module: `torch.export` would replace attributes that are pytrees by copies.
    __slots__ = ("_tensordict",)

    _convert: Convert
    _get_hooks: list[Callable[[Any, Any], Any]]
    # The tensorclass of the wrapped object, or `None`.
    _kind: Any

    def __init__(
        self,
        parameters: Any = None,
        *,
        no_convert: bool | Convert = False,
        lock: bool = False,
        **kwargs: Any,
    ) -> None:
        if parameters is None:
            parameters = kwargs
        elif kwargs:
            raise TypeError("entries come from a container or from keyword arguments, not from both")
        if isinstance(parameters, Mapping) and not isinstance(parameters, Contract):
            parameters = TensorDict(parameters)
        if not isinstance(parameters, Contract):
            raise ContainerExpected(
                f"TensorDictParams wraps a container or a dict of parameters, got {type(parameters).__name__}"
            )
        _check_holds_leaves(parameters, ())
        kind = type(parameters) if is_stored_as_class(parameters) else getattr(parameters, "_kind", None)
        if parameters._locked:
            # Copy the structure: locked containers must not change. Containers mapped from files are locked, too.
            parameters = parameters._wrapped_container().copy()
        convert: Any = no_convert if isinstance(no_convert, str) else ("buffer" if no_convert else "auto")
        if convert not in _CHOICES:
            raise ValueError(f"no_convert must be True, False or one of {_CHOICES}, got {no_convert!r}")
        self._set_up(parameters._wrapped_container(), convert, kind)
        _convert_in_place(self._tensordict, convert, {})
        if lock:
            self._lock_tree()

    def _set_up(self, container: Any, convert: Convert, kind: Any) -> None:
        _INIT_MODULE(self)
        # Dynamo 2.11 traces no `__dict__.update`.
        own = self.__dict__
        own["_convert"], own["_get_hooks"], own["_kind"] = convert, [], kind
        self._hold(container)

    def _hold(self, container: Any) -> None:
        """Replace the registered leaves by the leaves of a container."""
        object.__setattr__(self, "_tensordict", container)
        own = self.__dict__
        own["_parameters"], own["_buffers"] = _Registered(container, True), _Registered(container, False)

    @classmethod
    def from_dict(cls, input_dict: Any, **kwargs: Any) -> Self:
        """Make parameters and buffers from a mapping; arguments as :meth:`TensorDict.from_dict`."""
        return cls(TensorDict.from_dict(input_dict, **kwargs))

    def from_dict_instance(self, input_dict: Any, *others: object, **options: Any) -> Self:
        """Make a `TensorDictParams` over the tensors of a dict, which are not converted to parameters.

        Arguments as :meth:`TensorDict.from_dict_instance`.
        """
        return self._again(self._param_td.from_dict_instance(input_dict, *others, **options))

    # Results computed from parameters are plain containers.
    _make = TensorDict._make  # type: ignore[assignment]

    def _wrap_container(self, container: Any) -> Any:  # type: ignore[override]
        return container if self._kind is None else self._kind._wrap_container(container)

    def _again(self, container: Any) -> Self:
        """Make a `TensorDictParams` over a container with its own leaves."""
        result = object.__new__(type(self))
        result._set_up(container._wrapped_container(), self._convert, self._kind)
        result.__dict__["_get_hooks"] = list(self._get_hooks)
        result.training = self.training
        return result

    def _part(self, container: Any) -> Self:
        """Wrap a nested container with the settings and hooks of this one; skips `__init__`, which takes 30 us."""
        if compiler.is_dynamo_compiling():
            part = self._again(container)
            part.__dict__["_kind"] = None
            return part
        part = object.__new__(type(self))
        part.__dict__.update(self.__dict__, _kind=None)
        part._hold(container)
        return part

    @property
    def _param_td(self) -> Any:
        """The wrapped container, under a name that TorchRL's tests use."""
        return self._wrap_container(self._tensordict)

    # --- writing ----------------------------------------------------------------------------------------------------

    def _convert_item(self, item: Any, clone: bool = False) -> Any:
        """Convert the tensors in an item, or clones of them, to parameters, where the settings ask for it."""
        if isinstance(item, Tensor):
            return _make_leaf(item.detach().clone() if clone else item, self._convert)
        if isinstance(item, Contract):
            _check_holds_leaves(item, ())
            return item._map(lambda leaf: self._convert_item(leaf, clone))
        if isinstance(item, Mapping):
            return {key: self._convert_item(value, clone) for key, value in item.items()}
        return item

    def _write_name(self, name: str, item: Any, non_blocking: bool = False, path: Path | None = None) -> None:
        self._check_field(name)
        item = self._admit_item(item, path or (name,), non_blocking)
        self._tensordict._write_name(name, item, non_blocking, path)

    def _admit_item(self, item: Any, path: Path, non_blocking: bool) -> Any:
        """Convert an item for storage at `path`."""
        if not isinstance(item, (Tensor, Contract)):
            item = self._tensordict._admit(item, path, non_blocking)
        return self._convert_item(item)

    def _check_field(self, name: str) -> None:
        if self._kind is not None:
            self._param_td._check_field(name)

    def _plan_write(self, write: Write, source: Any, prefix: Path = ()) -> None:
        if isinstance(write, Update) and write.adds:
            source = self._convert_item(source, write.clone)
            if write.clone:
                write = copy.copy(write)
                write.clone = False  # A clone of a parameter is not a parameter.
        super()._plan_write(write, source, prefix)

    @spells(TensorDict.load_memmap_)
    def load_memmap_(self, prefix: Any, robust_key: bool | None = True, **options: Unpack[LoadInto]) -> Self:
        """Load a save into the existing parameters and buffers; see :meth:`load_memmap`.

        Raises:
            KeyError: the save has other entries. Nothing was written.
        """
        refuse_unknown(TensorDictParams.load_memmap_, options)
        saved = TensorDict.load_memmap(prefix, robust_key=robust_key, **options)
        mine, theirs = ({".".join(path) for path, _ in container._walk()} for container in (self, saved))
        if mine != theirs:
            raise ModuleError(
                f"the save does not fit the parameters: unexpected keys {sorted(theirs - mine)}, missing keys "
                f"{sorted(mine - theirs)}; nothing was changed"
            )
        return self.update_(saved)

    # --- reading ----------------------------------------------------------------------------------------------------

    def register_get_post_hook(self, hook: Callable[[Any, Any], Any]) -> None:
        """Register a function that is called on every leaf read by its key, and whose result is returned instead.

        Args:
            hook: takes this container and the tensor. A hook that returns `None` changes nothing. Several hooks run in
                the order of registration. Copies of the container have the same hooks.

        Example:
            >>> import torch
            >>> from tensordict import TensorDictParams
            >>> params = TensorDictParams(w=torch.ones(2))
            >>> params.register_get_post_hook(lambda params, value: value.detach() * 2)
            >>> params["w"]
            tensor([2., 2.])
        """
        self._get_hooks.append(hook)

    def _call_get_hooks(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            for hook in self._get_hooks:
                result = hook(self, value)
                value = value if result is None else result
        return value

    def items(self, *args: Any, **kwargs: Any) -> ItemsView[Any, Any]:
        """Return the (key, value) pairs: a live view, or a view of the results of the hooks."""
        view = super().items(*args, **kwargs)
        return {key: self._call_get_hooks(value) for key, value in view}.items() if self._get_hooks else view

    def values(self, *args: Any, **kwargs: Any) -> ValuesView[Any]:
        """Return the values: a live view, or a view of the results of the hooks."""
        return dict(self.items(*args, **kwargs)).values() if self._get_hooks else super().values(*args, **kwargs)

    def __getitem__(self, index: Any) -> Any:
        """Return the entry at a key, or a part of the batch."""
        value = self._tensordict[index]
        # Indexing never returns a parameter.
        if type(value) is nn.Parameter or is_nested_key(index):
            return self._call_get_hooks(value) if self._get_hooks else value
        return self._rewrap(value)

    def get(self, key: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the entry at a key; see :meth:`TensorDict.get`."""
        value = self._tensordict.get(key, *args, **kwargs) if args or kwargs else self._tensordict.get(key)
        return self._call_get_hooks(value) if self._get_hooks else value

    # --- copies with their own parameters -----------------------------------------------------------------------------

    def _rebuilt(self, leaves: Iterator[Any]) -> Self:
        if type(leaves) is not Clones:
            return super()._rebuilt(leaves)
        # A leaf that several keys share stays shared in the copy.
        olds = self._leaves()
        made: dict[int, Any] = {}
        for old in olds:
            new = next(leaves)
            made.setdefault(id(old), _convert_like(new.detach() if is_parameter(old) else new, old))
        return self._again(self._tensordict._rebuilt(Clones([made[id(old)] for old in olds])))

    def copy(self) -> Self:
        """Return a copy that shares the parameters."""
        return self._again(self._tensordict.copy())

    def to(self, *args: Any, inplace: bool = False, **kwargs: Any) -> Self:
        """Return a copy on another device or with another dtype; leaves that change become new parameters.

        With `inplace=True`, replace the leaves of this container, and return it. The end of a block
        `with params.to("cuda") as moved:` copies changes back.
        """
        cast_filter = kwargs.get("cast_filter", getattr(self._kind, "_cast_filter", None))
        if cast_filter is not None:
            # The filter gets the parameters, and not their data.
            pairs = self._tensordict._walk(or_template=True)
            kwargs["cast_filter"] = lambda key, leaf: cast_filter(*next(pairs))
        moved = self._tensordict.data.to(*args, **kwargs)
        leaves = self._tensordict._leaves()
        olds = iter(leaves)
        made: dict[int, Any] = {}

        def match(new: Tensor) -> Any:
            old = next(olds)
            leaf = made.get(id(old))
            if leaf is None:
                same = new.dtype == old.dtype and new.device == old.device
                if same and compiler.is_dynamo_compiling():
                    # Dynamo cannot compare addresses; a flag among the positional arguments may ask for a copy.
                    same = not kwargs.get("copy") and not any(arg is True for arg in args)
                elif same:
                    same = is_lazy(old) or new.data_ptr() == old.data_ptr()
                leaf = made[id(old)] = old if same else _convert_like(new, old)
            return leaf

        result = self._again(moved._map(match))
        if not inplace:
            return self._remember_move(result)
        self._hold(result._tensordict)
        return self

    def _over_block(self, leaves: list[Any], *args: Any, **kwargs: Any) -> Any:
        olds = self._leaves()
        made = super()._over_block([_convert_like(*pair) for pair in zip(leaves, olds, strict=True)], *args, **kwargs)
        return made if made is self else self._again(made)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        result = memo[id(self)] = self._again(copy.deepcopy(self._tensordict, memo))
        return result

    def __getstate__(self) -> dict[str, Any]:
        left = ("_parameters", "_buffers", *TRANSIENT)
        state = {name: value for name, value in self.__dict__.items() if name not in left}
        return {**state, "_tensordict": self._tensordict}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = {"_kind": None, **(_convert_state(state) if pickled_containers.PARAMS in state else state)}
        container = state.pop("_tensordict")
        self.__dict__.update(state)
        self._hold(container)

    # --- the module -------------------------------------------------------------------------------------------------

    # Written as a method: Dynamo cannot trace `__hash__ = nn.Module.__hash__`.
    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or cast the tensors, as the surrounding module does with its own."""
        nn.Module._apply(self, fn, recurse)  # type: ignore[no-untyped-call]
        _settle_devices(self._tensordict)
        return self

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Return the parameters, each once, like :meth:`torch.nn.Module.parameters`.

        Args:
            recurse: include submodules. The parameters in nested containers belong to this module.
        """
        # Torch's implementation also builds dotted names, and takes 77 instead of 37 us for 144 parameters.
        if self.__dict__["_modules"]:
            return nn.Module.parameters(self, recurse)
        leaves = self._tensordict._leaves()
        return iter({id(leaf): leaf for leaf in leaves if type(leaf) is nn.Parameter or is_parameter(leaf)}.values())

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the parameters by dotted name, like :meth:`torch.nn.Module.named_parameters`.

        Args:
            prefix: precedes the names, followed by a dot.
            recurse: as in :meth:`parameters`.
            remove_duplicate: return a parameter with several names under the first one only.
        """
        if self.__dict__["_modules"]:
            return nn.Module.named_parameters(self, prefix, recurse, remove_duplicate)
        found: dict[str, Any] = {}
        _register(self._tensordict, f"{prefix}." if prefix else "", True, found)
        if not remove_duplicate or len(set(map(id, found.values()))) == len(found):
            return iter(found.items())
        firsts: dict[int, Any] = {}
        for pair in found.items():
            firsts.setdefault(id(pair[1]), pair)
        return iter(firsts.values())

    def state_dict(self, *args: Any, flatten: bool = True, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the parameters and buffers by name, like :meth:`torch.nn.Module.state_dict`.

        Args:
            *args, **kwargs: `destination`, `prefix`, `keep_vars`, as for a module.
            flatten: `True` uses dotted names. `False` uses nested dicts, like :meth:`TensorDict.state_dict`.
        """
        if flatten:
            return nn.Module.state_dict(self, *args, **kwargs)
        return self._tensordict.state_dict(*args, flatten=False, **kwargs)  # type: ignore[no-any-return]

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False, from_flatten: bool | None = None
    ) -> Self:
        """Load the result of :meth:`state_dict`, like :meth:`torch.nn.Module.load_state_dict`. Returns this container.

        Args:
            state_dict: a mapping from names to tensors, flat or nested.
            strict: raise an error for missing or unexpected keys.
            assign: replace the parameters by the tensors instead of copying into them.
            from_flatten: accepted for compatibility, and ignored: nested dicts are recognized.

        Raises:
            RuntimeError: keys are missing or unexpected (with `strict`), or shapes differ.
        """
        nn.Module.load_state_dict(self, _flatten_names(state_dict), strict=strict, assign=assign)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        # Keep the order of the entries; torch would list all parameters before all buffers.
        found: dict[str, Any] = {}
        super()._save_to_state_dict(found, "", keep_vars)
        places = {".".join(path_of(key)): place for place, key in enumerate(self._tensordict.keys(True, True))}
        for name in sorted(found, key=lambda name: places.get(name, len(places))):
            destination[prefix + name] = found[name]

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        # Torch would look for a submodule before a dot in a name, so check for unexpected keys here.
        leaves: dict[str, Any] = {**self._parameters, **self._buffers}
        for name, leaf in leaves.items():
            value = state_dict.get(prefix + name)
            if is_lazy(leaf) and isinstance(value, Tensor) and not is_lazy(value):
                # Lazy modules do the same when they load a state dict.
                with no_grad():
                    leaf.materialize(value.shape)
        odd: list[str] = []
        nn.Module._load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys, odd, error_msgs)
        unexpected_keys += [key for key in odd if key[len(prefix) :] not in leaves]

    def __setattr__(self, name: str, value: Any) -> None:
        if "." in name:
            # `load_state_dict(assign=True)` sets dotted names, which torch does not allow as attributes.
            (self._parameters if is_parameter(value) else self._buffers)[name] = value
        elif name in TRANSIENT:
            # Torch would look for the name among the leaves, which takes 24 us for 20 leaves.
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def __repr__(self) -> str:
        """Show the class and the wrapped container."""
        return f"TensorDictParams(params={self._param_td!r})"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # Look up only attributes of the container. Torch handles all others.
            if name != "_tensordict":
                container = self._tensordict
                if name in container._entries:
                    value = self[name]
                    # Torch looks up a parameter by the parts of its name, and expects a module for all but the last
                    # part.
                    return self._part(value) if type(value) is TensorDict else value
                held = self._param_td if self._kind is not None else container
                if not name.startswith("_") and hasattr(type(held), name):
                    return getattr(held, name)
            return nn.Module.__getattr__(self, name)


class _LaterMethod:
    """A method that gives way to an entry of its name: `params.head` is the parameters of the module `head`."""

    def __init__(self, method: Any) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    def __get__(self, params: Any, owner: object = None) -> Any:
        name = self._method.__name__
        if params is not None and name in params._tensordict._entries:
            return params.__getattr__(name)
        return self._method.__get__(params, owner)


for _name in LATER_METHODS:
    setattr(TensorDictParams, _name, _LaterMethod(getattr(TensorDictParams, _name)))


# --- leaves -----------------------------------------------------------------------------------------------------------


def _make_leaf(value: Any, convert: Convert) -> Any:
    """Convert a tensor to the parameter or buffer to register."""
    if is_parameter(value) or is_buffer(value):
        return value
    if convert == "buffer" or (convert == "auto" and not (value.is_floating_point() or value.is_complex())):
        return as_buffer(value)
    leaf = value if value.is_leaf else value.detach()
    if isinstance(leaf, MemoryMappedTensor):
        # Torch makes parameters only of classes whose detach() keeps the class. The memory stays the same.
        leaf = leaf.as_subclass(Tensor)
    return _make_parameter(leaf, value.is_floating_point() or value.is_complex(), value)


def _convert_like(new: Tensor, old: Any) -> Any:
    """Convert a tensor to a parameter if the old one is a parameter, else to a buffer."""
    # Integers cannot require grad, so they become buffers, as in a new TensorDictParams.
    kept = is_parameter(old) and (new.is_floating_point() or new.is_complex())
    return _make_parameter(new, old.requires_grad, old) if kept else as_buffer(new)


def _make_parameter(content: Tensor, requires_grad: bool, old: Any) -> Any:
    """Make a parameter that replaces a leaf."""
    if is_lazy(old):
        return uninitialized_like(old, content)
    made: Any = nn.Parameter(content, requires_grad=requires_grad)
    if isinstance(old, Contract):
        # Torch keeps only the class of an `UnbatchedTensor`.
        made._batch_size = old._batch_size
    return made


def _convert_in_place(container: Any, convert: Convert, buffers: dict[int, tuple[Tensor, Tensor]]) -> None:
    """Convert the leaves of a container to parameters and buffers, in place.

    `buffers` maps the id of a tensor to this tensor and its buffer, so that entries that share a buffer still do.
    """
    entries = container._entries
    for name, value in list(entries.items()):
        if isinstance(value, Tensor):
            leaf = buffers[id(value)][1] if id(value) in buffers else _make_leaf(value, convert)
            if leaf is not value:
                entries[name] = leaf
                if not is_parameter(leaf):
                    # The old tensor stays alive with its id.
                    buffers[id(value)] = value, leaf
        elif not value._is_non_tensor:
            _convert_in_place(value._wrapped_container(), convert, buffers)


def _flatten_names(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Flatten nested dicts in a state to dotted names."""
    if not any(isinstance(value, Mapping) and not isinstance(value, Contract) for value in state.values()):
        return state
    found: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, Mapping) and not isinstance(value, Contract):
            found.update({f"{name}.{rest}": leaf for rest, leaf in _flatten_names(value).items()})
        else:
            found[name] = value
    return found


def _check_holds_leaves(container: Any, path: Path) -> None:
    """Raise an error for containers that make their entries on reading, which nobody could train or register."""
    inner = container._wrapped_container()
    entries = inner._entries
    if inner._is_non_tensor or isinstance(inner, Tensor):
        return
    if not isinstance(entries, dict):
        raise ContainerExpected(
            f"{entry_of(path)}TensorDictParams holds parameters, and a {type(inner).__name__} makes its entries when "
            "they are read: pass to_tensordict() of it"
        )
    for name, value in entries.items():
        if type(value) is not Tensor and isinstance(value, Contract):
            _check_holds_leaves(value, (*path, name))


def _convert_state(state: dict[str, Any]) -> dict[str, Any]:
    """Convert the pickled state of a `TensorDictParams` of the reference to our state."""
    no_convert, hooks = state.get("no_convert"), state.get("_get_post_hook")
    convert = "buffer" if no_convert is True else no_convert or "auto"
    if convert not in _CHOICES or not isinstance(state[pickled_containers.PARAMS], Contract) or type(hooks) is not list:
        raise SaveError("the pickled TensorDictParams is inconsistent: its parts have unexpected types")
    own = set(vars(nn.Module())) - {"_parameters", "_buffers", "_modules"}
    kept = {name: value for name, value in state.items() if name in own}
    container: Any = state[pickled_containers.PARAMS]
    kind = type(container) if is_stored_as_class(container) else None
    ours = {
        "_modules": {},
        "_convert": convert,
        "_get_hooks": hooks,
        "_kind": kind,
        "_tensordict": container._wrapped_container(),
    }
    return {**kept, **ours}


def _settle_devices(container: Any) -> None:
    """Set the device of each container that has one to the device of its leaves."""
    leaves = container._leaves()
    if container._device is not None and leaves:
        container._device = leaves[0].device
    for value in container._entries.values():
        if is_node(value):
            _settle_devices(value)


class _Context(NamedTuple):
    """Everything about a `TensorDictParams` except its entries, for pytrees.

    container: the context of the wrapped container.
    trained: the number of parameters in the container.
    convert, kind: the attributes of the same names.
    """

    container: pytree.Context
    trained: int
    convert: Convert
    kind: Any


def _make_context(params: Any, container: pytree.Context) -> _Context:
    return _Context(container, _count_parameters(params._tensordict), params._convert, params._kind)


def _count_parameters(container: Any) -> int:
    return sum(map(is_parameter, container._leaves()))


def _flatten(params: Any) -> tuple[list[Any], _Context]:
    values, context = pytree.flatten_container(params._tensordict)
    return values, _make_context(params, context)


def _flatten_with_keys(params: Any) -> tuple[list[Any], _Context]:
    values, context = pytree._flatten_with_keys(params._tensordict)
    return values, _make_context(params, context)


def _unflatten(values: Iterable[Any], context: _Context) -> Any:
    """Rebuild a `TensorDictParams` from parameters of the same number; from computed tensors, a plain container."""
    made = pytree.unflatten_container(values, context.container)
    if made is None or not context.trained or _count_parameters(made) != context.trained:
        return made
    params = object.__new__(TensorDictParams)
    params._set_up(made, context.convert, context.kind)
    return params


pytree.register(TensorDictParams, _flatten, _unflatten, _flatten_with_keys)
