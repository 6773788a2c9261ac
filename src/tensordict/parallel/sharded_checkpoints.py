"""Checkpoints of sharded modules: a folder that all ranks write, by way of `torch.distributed.checkpoint` (DCP).

DCP plans which rank writes which part of a tensor, and which parts a rank reads, whatever the number of ranks is then.
This module stores the parts. DCP's own files contain pickles, and loading them runs code. These files do not::

    checkpoint.json    describes the checkpoint and lists the parts of each tensor; written last
    shards-00000.tdz   the parts that rank 0 wrote, an archive
    rank-00000.tdz     the values of rank 0, an archive
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult

from tensordict.core import makers
from tensordict.core.exceptions import SaveError
from tensordict.io import checks
from tensordict.io.checkpoint_files import FILE
from tensordict.io.formats.archive import load_archive, plan_archive
from tensordict.io.formats.directory import FolderOptions
from tensordict.io.formats.loading import LoadOptions
from tensordict.io.saving.transaction import TreeTransaction
from tensordict.memory import files
from tensordict.parallel.verdicts import attempt, exchange, settle

_FILES = re.compile(r"(shards|rank)-\d{5,}\.tdz")
_CALL = "save_checkpoint"


class RankParts:
    """The tensors of a checkpoint that ranks save together.

    wholes: the tensors by name, equal on all ranks: `DTensor`s, and plain tensors that one of the ranks writes.
    locals: the parts of this rank in memory.
    """

    def __init__(self) -> None:
        self.wholes: dict[str, Tensor] = {}
        self.locals: dict[str, Tensor] = {}


class _Storage:
    """The steps of DCP's writers and readers that this format does not need."""

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


# --- saving -----------------------------------------------------------------------------------------------------------


def open_group() -> dist.ProcessGroup:
    """Make a group of all ranks for one save or load. A thread may use it while the program uses others.

    Raises:
        SaveError: `torch.distributed` is not initialized.
    """
    if not dist.is_initialized():
        raise SaveError("sharded tensors are saved by all ranks: call torch.distributed.init_process_group first")
    return cast("dist.ProcessGroup", dist.new_group(backend="gloo"))


def save_parts(
    path: str,
    group: dist.ProcessGroup,
    parts: RankParts,
    values: Any,
    header: dict[str, Any],
    check: Callable[[str], None],
    durable: bool,
) -> None:
    """Write a checkpoint to a folder, as all ranks of the group do at the same time.

    Args:
        path: the folder, the same on all ranks. It replaces an older checkpoint in one step.
        group: the ranks. This function closes the group.
        parts: the tensors.
        values: the container with the values of this rank.
        header: describes the checkpoint.
        check: raises an error if the old folder may not be replaced.
        durable: flush all files to the disk.

    Raises:
        TransferError: another rank failed.
        SaveError: the folder cannot be replaced.
    """
    rank = dist.get_rank(group)
    try:
        with contextlib.ExitStack() as stack:
            transaction = TreeTransaction(path, True, durable, check, parents=True)

            def begin() -> str:
                stack.enter_context(transaction)
                os.mkdir(transaction.staged)
                return transaction.staged

            staged, problem = attempt(begin, rank) if rank == 0 else ("", None)
            settle(problem, group, _CALL)
            # Rank 0 tells where the others write.
            staged = exchange(staged or "", group, _CALL)[0].why

            def write() -> None:
                _write_archive(values, f"{staged}/rank-{rank:05d}.tdz", durable)
                save(
                    cast("dict[str, Any]", parts.wholes),
                    storage_writer=_PartWriter(staged, header, durable),
                    planner=_SavePlanner(parts.locals),
                    process_group=group,
                )

            settle(attempt(write, rank)[1], group, _CALL)
            settle(attempt(transaction.commit, rank)[1] if rank == 0 else None, group, _CALL)
    finally:
        dist.destroy_process_group(group)


def _write_archive(container: Any, path: str, durable: bool) -> None:
    plan_archive(
        container, path, FolderOptions(durable=durable, progress=False, existsok=False, returns_nothing=True)
    )()


class _SavePlanner(DefaultSavePlanner):
    """Plans by the tensors of all ranks, and writes the parts in memory, which are copies in an asynchronous save."""

    def __init__(self, parts: Mapping[str, Tensor]) -> None:
        super().__init__(flatten_state_dict=False)
        self._parts = parts

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._parts[index.fqn]


