"""The mixin of `map` and `map_iter`, which call a function on chunks of a container in worker processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

import torch

from tensordict.core.signatures import refuse_unknown, spells
from tensordict.ops.storing.leaves import Leaves
from tensordict.parallel.chunking import ChunkedMap, MapOptions, check_shuffle

if TYPE_CHECKING:
    from typing_extensions import Self, TypedDict, Unpack

    class _Map(TypedDict, total=False):
        """The options that `map` and `map_iter` share."""

        chunksize: int | None
        num_chunks: int | None
        pool: object
        generator: torch.Generator | None
        max_tasks_per_child: int | None
        worker_threads: int
        pbar: bool
        progress: bool | None
        mp_start_method: str | None
        timeout: float | None

    _Result = TypeVar("_Result")


class Mapping(Leaves):
    """`map` and `map_iter`."""

    def map(
        self,
        fn: Callable[[Self], _Result],
        dim: int = 0,
        num_workers: int | None = None,
        chunksize: int | None = None,
        num_chunks: int | None = None,
        pool: object = None,
        generator: torch.Generator | None = None,
        max_tasks_per_child: int | None = None,
        worker_threads: int = 1,
        mp_start_method: str | None = None,
        *,
        out: object = None,
        index_with_generator: bool = False,
        pbar: bool = False,
        progress: bool | None = None,
        timeout: float | None = None,
    ) -> _Result:
        """Call a function on chunks of this container in worker processes, and join the results.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> def doubled(chunk):
            ...     return chunk.set("y", chunk["x"] * 2)
            >>> td = TensorDict(x=torch.arange(6), batch_size=[6])
            >>> td.map(doubled, num_workers=2, mp_start_method="fork")["y"]
            tensor([ 0,  2,  4,  6,  8, 10])

        Args:
            fn: takes an unlocked container, a part of this one. Returns a container, a tensor or `None`. With the start
                method `"spawn"`, or with `pool`, the workers must be able to import it.
            dim: the batch dim along which to split this container and to join the results.
            num_workers: the number of processes, at most one per chunk. The default is the number of processors.
            out: a container to write the results into, with as many elements along the dim as this one. Entries that
                only `out`, or only a result, has are ignored. If `out` is shared or memory-mapped, the workers write to
                it directly.
            chunksize: the number of elements per chunk; the last chunk may have fewer. With 0, `fn` gets single
                elements without the dim, and the results are stacked.
            num_chunks: the number of chunks, instead of `chunksize`. The default is one per worker.
            pool: a `multiprocessing.Pool` to use instead of new processes. It determines the number of workers, their
                seeds, threads and start method. A `ThreadPool` runs `fn` in this process.
            generator: draws the seed. Worker `i` gets the seed plus `i`.
            max_tasks_per_child: replace a worker by a new process after this many chunks.
            worker_threads: the number of torch's threads in each worker.
            index_with_generator: accepted for compatibility. Chunks are always indexed on demand.
            pbar: show a progress bar (needs tqdm).
            progress: the same as `pbar`, under the name that the saving methods use. By default, terminals and
                notebooks show a bar after one second.
            mp_start_method: `"fork"`, `"spawn"` or `"forkserver"`. The default is the one of the system.
            timeout: the number of seconds that a worker may take for one chunk; `None` for no limit. The time for
                starting the worker, and for waiting until a result is fetched, does not count. A worker that takes
                longer gets SIGTERM, and SIGKILL 5 seconds later. Processes that `fn` has started itself go on. Excludes
                `pool`, whose workers belong to the caller.

        Returns:
            `out`, if given. Otherwise the results except `None`, joined in the order of the chunks; `None` if all are.

        Raises:
            Exception: `fn` raised it. The error names the chunk.
            WorkerTimeoutError: a chunk took longer than `timeout`. The error names the chunk, and is a `TimeoutError`
                too. All workers are terminated. Their writes into this container or into `out` remain.
            WorkerError: a worker was killed or exited; or this process is itself a worker.
            TypeError, ValueError, IndexError: an argument, or a result, cannot be used.

        The leaves are moved to shared memory, unless they are in shared memory or in a file already. Writes of `fn`
        into a chunk therefore change this container. Leaves of a file that is open for reading only (an archive, a
        consolidated or safetensors file) are not moved, and writes to them stay in the worker. Results return through
        shared memory. Results that are in shared memory or in a file already are not copied.
        """
        options = MapOptions(
            dim=dim, num_workers=num_workers, chunksize=chunksize, num_chunks=num_chunks, pool=pool,
            generator=generator, max_tasks_per_child=max_tasks_per_child, worker_threads=worker_threads,
            mp_start_method=mp_start_method, pbar=pbar, progress=progress, timeout=timeout, out=out,
        )  # fmt: skip
        return ChunkedMap(fn, self, options).join()  # type: ignore[no-any-return]

    @spells(map, without="out")
    def map_iter(
        self,
        fn: Callable[[Self], _Result],
        dim: int = 0,
        num_workers: int | None = None,
        *,
        shuffle: bool = False,
        index_with_generator: bool = True,
        ordered: bool = True,
        **options: Unpack[_Map],
    ) -> Iterator[_Result]:
        """Call a function on chunks of this container in worker processes, and iterate over the results.

        Each worker computes at most two chunks ahead of the caller. The workers end when the iterator is exhausted,
        closed or deleted.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(x=torch.arange(5), batch_size=[5])
            >>> def total(chunk):
            ...     return int(chunk["x"].sum())
            >>> list(td.map_iter(total, num_workers=2, chunksize=2, mp_start_method="fork"))
            [1, 5, 4]

        Args:
            fn: as for :meth:`map`, but it may return any object that can be pickled.
            dim: as for `map`.
            num_workers: as for `map`.
            shuffle: give every chunk copies of random elements, in an order that `generator` draws.
            index_with_generator: must be `True` for a shuffle.
            ordered: return the results in the order of the chunks; with `False`, as soon as each arrives.
            chunksize: as for `map`; with 0, each result belongs to a single element.
            timeout: as for `map`. The error is raised when you ask for the next result.
            num_chunks, pool, generator, max_tasks_per_child, worker_threads, pbar, progress, mp_start_method: as for
                `map`.

        Returns:
            an iterator over the results of `fn`, including `None`. Result tensors in shared memory or in a file stay
            there, so that a returned part of this container is still a part of it. All others get their own memory.

        Raises:
            Exception: as for :meth:`map`. The call checks the arguments; the iterator raises all other errors.
        """
        check_shuffle(shuffle, index_with_generator)
        refuse_unknown(Mapping.map_iter, options)
        given = MapOptions(dim=dim, num_workers=num_workers, shuffle=shuffle, ordered=ordered, **options)
        return ChunkedMap(fn, self, given).iterate()
