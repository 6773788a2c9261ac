"""`save_checkpoint` and `load_checkpoint`: the state of a training run in one save.

A checkpoint is an archive of one container. Each object has an entry, the value that its `state_dict()` returned.
`_checkpoint` describes the entries, `_rng` holds the states of the random number generators. If a state has sharded
tensors, the checkpoint is a folder that all ranks write (`parallel/sharded_checkpoints.py`).
"""

from __future__ import annotations

import os
import pathlib
import random
import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from tensordict.containers.dense import TensorDict
from tensordict.containers.nontensor import NonTensorData
from tensordict.core import torch_internals as internals
from tensordict.core.contract import Contract
from tensordict.core.exceptions import SaveError, StateError, UnsupportedEntryError, add_note, suggest
from tensordict.io import checkpoint_files
from tensordict.io.formats.archive import load_archive, plan_archive
from tensordict.io.formats.directory import FolderOptions
from tensordict.io.formats.loading import LoadOptions
from tensordict.io.snapshots import StateCopier, map_tensors, start_save, wait_for_earlier_save
from tensordict.io.values import NotJson, encode
from tensordict.memory.mapped import PathLike
from tensordict.memory.names import local_path
from tensordict.memory.storable import is_sharded

if TYPE_CHECKING:
    from concurrent.futures import Future

    from tensordict.core.annotations import No, On
    from tensordict.parallel.sharded_checkpoints import RankParts

_RNG = "_rng"
# The kinds of entries: the state of an object, a container, or a plain value.
_STATE, _CONTAINER, _VALUE = "state", "container", "value"
# Stands for a tensor that ranks save together, with its name, in the state of a module or an optimizer.
_PART = "%part"


# --- saving -----------------------------------------------------------------------------------------------------------


