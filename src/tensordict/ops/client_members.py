"""Private methods of containers that client programs such as TorchRL call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tensordict.core import makers
from tensordict.core.contract import Contract
from tensordict.core.devices import as_device, wait_for
from tensordict.core.indices import is_basic, leaf_index
from tensordict.core.key_views import IsLeaf, is_leaf_nontensor
from tensordict.core.keys import path_of
from tensordict.core.shapes import as_dim, as_size
from tensordict.ops.applying import Applying, _as_size, _Call
from tensordict.ops.dims.indexing import Indexing
from tensordict.ops.dims.naming import Naming
from tensordict.ops.dims.stacking import stack_containers
from tensordict.ops.entries.locking import raise_locked
from tensordict.ops.entries.reading import NO_DEFAULT
from tensordict.ops.entries.write_plans import WritePlan
from tensordict.ops.linked_parts import link_part

if TYPE_CHECKING:
    from typing_extensions import Self


class ClientMembers(Indexing, Applying, Naming):
    """Private methods that client programs call. Each docstring names the programs.

    TorchRL calls most of them for speed: they skip checks that the caller has made already.
    """

    # --- making containers ------------------------------------------------------------------------------------------

    @classmethod
    def _new_unsafe(
        cls,
        source: Mapping[str, object] | None = None,
        batch_size: object = None,
        device: object = None,
        names: Sequence[str | None] | None = None,
        non_blocking: bool | None = None,
        lock: bool = False,
        **kwargs: object,
    ) -> Any:
        """Make a container without checking that tensors and containers fit. Other values are checked.

        TorchRL: the steps of Gym, Brax and MuJoCo environments, `Composite.encode`, the target parameters of SAC.

        Raises:
            ValueError: both `source` and keyword arguments contain entries.
        """
        if kwargs and source is not None:
            raise ValueError(f"entries come from a mapping or from keywords, not from both: got {list(kwargs)}")
        # Containers in a file or store lack an unchecked constructor.
        make = getattr(cls, "_make", None) or makers.dense
        out = make({}, as_size(batch_size), None if device is None else as_device(device), None)
        entries = out._entries
        for key, value in (kwargs if source is None else source).items():
            if type(key) is str and (type(value) is Tensor or isinstance(value, (Tensor, Contract))):
                entries[key] = value
            else:
                out._write(path_of(key), value)
        if names is not None:
            out.names = names
        if lock:
            out._lock_tree()
        return out

    @classmethod
    def _from_tensordict(
        cls, tensordict: object, non_tensordict: Mapping[str, object] | None = None, safe: bool = True
    ) -> Self:
        """Call `from_tensordict` of a tensorclass. TorchRL: the histories, texts and tokens of language models."""
        return cls.from_tensordict(tensordict, non_tensordict, safe)  # type: ignore[attr-defined,no-any-return]

    # --- reading and writing one entry ------------------------------------------------------------------------------

    def _get_str(self, key: str, default: object = NO_DEFAULT, **kwargs: object) -> Any:
        """Return the entry of a name at this level. TorchRL: `step_mdp`, `any_done`.

        Raises:
            KeyError: the container lacks the entry, and `default` is not given.
        """
        if kwargs:
            return self._wrapped_container().get(key, default, **kwargs)
        value = self._entries.get(key)
        if value is None and default is NO_DEFAULT:
            raise self._make_missing_error(key)
        return default if value is None else value

    def _set_str(
        self,
        key: str,
        value: object,
        *,
        inplace: bool,
        validated: bool,
        ignore_lock: bool = False,
        non_blocking: bool = False,
    ) -> Self:
        """Write an entry of this level. With `validated`, a tensor or container is stored without checks.

        TorchRL: `step_mdp`, `any_done`.

        Raises:
            RuntimeError: the container is locked.
            KeyError: with `inplace`, the container lacks the entry.
        """
        if inplace:
            return self.set_(key, value, non_blocking=non_blocking)
        # A wrapper may convert values: `TensorDictParams`, for example, makes parameters of them.
        trusted = validated and type(key) is str and type(self)._wrapped_container is Contract._wrapped_container
        if not trusted or (type(value) is not Tensor and not isinstance(value, (Tensor, Contract))):
            return self.set(key, value, non_blocking=non_blocking)
        if self._locked and not ignore_lock:
            raise_locked(f"set the entry {key!r}")
        self._entries[key] = value
        return self

    # --- calling a function on every leaf ---------------------------------------------------------------------------

    def _fast_apply(
        self,
        fn: Callable[..., Any],
        *others: object,
        batch_size: object = None,
        device: object = NO_DEFAULT,
        names: object = NO_DEFAULT,
        inplace: bool = False,
        call_on_nested: bool = False,
        default: object = NO_DEFAULT,
        named: bool = False,
        nested_keys: bool = False,
        filter_empty: bool | None = False,
        is_leaf: IsLeaf | None = None,
        propagate_lock: bool = False,
        out: object = None,
        checked: bool = True,
    ) -> Any:
        """Call :meth:`apply`, but keep empty containers, and do not check shapes if the caller has `checked` them.

        TorchRL: batched environments, transforms and collectors.
        """
        call = _Call(
            fn, named, nested_keys, default, filter_empty, call_on_nested, _as_size(batch_size), device, names,
            WritePlan() if inplace else None, is_leaf, checked,
        )  # fmt: skip
        return self._run_apply(call, others, propagate_lock, out)

    def _apply_nest(self, fn: Callable[..., Any], *others: Any, checked: bool = False, **kwargs: Any) -> Any:
        """Call :meth:`apply`. TorchRL: the expanded parameters of losses, the OpenX data sets."""
        if checked:
            return self._fast_apply(fn, *others, **{"filter_empty": None, **kwargs})
        return self.apply(fn, *others, **kwargs)

    # --- parts of the batch -----------------------------------------------------------------------------------------

    def _stack_onto_(self, list_item: Sequence[Any], dim: int) -> Self:
        """Write the stack of containers into the entries of this one. Entries that this one lacks are skipped.

        TorchRL: writing lazy stacks to a storage of tensors.

        Raises:
            IndexError: the dim is out of range.
            RuntimeError: the shapes do not fit.
        """
        own = set(self.keys(True, True, is_leaf_nontensor))
        if list_item and set(list_item[0].keys(True, True, is_leaf_nontensor)) != own:
            list_item = [item.select(*own, strict=False) for item in list_item]
        stack_containers(list_item, as_dim(dim, len(self._batch_size)), self)
        return self

    def _get_sub_tensordict(self, idx: object) -> Any:
        """Return the part of the batch at an index of integers and slices. Writing into the part writes into `self`.

        TorchRL: the VD4RL data sets, which add entries to a part; checkpoints of replay buffers, its tests.

        Raises:
            IndexError: the part would be a copy, so that writes into it would be lost.
        """
        source = self._wrapped_container()
        if isinstance(idx, range) and idx.start >= 0 and idx.stop >= 0 and idx.step > 0:
            idx = slice(idx.start, idx.stop, idx.step)
        at = leaf_index(idx, self._batch_size)
        if is_basic(at) and isinstance(source._entries, dict):
            return self._rewrap(link_part(source, at))
        if is_basic(at) and hasattr(source._entries, "containers"):
            # Indexing a lazy stack returns its members, or views of them.
            return self._index(idx)
        raise IndexError(
            f"the part at {idx!r} of a {type(self).__name__} would be a copy: read it with td[index], and write with "
            "td[index] = ..., update_at_ or set_at_"
        )

    @property
    def _has_exclusive_keys(self) -> bool:
        """True if members of a lazy stack have entries that others lack. TorchRL: `ParallelEnv`, collectors."""
        members = getattr(self._wrapped_container()._entries, "containers", ())
        keys = [set(member.keys(True)) for member in members]
        return any(other != keys[0] for other in keys) or any(member._has_exclusive_keys for member in members)

    def _transform_keys(self, key_transform: Callable[[Any], Any]) -> Any:
        """Return a new container of the same leaves under other keys.

        Args:
            key_transform: takes the name of an entry, at every level. Returns the new (nested) key, or `None` to drop
                the entry.
        """
        source = self._wrapped_container()
        if (members := source._members(or_template=True)) is not None:
            return source._restack([member._transform_keys(key_transform) for member in members])
        result = source.empty()
        for name, value in source.items():
            key = key_transform(name)
            if key is not None:
                inner = isinstance(value, Contract) and not value._is_non_tensor
                result.set(key, value._transform_keys(key_transform) if inner else value)
        return result

    # --- names and state --------------------------------------------------------------------------------------------

    def _has_names(self) -> bool:
        """Return whether any dim has a name. TorchRL: the time dim of advantage estimators."""
        return self._names is not None

    def _erase_names(self) -> None:
        """Drop the names of the dims. TorchRL's tests."""
        self.names = None

    def _sync_all(self) -> None:
        """Wait for queued operations on the devices of the leaves. verl replaces this method by its own function."""
        leaves = self._leaves()
        wait_for({leaf.device for leaf in leaves})

    def clear_refs_for_compile_(self) -> Self:
        """Return this container: compiled code can return locked containers unchanged. TorchRL: the losses."""
        return self