class _PartWriter(_Storage, StorageWriter):
    """Writes the parts of this rank to one archive; rank 0 also writes the list of all parts."""

    def __init__(self, folder: str, header: dict[str, Any], durable: bool) -> None:
        self._folder, self._header, self._durable = folder, header, durable

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        file = f"shards-{dist.get_rank():05d}.tdz"
        tensors = {str(number): planner.resolve_data(item) for number, item in enumerate(plan.items)}
        if tensors:
            _write_archive(
                makers.dense(dict(tensors), torch.Size(()), None, None), f"{self._folder}/{file}", self._durable
            )
        written: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        written.set_result(
            [
                WriteResult(item.index, cast("Tensor", tensors[str(number)]).nbytes, (file, str(number)))
                for number, item in enumerate(plan.items)
            ]
        )
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places = {
            (item.index.fqn, tuple(item.index.offset or ())): item.storage_data for found in results for item in found
        }
        tensors = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            chunks = [
                [list(part.offsets), list(part.sizes), *places[name, tuple(part.offsets)]] for part in tensor.chunks
            ]
            tensors[name] = {"dtype": str(tensor.properties.dtype), "size": list(tensor.size), "chunks": chunks}
        content = json.dumps({**self._header, "tensors": tensors}).encode()
        files.write_new(f"{self._folder}/{FILE}", content, self._durable)


# --- loading ----------------------------------------------------------------------------------------------------------


class ShardedCheckpoint:
    """An open checkpoint in a folder.

    Args:
        path: the folder.
        header: its description.

    Raises:
        FileNotFoundError: a file is missing.
        SaveError: the description is broken, or does not fit the files.
    """

    def __init__(self, path: str, header: Mapping[str, Any]) -> None:
        self.path = path
        self.tensors: dict[str, TensorStorageMetadata] = {}
        self._places: dict[MetadataIndex, Tensor] = {}
        self._archives: dict[str, Any] = {}
        try:
            self.ranks = int(header["ranks"])
            for name, form in header["tensors"].items():
                self._add(name, form)
        except (KeyError, TypeError, AttributeError, ValueError) as error:  # not compiled: it reads files
            raise SaveError(f"{path}/{FILE} is broken: {error}") from error

    def _add(self, name: str, form: Mapping[str, Any]) -> None:
        """Add a tensor, after checking that its parts have the described form and make up the whole."""
        size, chunks = torch.Size(form["size"]), []
        dtype = checks.DTYPES[form["dtype"]]
        for offsets, sizes, file, key in form["chunks"]:
            part = self._archive(file)[key]
            ends = [start + count for start, count in zip(offsets, sizes, strict=True)]
            if min(offsets, default=0) < 0 or any(end > most for end, most in zip(ends, size, strict=True)):
                raise SaveError(f"a part of {name!r} lies outside of its size {list(size)}")
            if part.dtype is not dtype or list(part.shape) != sizes:
                raise SaveError(
                    f"a part of {name!r} should be {dtype} of shape {sizes}, and is {part.dtype} of shape "
                    f"{list(part.shape)} in {file!r}"
                )
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            self._places[MetadataIndex(name, torch.Size(offsets))] = part
        places = [tuple(chunk.offsets) for chunk in chunks if chunk.sizes.numel()]
        if len(places) != len(set(places)) or sum(chunk.sizes.numel() for chunk in chunks) != math.prod(size):
            raise SaveError(f"the parts of {name!r} do not make up its size {list(size)}")
        self.tensors[name] = TensorStorageMetadata(TensorProperties(dtype), size, chunks)

    def _archive(self, file: str) -> Any:
        if file not in self._archives:
            if not _FILES.fullmatch(file):
                raise SaveError(f"{file!r} is no file of a checkpoint")
            self._archives[file] = load_archive(f"{self.path}/{file}", LoadOptions())
        return self._archives[file]

    def load_values(self, rank: int) -> Any:
        """Load the container with the values of a rank. Ranks that were not there get the values of rank 0."""
        return self._archive(f"rank-{rank if rank < self.ranks else 0:05d}.tdz")

    def read(self, targets: dict[str, Any], group: dist.ProcessGroup | None) -> None:
        """Read tensors into `targets`, in place. All ranks of the group make this call."""
        with warnings.catch_warnings():
            # Without ranks, torch warns that it reads alone.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            load(
                targets,
                storage_reader=_PartReader(self.tensors, self._places),
                planner=DefaultLoadPlanner(flatten_state_dict=False),
                process_group=group,
                no_dist=group is None,
            )


class _PartReader(_Storage, StorageReader):
    def __init__(self, tensors: dict[str, TensorStorageMetadata], places: dict[MetadataIndex, Tensor]) -> None:
        self._tensors, self._places = tensors, places

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(dict(self._tensors))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        for item in plan.items:
            ranges = zip(item.storage_offsets, item.lengths, strict=True)
            part = self._places[item.storage_index][tuple(slice(start, start + count) for start, count in ranges)]
            target = planner.resolve_tensor(item).detach()
            target.copy_(part)
            planner.commit_tensor(item, target)
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done