@overload
def save_checkpoint(
    path: PathLike,
    /,
    *,
    keep: int | None = ...,
    rng: bool = ...,
    durable: bool = ...,
    overwrite: bool = ...,
    return_early: No = ...,
    **objects: Any,
) -> pathlib.Path: ...
@overload
def save_checkpoint(
    path: PathLike,
    /,
    *,
    keep: int | None = ...,
    rng: bool = ...,
    durable: bool = ...,
    overwrite: bool = ...,
    return_early: On,
    **objects: Any,
) -> Future[pathlib.Path]: ...
def save_checkpoint(
    path: PathLike,
    /,
    *,
    keep: int | None = None,
    rng: bool = True,
    durable: bool = False,
    overwrite: bool = False,
    return_early: bool = False,
    **objects: Any,
) -> pathlib.Path | Future[pathlib.Path]:
    """Save the state of a training run, in one commit and without pickle.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from tensordict import load_checkpoint, save_checkpoint
        >>> net = torch.nn.Linear(3, 2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = save_checkpoint(folder + "/last.tdz", model=net, step=7)
        ...     load_checkpoint(folder + "/last.tdz", model=net)["step"]
        7

    A process that is killed at any moment leaves the old checkpoint or the new one.

    Args:
        path: the file, which is an archive (see :meth:`TensorDict.memmap`) under any name. With `keep`, the folder of
            the checkpoints.
        keep: add a checkpoint to the folder, as `step-00000100.tdz`, and remove the oldest ones, so that so many
            remain. Only checkpoints that this function has added to the folder are removed, and one of the same step is
            replaced. Needs an int `step=`.
        rng: also save the states of the random number generators of torch (CPU and all CUDA devices), NumPy and Python.
        durable: return when all files have reached the disk, so that the checkpoint survives a loss of power.
        overwrite: replace an older checkpoint at `path`, and nothing else.
        return_early: copy all tensors to memory, save them in the background, and return a
            `concurrent.futures.Future`. The next call waits for this save. If nobody has asked the future for its
            error, the next call raises it.
        **objects: by name, modules, optimizers, schedulers, gradient scalers, data loaders and other objects with
            `state_dict()`; generators of torch; containers; and plain values: numbers, texts, `None`, tensors, arrays,
            and dicts, lists and tuples of these.

    Returns:
        the path of the checkpoint, or a future of it.

    Raises:
        UnsupportedEntryError: a state or a value cannot be saved without pickle. The error names it.
        SaveError: `path` exists, without `overwrite`; it is not a checkpoint; or another process is saving there.
        OSError: a file cannot be written. The old checkpoint is unchanged.
        TransferError: saving sharded tensors failed on another rank.

    If a state has sharded tensors (`DTensor`, as FSDP2 makes them), all ranks of `torch.distributed` make this call,
    with one `path` on a file system that they share, and the checkpoint is a folder. `torch.distributed.checkpoint`
    plans which rank writes what, so that another number of ranks can load it. Modules and optimizers are saved once,
    all else by each rank. Without sharded tensors (as with `DistributedDataParallel`), call it on one rank.
    """
    wait_for_earlier_save()
    for name in objects:
        if name.startswith("_"):
            raise ValueError(f"the name {name!r} of an object begins with '_', as names of the checkpoint itself do")
    copier = StateCopier(return_early)
    states = {name: _state_of(obj) for name, obj in objects.items()}
    together = any(_has_sharded(state) for state in states.values())
    header: dict[str, Any] = {
        "format": checkpoint_files.FORMAT,
        "version": checkpoint_files.VERSION,
        "kinds": {name: _kind_of(obj) for name, obj in objects.items()},
        "shapes": {name: _shapes_of(obj) for name, obj in objects.items() if isinstance(obj, Optimizer)},
        "step": objects["step"] if type(objects.get("step")) is int else None,
    }
    folder = local_path(path)
    target = folder
    if keep is not None:
        if type(keep) is not int or keep < 1:
            raise ValueError(f"keep is the number of checkpoints that stay, 1 or more, got {keep!r}")
        if header["step"] is None or header["step"] < 0:
            raise ValueError(
                f"keep= names the checkpoints by their step: pass step=, an int, got {objects.get('step')!r}"
            )
        target = f"{folder}/{checkpoint_files.make_name(header['step'], together)}"
        header["order"] = max((found.order for found in checkpoint_files.list_kept(folder)), default=0) + 1
    check = partial(checkpoint_files.check_free, replaces=overwrite or keep is not None)
    if together:
        write = _plan_parts(objects, states, rng, copier, header, target, check, durable)
    else:
        if rng:
            states[_RNG] = _rng_states()
        entries = {name: _make_entry(name, state, copier) for name, state in states.items()}
        entries[checkpoint_files.ENTRY] = NonTensorData(header)
        check(target)
        options = FolderOptions(durable=durable, progress=False, copy_existing=True, returns_nothing=True)
        write = plan_archive(TensorDict(entries), target, options)
    copier.wait()

    def run() -> pathlib.Path:
        write()
        if keep is not None and (not together or dist.get_rank() == 0):
            checkpoint_files.remove_old(folder, keep, target)
        return pathlib.Path(target)

    return start_save(run) if return_early else run()


def _state_of(obj: Any) -> Any:
    kind = _kind_of(obj)
    if kind != _STATE:
        return obj
    return obj.get_state() if isinstance(obj, torch.Generator) else obj.state_dict()


def _kind_of(obj: Any) -> str:
    if isinstance(obj, Contract) and not isinstance(obj, nn.Module):
        return _CONTAINER
    return _STATE if isinstance(obj, torch.Generator) or hasattr(obj, "state_dict") else _VALUE


def _shapes_of(optimizer: Optimizer) -> list[list[list[int]]]:
    return [[list(param.shape) for param in group["params"]] for group in optimizer.param_groups]


def _has_sharded(state: Any) -> bool:
    found: list[bool] = []
    if not isinstance(state, Contract):
        map_tensors(state, lambda path, value: found.append(is_sharded(value)))
    return any(found)


def _make_entry(name: str, state: Any, copier: StateCopier) -> Any:
    """Return the entry for a state or a value, after checking that it can be saved.

    Raises:
        UnsupportedEntryError: it cannot be saved without pickle.
    """
    if isinstance(state, Contract):
        container: Any = state
        return container._map(lambda leaf: copier.take((), leaf))
    taken = map_tensors(state, copier.take)
    try:
        encode(taken)
    except NotJson as error:
        raise UnsupportedEntryError(
            f"{name!r} cannot be saved: {error}. A checkpoint holds objects with state_dict(), tensors, arrays, "
            "numbers, texts, None, and dicts, lists and tuples of these"
        ) from error
    return NonTensorData(taken)


