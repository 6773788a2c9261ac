"""`TensorDict.map` and `map_iter`: cut a container into chunks, have a pool call a function, and join the results."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor

from tensordict.core.contract import Contract
from tensordict.core.exceptions import DimError, OptionError, UnsupportedEntryError, WorkerError
from tensordict.core.shapes import as_dim
from tensordict.io.saving.comparing import find_differences
from tensordict.io.saving.progress import progress_bar
from tensordict.io.specification import DICT, WRAPPED, specification_of, specify
from tensordict.memory.pickling import is_plain
from tensordict.parallel import shared_memory
from tensordict.parallel.jobs import Chunk, Job, name_chunk, raise_failure, select_entries_of
from tensordict.parallel.workers import CallersPool, WorkerPool


@dataclass(frozen=True, kw_only=True)
class MapOptions:
    """The arguments of `TensorDict.map` and `map_iter`."""

    dim: Any
    num_workers: int | None
    chunksize: int | None = None
    num_chunks: int | None = None
    pool: Any = None
    generator: torch.Generator | None = None
    max_tasks_per_child: int | None = None
    worker_threads: int = 1
    mp_start_method: str | None = None
    pbar: bool = False
    progress: bool | None = None
    timeout: float | None = None
    shuffle: bool = False
    ordered: bool = True
    out: Any = None


class ChunkedMap:
    """One call of `map` or `map_iter` with checked arguments. `results`, `iterate` and `join` start it.

    Raises:
        TypeError, ValueError: an argument has a wrong type or value.
        IndexError: the container does not have this dim.
    """

    def __init__(self, fn: Callable[[Any], Any], container: Any, options: MapOptions) -> None:
        if not callable(fn):
            raise TypeError(f"fn is a function of a container, got {type(fn).__name__}")
        self._options = options
        self.dim = as_dim(options.dim, len(container._batch_size))
        self._length = int(container._batch_size[self.dim])
        self._context = mp.get_context(options.mp_start_method)
        for name in ("num_workers", "num_chunks", "max_tasks_per_child", "worker_threads"):
            _check_count(name, getattr(options, name), 1)
        _check_count("chunksize", options.chunksize, 0)
        _check_timeout(options.timeout)
        if options.timeout is not None and options.pool is not None:
            raise OptionError(
                "timeout= ends a worker that takes too long, and the workers of a pool belong to its owner: "
                "pass num_workers= instead of pool=, or no timeout"
            )
        if options.chunksize is not None and options.num_chunks is not None:
            raise ValueError("chunksize and num_chunks both set the size of chunks: pass one of them")
        if options.pool is None and mp.current_process().daemon:
            raise WorkerError(
                "this process is itself a worker, of map, a Pool or a DataLoader, and may not start processes: call "
                "the function here, or pass a multiprocessing.pool.ThreadPool as pool"
            )
        self._writes_here = False
        if options.out is not None:
            self._check_out(container)
            self._writes_here = not shared_memory.shares_all(options.out)
        order = torch.randperm(self._length, generator=options.generator) if options.shuffle else None
        self._job = Job(fn, container, self.dim, order, None if self._writes_here else options.out)

    def _check_out(self, container: Contract) -> None:
        out = self._options.out
        if not isinstance(out, Contract):
            raise TypeError(f"out is a container, got {type(out).__name__}")
        if out._batch_size[self.dim : self.dim + 1] != (self._length,):
            raise ValueError(
                f"out has the batch size {list(out._batch_size)}; results for a container of batch size "
                f"{list(container._batch_size)}, cut along dim {self.dim}, need {self._length} elements there"
            )

    @property
    def has_single_elements(self) -> bool:
        """True if each chunk is a single element, without the dim (`chunksize=0`)."""
        return self._options.chunksize == 0

    def _make_chunks(self, workers: int) -> list[Chunk]:
        if self.has_single_elements:
            return [Chunk(at, at, None) for at in range(self._length)]
        size = self._options.chunksize
        if size is None:
            size = max(1, math.ceil(self._length / (self._options.num_chunks or workers)))
        # An empty container gives one empty chunk, so that the result has the entries that the function returns.
        starts = range(0, max(self._length, 1), size)
        return [Chunk(number, at, min(at + size, self._length)) for number, at in enumerate(starts)]

    def _make_pool(self) -> tuple[WorkerPool | CallersPool, list[Chunk]]:
        options = self._options
        if options.pool is not None:
            pool = CallersPool(options.pool, self._job)
            return pool, self._make_chunks(pool.count)
        count = options.num_workers or _count_processors()
        chunks = self._make_chunks(count)
        # Writes to a chunk in a worker must be visible here, as for a tensor that torch sends to a process. So move the
        # leaves to shared memory. Privately mapped files are not copied for this: writes to them stay in the worker.
        shared_memory.share(self._job.container, private_maps=False)
        base = int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=options.generator))
        workers = max(1, min(count, len(chunks)))
        limit, timeout = options.max_tasks_per_child, options.timeout
        return WorkerPool(
            self._context, self._job, workers, base, options.worker_threads, limit, len(chunks), timeout
        ), chunks

    def results(self, bounded: bool = False) -> Generator[tuple[Chunk, Any], None, None]:
        """Run the function over all chunks and iterate over (chunk, result) pairs, in order or as they arrive.

        Args:
            bounded: start new chunks only while there are fewer than two for each worker whose results the caller has
                not taken.
        """
        pool, chunks = self._make_pool()
        ahead = 2 * pool.count if bounded else len(chunks)
        waiting: dict[int, Any] = {}
        given = taken = 0

        def take() -> Chunk | None:
            nonlocal given
            if given == len(chunks) or given - taken >= ahead:
                return None
            given += 1
            return chunks[given - 1]

        with progress_bar(self._options.pbar or self._options.progress, "map", len(chunks), "chunk") as bar, pool:
            for chunk, done, value in pool.outcomes(take):
                if not done:
                    raise_failure(value, chunk)
                bar.add(1)
                waiting[chunk.number] = value
                del value
                # In order, the number of the next chunk is the count of results that the caller has taken.
                while (number := taken if self._options.ordered else chunk.number) in waiting:
                    yield chunks[number], waiting.pop(number)
                    taken += 1

    def iterate(self) -> Iterator[Any]:
        """Iterate over the results. New chunks start as the caller takes results."""
        with contextlib.closing(self.results(bounded=True)) as results:
            for _, value in results:
                yield value
                # Free the memory of the result before the next one is read.
                del value

    def join(self) -> Any:
        """Run all chunks and return the results joined along the dim, or `out`. Without results, return `None`."""
        out, found = self._options.out, []
        # The rows of all results, of which the first `filled` have arrived.
        whole: Any = None
        filled: Any = 0
        # The rows of one result.
        size: Any = 0
        for chunk, value in self.results():
            if out is not None:
                self._write(chunk, value)
            elif value is not None:
                self._check_joinable(value, chunk)
                if chunk.number == 0 and _is_dense(value) and not self.has_single_elements:
                    whole, size = self._make_whole(value), chunk.stop
                if whole is not None and filled == chunk.start and self._copy_into(whole, value, chunk):
                    filled = chunk.stop
                else:
                    found.append(value)
            # Free the memory of the result before the next one is read.
            del value
        if out is not None:
            return out
        if whole is not None and filled == self._length:
            return whole
        if filled:
            # One piece for each result, so that errors count results.
            found[:0] = whole.narrow(self.dim, 0, filled).split(size, self.dim)
        if not found:
            return None
        return torch.stack(found, self.dim) if self.has_single_elements else torch.cat(found, self.dim)

    def _make_whole(self, value: Contract) -> Any:
        """Return a container of the form of a result for the rows of all results, without content."""
        size = list(value._batch_size)
        size[self.dim] = self._length
        return value.new_empty(size)  # type: ignore[attr-defined]

    def _copy_into(self, whole: Any, value: Any, chunk: Any) -> bool:
        """Copy a result to its rows of `whole`. Return `False` if its form is another one."""
        rows = whole.narrow(self.dim, chunk.start, chunk.stop - chunk.start)
        if not _is_dense(value) or value._device != whole._device:
            return False
        if any(find_differences(specify(rows), specify(value), None)):
            return False
        rows.update_(value)
        return True

    def _write(self, chunk: Chunk, value: object) -> None:
        """Write a result into `out`, unless the worker has done it in shared memory."""
        if not self._writes_here:
            return
        out, at = self._options.out, self._job.index_of(chunk)
        try:
            if (part := select_entries_of(out[at], value)) is not None:
                out[at] = part
        except Exception as error:
            name_chunk(error, chunk)
            raise

    def _check_joinable(self, value: object, chunk: Chunk) -> None:
        if not isinstance(value, (Tensor, Contract)):
            raise TypeError(
                f"{chunk}: the function returned a {type(value).__name__}; map joins containers or tensors, and "
                "map_iter returns any results one by one"
            )
        shape = value._batch_size if isinstance(value, Contract) else value.shape
        if len(shape) < self.dim + (not self.has_single_elements):
            raise DimError(
                f"{chunk}: the result has the {'batch size' if isinstance(value, Contract) else 'shape'} "
                f"{list(shape)}, which has too few dims to be joined along dim {self.dim}; map_iter returns the "
                "results one by one"
            )


def _is_dense(value: object) -> bool:
    """Return True if a result is a container, and all in it are plain tensors and dense containers."""
    if not isinstance(value, Contract) or value._is_non_tensor:
        return False
    try:
        form = specification_of(value)
    except UnsupportedEntryError:
        return False
    if form.is_tensorclass:
        return _is_dense(form.entries[WRAPPED])
    return form.kind == DICT and all(
        is_plain(entry) if type(entry) is Tensor else _is_dense(entry) for entry in form.entries.values()
    )


def _count_processors() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_count(name: str, value: object, least: int) -> None:
    if value is None:
        return
    if type(value) is not int:
        raise TypeError(f"{name} is an int, got {value!r} of type {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} is at least {least}, got {value}")


def _check_timeout(timeout: object) -> None:
    if timeout is None:
        return
    if type(timeout) not in (int, float):
        raise TypeError(f"timeout is a number of seconds, or None, got {timeout!r} of type {type(timeout).__name__}")
    if not timeout > 0:  # type: ignore[operator]
        raise ValueError(f"timeout is a number of seconds above 0, or None, got {timeout}")


def check_shuffle(shuffle: bool, index_with_generator: bool) -> None:
    """Raise if chunks are shuffled and all cut in advance.

    Raises:
        OptionError: `shuffle=True` and `index_with_generator=False`.
    """
    if shuffle and not index_with_generator:
        raise OptionError("shuffled chunks are cut one at a time: shuffle=True needs index_with_generator=True")
