"""`TensorDictSequential`: run modules one after the other on a container."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

from torch import nn

from tensordict.core.contract import Contract
from tensordict.core.keys import Key, path_of, unravel_key_list
from tensordict.nn.dispatch import entries_as_container
from tensordict.nn.module import C, Inplace, TensorDictModule, TensorDictModuleBase, WrapModule, output_of
from tensordict.nn.skipping import must_skip
from tensordict.ops.collection import TensorCollection

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["TensorDictSequential"]


class TensorDictSequential(TensorDictModule):
    """Modules that read and write containers, run one after the other.

    Its in-keys are the keys that are read and that no earlier module writes. Its out-keys are all keys that are
    written. It is indexed, sliced and changed like an `nn.Sequential` or, if made from a mapping, by name; its keys are
    updated. If a module raises an error, the container keeps what earlier modules wrote; with `inplace=False` or
    `"empty"` it stays unchanged.

    Args:
        *modules: modules or functions that take a container and return one, a list of them, or a mapping from names to
            them. The keys of functions are unknown.
        partial_tolerant: run only modules whose in-keys all exist. On a lazy stack, run them on the members that have
            the keys.
        selected_out_keys: the out-keys to write; all by default. See :meth:`select_out_keys`.
        inplace: `True` writes the result into the given container, `False` into a new one without batch size, `"empty"`
            into an empty one of its kind; the given container then stays unchanged. `None` leaves the choice to the
            modules. `forward(..., tensordict_out=)` takes precedence.

    Raises:
        TypeError: one of the modules cannot be called.
        ValueError: none of the modules writes a selected key.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import TensorDictModule, TensorDictSequential
        >>> net = TensorDictSequential(
        ...     TensorDictModule(nn.Linear(3, 4), in_keys=["obs"], out_keys=["hidden"]),
        ...     TensorDictModule(lambda h, scale: h * scale, in_keys=["hidden", "scale"], out_keys=["action"]),
        ... )
        >>> net.in_keys, net.out_keys
        (['obs', 'scale'], ['hidden', 'action'])
        >>> net(TensorDict(obs=torch.zeros(3), scale=torch.tensor(2.0)))["action"].shape
        torch.Size([4])
    """

    partial_tolerant: bool = False

    def __init__(
        self,
        *modules: object,
        partial_tolerant: bool = False,
        selected_out_keys: Sequence[Key] | None = None,
        inplace: Inplace | None = None,
    ) -> None:
        held = _as_modules(modules)
        in_keys, out_keys = self._compute_in_and_out_keys(list(held._modules.values()))
        super().__init__(held, in_keys, out_keys, inplace=inplace)
        self._assign(partial_tolerant=partial_tolerant)
        if selected_out_keys is not None:
            self.select_out_keys(*unravel_key_list(selected_out_keys))

    def _compute_in_and_out_keys(self, modules: Sequence[Any]) -> tuple[list[Key], list[Key]]:
        """Return the keys that no earlier module writes, and all written keys in the order of their last writes."""
        in_keys: dict[Key, None] = {}
        out_keys: dict[Key, None] = {}
        for module in modules:
            for key in module.in_keys:
                if not _is_within(key, out_keys):
                    in_keys[key] = None
            for key in module.out_keys:
                out_keys.pop(key, None)
                out_keys[key] = None
        return list(in_keys), list(out_keys)

    def _update_keys(self) -> None:
        """Compute the keys again after the modules changed."""
        in_keys, out_keys = self._compute_in_and_out_keys(self._list_modules())
        self.in_keys, self.out_keys = in_keys, out_keys

    # --- selection ----------------------------------------------------------------------------------------------------

    def select_out_keys(self, *selected_out_keys: Key) -> Self:
        """Write only some of the out-keys. Other results of the modules do not reach the container.

        Args:
            *selected_out_keys: some of the out-keys.

        Returns:
            The module itself.

        Raises:
            ValueError: none of the modules writes a key.
        """
        object.__setattr__(self, "_out_keys_apparent", self._selectable(selected_out_keys))
        return self

    def select_subsequence(
        self, in_keys: Sequence[Key] | None = None, out_keys: Sequence[Key] | None = None
    ) -> TensorDictSequential:
        """Select the modules that can run on given keys, and that are needed to compute wanted keys.

        Args:
            in_keys: the given keys; all of :attr:`in_keys` by default.
            out_keys: the wanted keys; all of :attr:`out_keys` by default.

        Returns:
            A new sequence of the same modules. Nested sequences are cut in the same way. Nested sequences of a subclass
            are kept whole, because its constructor may need other arguments.

        Raises:
            ValueError: no module is left.

        Example:
            >>> from tensordict.nn import TensorDictModule, TensorDictSequential
            >>> net = TensorDictSequential(
            ...     TensorDictModule(lambda x: x + 1, in_keys=["x"], out_keys=["y"]),
            ...     TensorDictModule(lambda x: x * 2, in_keys=["x"], out_keys=["z"]),
            ... )
            >>> net.select_subsequence(out_keys=["z"]).out_keys
            ['z']
        """
        known = dict.fromkeys(unravel_key_list(self.in_keys if in_keys is None else in_keys))
        wanted = dict.fromkeys(unravel_key_list(self.out_keys_source if out_keys is None else out_keys))
        kept: list[tuple[str, Any]] = []
        for name, module in _list_items(self.module):
            if type(module) is TensorDictSequential:
                try:
                    module = module.select_subsequence(in_keys=list(known))
                except ValueError:
                    continue
            if all(_is_within(key, known) for key in module.in_keys):
                kept.append((name, module))
                known.update(dict.fromkeys(module.out_keys))
        needed: list[tuple[str, Any]] = []
        for name, module in reversed(kept):
            useful = [key for key in module.out_keys if any(_overlaps(key, other) for other in wanted)]
            if useful:
                if type(module) is TensorDictSequential:
                    module = module.select_subsequence(out_keys=useful)
                needed.append((name, module))
                wanted.update(dict.fromkeys(module.in_keys))
        if not needed:
            raise ValueError(
                f"No modules left after selection. Make sure that in_keys and out_keys are coherent: of "
                f"{list(self.in_keys)} and {list(self.out_keys_source)}, got {in_keys} and {out_keys}"
            )
        return self._part(needed[::-1])

    def _part(self, modules: Sequence[tuple[str, nn.Module]]) -> TensorDictSequential:
        """Return a sequence of some of the modules; they keep their names, if they have names."""
        values = [module for _, module in modules]
        options: dict[str, Any] = {"partial_tolerant": True} if self.partial_tolerant else {}
        if self.inplace is not None:
            options["inplace"] = self.inplace
        return self._part_class(values)(
            *([dict(modules)] if isinstance(self.module, nn.ModuleDict) else values), **options
        )

    def _part_class(self, modules: Sequence[nn.Module]) -> Callable[..., TensorDictSequential]:
        return type(self)

    # --- running ------------------------------------------------------------------------------------------------------

    def forward(
        self,
        tensordict: Any = None,
        *args: Any,
        tensordict_out: Any = None,
        _requires_sample: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the modules on a container.

        Args:
            tensordict: a container, or (as by :class:`dispatch`) the entry at the first in-key.
            *args: the entries at the other in-keys; after a container, `tensordict_out`.
            tensordict_out: a container that receives the out-keys. `tensordict` then stays unchanged.
            **kwargs: entries by name.

        Returns:
            The container with the results, or the results.
        """
        if not isinstance(tensordict, TensorCollection):
            return entries_as_container(self, TensorDictSequential.forward, (tensordict, *args), tensordict_out, kwargs)
        if must_skip(self, tensordict):
            return tensordict
        if args:
            if len(args) > 1 or tensordict_out is not None:
                raise TypeError(f"{type(self).__name__} takes a container and `tensordict_out`, got more values")
            (tensordict_out,) = args
        if kwargs:
            raise RuntimeError(
                f"{type(self).__name__} does not support keyword arguments other than 'tensordict_out' or in_keys: "
                f"{self.in_keys}. Got {list(kwargs)} instead."
            )
        own = self.__dict__
        inplace = self.inplace
        if tensordict_out is None and own.get("_out_keys_apparent") is None and (inplace is None or inplace is True):
            result = self._through(tensordict, self._list_modules(), _requires_sample)
            return result if result is tensordict or inplace is None else tensordict.update(result)
        result = self._through(tensordict.copy(), self._list_modules(), _requires_sample)
        if tensordict_out is None:
            tensordict_out = output_of(tensordict, inplace)
        return tensordict_out.update(result.select(*self.out_keys, strict=False))

    def _through(self, tensordict: C, modules: Sequence[Callable[[C], C]], _requires_sample: bool | None = None) -> C:
        """Run modules one after the other, and return the result of the last one."""
        if self.partial_tolerant:
            for module in modules:
                tensordict = run_where_possible(module, tensordict)
            return tensordict
        for module in modules:
            tensordict = module(tensordict)
        return tensordict

    def _list_modules(self) -> list[Any]:
        """Return the modules as a list."""
        held: Any = self._modules["module"]
        return list(held._modules.values())

    # --- access to the modules, as in `nn.Sequential` or `nn.ModuleDict` ----------------------------------------------

    def __len__(self) -> int:
        return len(self.module)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._list_modules())

    def __contains__(self, item: Any) -> bool:
        if isinstance(self.module, nn.ModuleDict):
            return item in self.module
        return any(module is item for module in self)

    @overload
    def __getitem__(self, index: slice) -> TensorDictSequential: ...
    @overload
    def __getitem__(self, index: int | str) -> Any: ...
    def __getitem__(self, index: int | slice | str) -> Any:
        if isinstance(index, slice):
            return self._part(_list_items(self.module)[index])
        return self.module[self._place(index)]

    def __setitem__(self, index: int | slice | str, tensordict_module: Any) -> None:
        if isinstance(index, slice):
            modules = _list_items(self.module)
            modules[index] = [("", _as_module(module)) for module in tensordict_module]
            self._replace(modules)
        elif isinstance(self.module, nn.ModuleDict) and isinstance(index, str):
            self.module[index] = _as_module(tensordict_module)
        else:
            self.module[self._place(index)] = _as_module(tensordict_module)
        self._update_keys()

    def __delitem__(self, index: int | slice | str) -> None:
        if isinstance(index, slice):
            modules = _list_items(self.module)
            del modules[index]
            self._replace(modules)
        else:
            del self.module[self._place(index)]
        self._update_keys()

    def append(self, module: object) -> Self:
        """Append a module, and return the sequence. If it was made from a mapping, use `net[name] = module` instead."""
        return self.insert(len(self), module)

    def extend(self, modules: Iterable[object]) -> Self:
        """Append several modules, and return the sequence."""
        for module in modules:
            self.append(module)
        return self

    def insert(self, index: int, module: object) -> Self:
        """Insert a module before position `index`, and return the sequence."""
        if isinstance(self.module, nn.ModuleDict):
            raise TypeError("the modules of this sequence have names: add one with net[name] = module")
        self.module.insert(index, _as_module(module))
        self._update_keys()
        return self

    def pop(self, index: int | str) -> Any:
        """Remove a module and return it."""
        module = self[index]
        del self[index]
        return module

    def _place(self, index: Any) -> Any:
        """Return the name of a module if the modules have names, else its non-negative position."""
        if isinstance(self.module, nn.ModuleDict):
            return index if isinstance(index, str) else list(self.module)[index]
        return range(len(self.module))[index]

    def _replace(self, modules: Sequence[tuple[str, nn.Module]]) -> None:
        if isinstance(self.module, nn.ModuleDict):
            self.module = nn.ModuleDict({name or str(i): module for i, (name, module) in enumerate(modules)})
        else:
            self.module = nn.ModuleList([module for _, module in modules])


