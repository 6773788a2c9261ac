"""Private members of containers that client programs reach."""

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
from tensordict.ops.applying import Applying, _Call, _size
from tensordict.ops.dims.indexing import Indexing
from tensordict.ops.dims.naming import Naming
from tensordict.ops.dims.stacking import stack_containers
from tensordict.ops.entries.locking import raise_locked
from tensordict.ops.entries.reading import NO_DEFAULT
from tensordict.ops.entries.write_plans import WritePlan
from tensordict.ops.linked_parts import part_of

if TYPE_CHECKING:
    from typing_extensions import Self


class ClientMembers(Indexing, Applying, Naming):
    """What programs call on containers although it is private; each says which do.

    TorchRL takes most of it, for speed: checks are left out where the caller has made them.
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
        """A container of entries that fit, which is not checked; other values than tensors and containers are.

        TorchRL: the steps of Gym, Brax and MuJoCo environments, `Composite.encode`, the target parameters of SAC.

        Raises:
            ValueError: entries were given in both ways.
        """
        if kwargs and source is not None:
            raise ValueError(f"entries come from a mapping or from keywords, not from both: got {list(kwargs)}")
        # Containers that live elsewhere than in a dict have no unchecked constructor.
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
        """`from_tensordict` of a tensorclass. TorchRL: the histories, texts and tokens of language models."""
        return cls.from_tensordict(tensordict, non_tensordict, safe)  # type: ignore[attr-defined,no-any-return]

    # --- reading and writing one entry ------------------------------------------------------------------------------

    def _get_str(self, key: str, default: object = NO_DEFAULT, **kwargs: object) -> Any:
        """The entry of this level at a name. TorchRL: `step_mdp`, `any_done`.

        Raises:
            KeyError: there is no such entry, and no default.
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
        """Write an entry of this level; with `validated`, a tensor or container is stored as it is.

        TorchRL: `step_mdp`, `any_done`.

        Raises:
            RuntimeError: the container is locked.
            KeyError: with `inplace`, there is no such entry.
        """
        if inplace:
            return self.set_(key, value, non_blocking=non_blocking)
        # A wrapper makes of a value what it holds: `TensorDictParams` a parameter, for one.
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
        """:meth:`apply` that keeps empty containers and, being `checked` by the caller, does not look at shapes.

        TorchRL: batched environments, transforms and collectors.
        """
        call = _Call(
            fn, named, nested_keys, default, filter_empty, call_on_nested, _size(batch_size), device, names,
            WritePlan() if inplace else None, is_leaf, checked,
        )  # fmt: skip
        return self._applied(call, others, propagate_lock, out)

    def _apply_nest(self, fn: Callable[..., Any], *others: Any, checked: bool = False, **kwargs: Any) -> Any:
        """:meth:`apply`. TorchRL: the expanded parameters of losses, the OpenX data sets."""
        if checked:
            return self._fast_apply(fn, *others, **{"filter_empty": None, **kwargs})
        return self.apply(fn, *others, **kwargs)

    # --- parts of the batch -----------------------------------------------------------------------------------------

    def _stack_onto_(self, list_item: Sequence[Any], dim: int) -> Self:
        """Write the stack of containers into the entries of this one; other entries than its own are left out.

        TorchRL: what a storage of tensors takes from lazy stacks.

        Raises:
            IndexError: there is no such dim.
            RuntimeError: the shapes do not fit.
        """
        own = set(self.keys(True, True, is_leaf_nontensor))
        if list_item and set(list_item[0].keys(True, True, is_leaf_nontensor)) != own:
            list_item = [item.select(*own, strict=False) for item in list_item]
        stack_containers(list_item, as_dim(dim, len(self._batch_size)), self)
        return self

    def _get_sub_tensordict(self, idx: object) -> Any:
        """The part of the batch at an index of integers and slices; what is written into it is written here.

        TorchRL: the VD4RL data sets, which add entries to a part; checkpoints of replay buffers, its tests.

        Raises:
            IndexError: the part would be a copy, and what is written into it would be lost.
        """
        source = self._wrapped_container()
        at = leaf_index(idx, self._batch_size)
        if is_basic(at) and type(source._entries) is dict:
            return self._rewrap(part_of(source, at))
        if is_basic(at) and hasattr(source._entries, "containers"):
            # The members of a lazy stack, or views of them.
            return self._index(idx)
        raise IndexError(
            f"the part at {idx!r} of a {type(self).__name__} would be a copy: read it with td[index], and write with "
            "td[index] = ..., update_at_ or set_at_"
        )

    @property
    def _has_exclusive_keys(self) -> bool:
        """Whether members of a lazy stack have entries that others lack. TorchRL: `ParallelEnv`, collectors."""
        members = getattr(self._wrapped_container()._entries, "containers", ())
        keys = [set(member.keys(True)) for member in members]
        return any(other != keys[0] for other in keys) or any(member._has_exclusive_keys for member in members)

    def _transform_keys(self, key_transform: Callable[[Any], Any]) -> Any:
        """A new container of the same leaves under other keys; entries whose new key is `None` are left out.

        Args:
            key_transform: makes the new key of an entry, which may be a nested one, of its name. It is called at every
                level.
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
        """Whether a dim has a name. TorchRL: the time dim of advantage estimators."""
        return self._names is not None

    def _erase_names(self) -> None:
        """Drop the names of the dims. TorchRL's tests."""
        self.names = None

    def _sync_all(self) -> None:
        """Wait for what was queued on the devices of the leaves. verl puts a function of its own in its place."""
        leaves = self._leaves()
        wait_for({leaf.device for leaf in leaves})

    def clear_refs_for_compile_(self) -> Self:
        """The container itself: what is locked can be returned by compiled code as it is. TorchRL: the losses."""
        return self