def _plan_parts(
    objects: dict[str, Any],
    states: dict[str, Any],
    rng: bool,
    copier: StateCopier,
    header: dict[str, Any],
    target: str,
    check: Callable[[str], None],
    durable: bool,
) -> Callable[[], None]:
    """Prepare a checkpoint that all ranks write, and return the function that writes it."""
    # This module imports torch.distributed.checkpoint, which takes a second.
    from tensordict.parallel.sharded_checkpoints import RankParts, open_group, save_parts

    group = open_group()
    parts = RankParts()
    for name, obj in objects.items():
        if isinstance(obj, (nn.Module, Optimizer)):
            states[name] = map_tensors(states[name], partial(_take_part, name, parts, copier))
    if rng:
        states[_RNG] = _rng_states()
    values = TensorDict({name: _make_entry(name, state, copier) for name, state in states.items()})
    header["ranks"] = dist.get_world_size()
    return partial(save_parts, target, group, parts, values, header, check, durable)


def _take_part(name: str, parts: RankParts, copier: StateCopier, path: tuple[Any, ...], value: Any) -> Any:
    if not isinstance(value, Tensor):
        return copier.take(path, value)
    full = repr((name, *path))
    parts.wholes[full] = value.detach()
    parts.locals[full] = copier.take(path, value.to_local() if is_sharded(value) else value)  # type: ignore[attr-defined]
    return {_PART: full}


# --- loading ----------------------------------------------------------------------------------------------------------


def load_checkpoint(path: PathLike, /, *, rng: bool = True, **objects: Any) -> dict[str, Any]:
    """Load what :func:`save_checkpoint` saved into objects, and return the values.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from tensordict import load_checkpoint, save_checkpoint
        >>> net, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = save_checkpoint(folder, model=net, step=7, keep=3)
        ...     checkpoint = load_checkpoint(folder, model=other)
        >>> path.name, checkpoint["step"], bool((net.weight == other.weight).all())
        ('step-00000007.tdz', 7, True)

    Args:
        path: the checkpoint, or a folder of checkpoints (see `keep`), whose last save is loaded.
        rng: also restore the states of the random number generators, if they were saved.
        **objects: the objects to load into, by the names that they were saved with: objects with `load_state_dict()`,
            generators of torch, containers. Tensors are copied to the devices of the object. `None` loads nothing.

    Returns:
        the saved values by name, and the states and containers for which no object is given. The tensors of these lie
        over a private map of the file. States of sharded modules are left out.

    Raises:
        StateError: an entry is missing, or does not fit its object. The error names both. In a sharded checkpoint, an
            entry that does not fit raises a `TransferError` on all ranks.
        FileNotFoundError: there is nothing at `path`.
        SaveError: it is not a checkpoint, or it is broken.

    The call checks all modules, optimizers and containers before it changes one of them. It loads other objects first,
    whose `load_state_dict` may fail half-way. A sharded checkpoint can be loaded by any number of ranks, and without
    `torch.distributed`. If that is initialized, all ranks make this call. Ranks that did not save get the values of
    rank 0.
    """
    wait_for_earlier_save()
    saved = _Saved(checkpoint_files.find_checkpoint(local_path(path)))
    loads = [_Load(name, obj, saved) for name, obj in objects.items() if obj is not None]
    saved.read_parts(loads)
    # Objects that cannot be checked come first.
    for load in sorted(loads, key=lambda load: load.is_checked):
        load.run()
    if rng and _RNG in saved.entries:
        saved.restore_rng()
    return {name: saved.value_of(name) for name in saved.kinds if name not in objects and not saved.has_parts(name)}