def _as_modules(modules: tuple[object, ...]) -> nn.ModuleList | nn.ModuleDict:
    named: Any = modules[0] if len(modules) == 1 else None
    if isinstance(named, (Mapping, nn.ModuleDict)):
        return nn.ModuleDict({name: _as_module(module) for name, module in named.items()})
    if isinstance(named, (list, tuple, nn.ModuleList)):
        modules = tuple(named)
    return nn.ModuleList([_as_module(module) for module in modules])


def _as_module(module: object) -> nn.Module:
    if not callable(module):
        raise TypeError(
            f"a sequence is made of modules and functions that take a container, got {type(module).__name__}"
        )
    if isinstance(module, nn.Module) and TensorDictModuleBase.is_tdmodule_compatible(module):
        return module
    return WrapModule(module)


def _list_items(modules: nn.ModuleList | nn.ModuleDict) -> list[tuple[str, Any]]:
    return list(modules._modules.items())


def _is_within(key: Key, written: Container[Key]) -> bool:
    """Return whether an entry, or a container that holds it, is written."""
    if key in written or type(key) is str:
        return key in written
    return key[0] in written or any(key[:end] in written for end in range(2, len(key)))


def _overlaps(one: Key, other: Key) -> bool:
    """Return whether two keys are equal, or one of them is a container that holds the other."""
    if one == other:
        return True
    left, right = path_of(one), path_of(other)
    shared = min(len(left), len(right))
    return left[:shared] == right[:shared]


def run_where_possible(module: Any, tensordict: C, **options: object) -> Any:
    """Run a module on a container that has its in-keys, or on those members of a lazy stack that have them."""
    paths = [path_of(key) for key in module.in_keys]
    if all(map(tensordict._has, paths)):
        return module(tensordict, **options)
    members: Sequence[Contract] | None = getattr(tensordict, "tensordicts", None)
    for member in members or ():
        if all(map(member._has, paths)):
            module(member, **options)
    return tensordict
