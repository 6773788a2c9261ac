"""Mapping: a function over chunks of a container, by worker processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

import torch

from tensordict.ops.storing.leaves import Leaves
from tensordict.parallel.chunking import ChunkedMap, MapOptions, check_shuffle

if TYPE_CHECKING:
    from typing_extensions import Self

    _Result = TypeVar("_Result")


class Mapping(Leaves):
    """`map` and `map_iter`."""

    def map(
        self,
        fn: Callable[[Self], _Result],
        dim: int = 0,
        num_workers: int | None = None,
        *,
        out: object = None,
        chunksize: int | None = None,
        num_chunks: int | None = None,
        pool: object = None,
        generator: torch.Generator | None = None,
        max_tasks_per_child: int | None = None,
        worker_threads: int = 1,
        index_with_generator: bool = False,
        pbar: bool = False,
        progress: bool | None = None,
        mp_start_method: str | None = None,
        timeout: float | None = None,
    ) -> _Result:
        """Call a function with chunks of this container in worker processes, and join the results.

        The leaves are moved to shared memory, unless they are there or in a file already: processes see this memory,
        and what `fn` writes into a chunk in place is written into this container. Leaves of a file that was opened to
        be read only (an archive, a consolidated or safetensors file) stay there, and such writes stay in the worker.
        Results come back through memory that both processes see; what lies in shared memory or in a file is not copied
        on the way.

        Args:
            fn: takes a container, a part of this one, that is not locked; gives a container, a tensor or `None`. With
                the start method `"spawn"`, or a `pool`, it has to be importable by the workers.
            dim: the batch dim along which chunks are cut and results are joined.
            num_workers: how many processes are started, at most one per chunk; the number of processors by default.
            out: a container that the results are written into, with as many elements along the dim as this one. One
                that is shared or memory-mapped is written to by the workers, and nothing comes back. Entries that only
                `out`, or only a result, has are left alone.
            chunksize: how many elements a chunk has; the last may have fewer. 0 takes single elements out of the dim,
                and stacks the results.
            num_chunks: how many chunks there are, in the place of `chunksize`; one per worker by default.
            pool: a `multiprocessing.Pool` that is used in the place of new processes. Those it has decide on the number
                of workers, their seeds, threads and start method. A `ThreadPool` does the work in this process.
            generator: what the seeds are drawn from: worker `i` gets the drawn number plus `i`.
            max_tasks_per_child: after so many chunks, a new process takes the place of a worker.
            worker_threads: the number of torch's threads in each worker.
            index_with_generator: accepted for compatibility: each chunk is cut when its turn comes.
            pbar: show a progress bar (needs tqdm).
            progress: the same, as the methods that save call it; by default on terminals and in notebooks, after a
                second.
            mp_start_method: `"fork"`, `"spawn"` or `"forkserver"`; that of the system by default.
            timeout: how many seconds a worker may take for one chunk; `None` for any number. The time counts from the
                moment at which the worker begins the chunk: its start does not count, nor does the time for which a
                result waits to be taken. The worker that takes longer is told to end (SIGTERM), and killed 5 seconds
                later; processes that `fn` has started itself are left alone. Exclusive with `pool`, whose workers
                belong to the caller.

        Returns:
            `out`; otherwise the results that are not `None`, joined in the order of the chunks, or `None`.

        Raises:
            Exception: what `fn` raised, with the chunk named.
            WorkerTimeoutError: a chunk took longer than `timeout`; it is named. This is a `TimeoutError`, too. All
                workers are ended, and what they have written into this container or into `out` stays.
            WorkerError: a worker was killed, or ended otherwise; or this process is a worker itself.
            TypeError, ValueError, IndexError: an argument, or a result, cannot be used.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> def doubled(chunk):
            ...     return chunk.set("y", chunk["x"] * 2)
            >>> td = TensorDict(x=torch.arange(6), batch_size=[6])
            >>> td.map(doubled, num_workers=2, mp_start_method="fork")["y"]
            tensor([ 0,  2,  4,  6,  8, 10])
        """
        options = MapOptions(
            dim=dim,
            num_workers=num_workers,
            chunksize=chunksize,
            num_chunks=num_chunks,
            pool=pool,
            generator=generator,
            max_tasks_per_child=max_tasks_per_child,
            worker_threads=worker_threads,
            pbar=pbar or progress,
            mp_start_method=mp_start_method,
            timeout=timeout,
            out=out,
        )
        return ChunkedMap(fn, self, options).join()  # type: ignore[no-any-return]

    def map_iter(
        self,
        fn: Callable[[Self], _Result],
        dim: int = 0,
        num_workers: int | None = None,
        *,
        shuffle: bool = False,
        chunksize: int | None = None,
        num_chunks: int | None = None,
        pool: object = None,
        generator: torch.Generator | None = None,
        max_tasks_per_child: int | None = None,
        worker_threads: int = 1,
        index_with_generator: bool = True,
        pbar: bool = False,
        progress: bool | None = None,
        mp_start_method: str | None = None,
        ordered: bool = True,
        timeout: float | None = None,
    ) -> Iterator[_Result]:
        """The results of a function for chunks of this container, one by one; as :meth:`map` but for what is said here.

        Workers are ahead of the caller by two chunks each at most. They end with the iterator: when it is exhausted,
        closed or deleted.

        Args:
            fn: as for `map`; its results may be anything that can be pickled.
            dim: as for `map`.
            num_workers: as for `map`.
            shuffle: let every chunk have elements from anywhere, in random order, copied for it.
            chunksize: as for `map`; 0 gives the results of single elements.
            num_chunks: as for `map`.
            pool: as for `map`.
            generator: draws the order of a shuffle, too.
            max_tasks_per_child: as for `map`.
            worker_threads: as for `map`.
            index_with_generator: has to be `True` for a shuffle.
            pbar, progress: as for `map`.
            mp_start_method: as for `map`.
            ordered: give the results in the order of the chunks; otherwise as they come.
            timeout: as for `map`. A worker that takes longer is noticed when the next result is asked for.

        Returns:
            an iterator over what `fn` gives, `None` too. Tensors that `fn` gives in shared memory or in a file stay
            there, so that a part of this container comes back as one; all others are over memory of their own.

        Raises:
            Exception: as :meth:`map`; arguments are checked by the call, and what goes wrong later is raised by the
                iterator.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(x=torch.arange(5), batch_size=[5])
            >>> def total(chunk):
            ...     return int(chunk["x"].sum())
            >>> list(td.map_iter(total, num_workers=2, chunksize=2, mp_start_method="fork"))
            [1, 5, 4]
        """
        check_shuffle(shuffle, index_with_generator)
        options = MapOptions(
            dim=dim,
            num_workers=num_workers,
            chunksize=chunksize,
            num_chunks=num_chunks,
            pool=pool,
            generator=generator,
            max_tasks_per_child=max_tasks_per_child,
            worker_threads=worker_threads,
            pbar=pbar or progress,
            mp_start_method=mp_start_method,
            timeout=timeout,
            shuffle=shuffle,
            ordered=ordered,
        )
        return ChunkedMap(fn, self, options).iterate()