class _Saved:
    """An open checkpoint.

    targets: the tensors that ranks read together, by name.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.header = checkpoint_files.read_header(path)
        self.kinds: dict[str, str] = self.header["kinds"]
        self.targets: dict[str, Tensor] = {}
        self._sharded = None
        is_one_of_many = dist.is_available() and dist.is_initialized()
        # The number of ranks is 0 without `torch.distributed`.
        self._rank, self._ranks = (dist.get_rank(), dist.get_world_size()) if is_one_of_many else (0, 0)
        if os.path.isdir(path):
            from tensordict.parallel.sharded_checkpoints import ShardedCheckpoint

            self._sharded = ShardedCheckpoint(path, self.header)
            self.entries = self._sharded.load_values(self._rank)
        else:
            self.entries = load_archive(path, LoadOptions())
        for name in self.kinds:
            if type(name) is not str or name not in self.entries:
                raise SaveError(f"{path!r} is broken: it has no entry {name!r}, which its description names")

    def value_of(self, name: str) -> Any:
        """Return an entry. Tensors in plain values are copied to memory."""
        value = self.entries[name]
        return map_tensors(value, StateCopier(True).take) if self.kinds[name] == _VALUE else value

    def has_parts(self, name: str) -> bool:
        """Return True for a state whose tensors the ranks saved together."""
        found: list[object] = []
        if self._sharded is not None and self.kinds[name] == _STATE:
            map_tensors(self.entries[name], lambda path, value: found.append(value), is_leaf=_is_part)
        return bool(found)

    def form_of(self, part: str) -> Any:
        """Return the size and the dtype of a tensor that the ranks saved together."""
        if self._sharded is None or part not in self._sharded.tensors:
            raise SaveError(f"{self.path!r} is broken: it has no tensor {part!r}")
        return self._sharded.tensors[part]

    def read_parts(self, loads: list[_Load]) -> None:
        """Check the loads, and then fill the targets, together with the other ranks if there are any."""

        def check() -> None:
            for load in loads:
                load.check()

        if self._sharded is None:
            check()
            return
        from tensordict.parallel.sharded_checkpoints import open_group
        from tensordict.parallel.verdicts import attempt, settle

        if self._ranks == 0:
            check()
            self._sharded.read(self.targets, None)
            return
        group = open_group()
        try:
            settle(attempt(check, self._rank)[1], group, "load_checkpoint")
            self._sharded.read(self.targets, group)
        finally:
            dist.destroy_process_group(group)

    def restore_rng(self) -> None:
        if self._sharded is not None and self._sharded.ranks != max(self._ranks, 1):
            warnings.warn(
                f"{self.path!r} was saved by {self._sharded.ranks} ranks, whose number differs here: the states of "
                "random number generators are not restored",
                stacklevel=3,
            )
            return
        try:
            _restore_rng(self.entries[_RNG])
        except (LookupError, TypeError, ValueError, RuntimeError) as error:  # not compiled: it loads
            raise SaveError(
                f"{self.path!r} is broken: its states of random number generators do not fit: {error}"
            ) from error


class _Load:
    """The load of one object: `check` changes nothing, and `run` loads.

    Raises:
        StateError: the checkpoint has no state of this name, or the object cannot load one.
    """

    def __init__(self, name: str, obj: Any, saved: _Saved) -> None:
        self._name, self._obj, self._saved = name, obj, saved
        if name not in saved.kinds:
            raise StateError(
                f"{saved.path!r} has no entry {name!r}; it has {list(saved.kinds)}{suggest(name, saved.kinds)}"
            )
        kind = _CONTAINER if isinstance(obj, Contract) and not isinstance(obj, nn.Module) else _STATE
        if not (isinstance(obj, torch.Generator) or hasattr(obj, "load_state_dict")):
            raise StateError(
                f"{name!r} is a {type(obj).__name__} without load_state_dict(): read the value from the result, "
                f"load_checkpoint(...)[{name!r}]"
            )
        if saved.kinds[name] != kind:
            raise StateError(f"{name!r} was saved as a {saved.kinds[name]}, and a {type(obj).__name__} loads a {kind}")
        self.is_checked = isinstance(obj, (nn.Module, Optimizer))
        self._state: Any = None

    def check(self) -> None:
        """Make the state for the object, and check that the object takes it."""
        try:
            self._prepare(self._saved.entries[self._name])
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:  # not compiled: it loads
            raise StateError(f"{self._name!r} does not fit {self._saved.path!r}: {error}") from error

    def _prepare(self, entry: Any) -> None:
        if isinstance(self._obj, Contract) and not isinstance(self._obj, nn.Module):
            self._state = entry.state_dict()
            return
        if isinstance(self._obj, Optimizer):
            self._check_groups()
        current = self._current_tensors(entry)
        self._state = map_tensors(entry, lambda path, value: self._place(value, current.get(path)), is_leaf=_is_leaf)
        if isinstance(self._obj, nn.Module):
            with _Rehearsal():
                self._obj.load_state_dict(self._state)

    def run(self) -> None:
        """Load the state into the object."""
        try:
            if isinstance(self._obj, torch.Generator):
                self._obj.set_state(self._state)
            else:
                self._obj.load_state_dict(self._state)
        except Exception as error:
            add_note(error, f"while {self._name!r} was loaded from {self._saved.path!r}")
            raise

    def _check_groups(self) -> None:
        """Raise an error unless the parameters of the optimizer have the groups and shapes of the saved ones."""
        shapes, own = self._saved.header["shapes"].get(self._name), _shapes_of(self._obj)
        if shapes is None or shapes == own:
            return
        if len(shapes) != len(own):
            raise ValueError(f"it has {len(own)} groups of parameters, and {len(shapes)} in the checkpoint")
        for at, (theirs, ours) in enumerate(zip(shapes, own, strict=True)):
            if len(theirs) != len(ours):
                raise ValueError(f"group {at} has {len(ours)} parameters, and {len(theirs)} in the checkpoint")
            for number, (old, new) in enumerate(zip(theirs, ours, strict=True)):
                if old != new:
                    raise ValueError(f"parameter {number} of group {at} has shape {new}, and {old} in the checkpoint")

    def _current_tensors(self, state: Any) -> dict[tuple[Any, ...], Tensor]:
        """Return the tensors of the object whose devices and placements the loaded ones take, by their paths."""
        if isinstance(self._obj, nn.Module):
            return {(key,): value for key, value in self._obj.state_dict().items() if isinstance(value, Tensor)}
        if not isinstance(self._obj, Optimizer):
            return {}
        found: dict[tuple[Any, ...], Tensor] = {}
        for theirs, ours in zip(state["param_groups"], self._obj.param_groups, strict=True):
            for number, param in zip(theirs["params"], ours["params"], strict=True):
                for key in state["state"].get(number, ()):
                    found["state", number, key] = param
        return found

    def _place(self, value: Any, current: Tensor | None) -> Any:
        """Return a loaded tensor on the device, or with the placement, of the current one of its shape."""
        in_place = isinstance(self._obj, nn.Module)
        if _is_part(value):
            form = self._saved.form_of(value[_PART])
            size, dtype = form.size, form.properties.dtype
            if current is None or current.shape != size or current.is_meta:
                target = torch.empty(size, dtype=dtype, device="cpu")
            else:
                # The ranks read into the tensors of a module, which may be too large for a copy.
                target = current.detach() if in_place else torch.empty_like(current, dtype=dtype)
            self._saved.targets[value[_PART]] = target
            return target
        if not isinstance(value, Tensor):
            return value.copy()
        if is_sharded(current) and current.shape == value.shape:  # type: ignore[union-attr]
            from torch.distributed.tensor import distribute_tensor

            mesh, placements = current.device_mesh, current.placements  # type: ignore[union-attr]
            return distribute_tensor(value.to(mesh.device_type), mesh, placements, src_data_rank=None)
        if in_place:
            return value
        on_device = current is not None and current.shape == value.shape and not current.is_cpu and not current.is_meta
        return value.to(current.device) if on_device else value.clone()  # type: ignore[union-attr]


class _Rehearsal(TorchFunctionMode):
    """Lets `Module.load_state_dict` make all its checks, and run all its hooks, without writing to a tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_ or func is internals.foreach_copy_:
            return args[0]
        return func(*args, **(kwargs or {}))


def _is_part(value: Any) -> bool:
    return type(value) is dict and value.keys() == {_PART}


def _is_leaf(value: Any) -> bool:
    return isinstance(value, (Tensor, np.ndarray)) or _is_part(value)


# --- random numbers ---------------------------------------------------------------------------------------------------


def _rng_states() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return {
        "torch": torch.get_rng_state(),
        "cuda": cuda,
        "numpy": np.random.get_state(legacy=False),
        "python": random.getstate(),
    }


def _restore_rng(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"].clone())
    for device, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state.clone(), device)
    np.random.set_state(states["numpy"])
    random.setstate(states["python"])
