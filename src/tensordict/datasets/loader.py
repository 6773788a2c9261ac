"""`DatasetLoader`: batches of rows for training, read ahead by threads or processes, and resumable after any batch."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from tensordict.containers.concatenated import LazyConcatenatedTensorDict
from tensordict.core.contract import is_node
from tensordict.datasets.dataset import Dataset, Segment
from tensordict.datasets.order import Order, ShardShuffle
from tensordict.datasets.read_ahead import ShardsAhead
from tensordict.memory import rows as scattered

_FIELDS = {"epoch", "start", "seed", "shuffle", "rows", "segments", "shards"}
# The bytes of shards that are fetched ahead from a URL.
_READ_AHEAD = 64 << 20


class DatasetLoader:
    """Iterates over a data set, or any container, by batches. One iteration is one epoch.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.datasets import DatasetLoader
        >>> data = TensorDict({"x": torch.arange(6)}, [6])
        >>> loader = DatasetLoader(data, 2, seed=1)
        >>> batches = iter(loader)
        >>> first = next(batches)["x"]
        >>> again = DatasetLoader(data, 2, seed=1)
        >>> again.load_state_dict(loader.state_dict())
        >>> rest = [batch["x"] for batch in again]
        >>> torch.cat([first, *rest]).sort().values
        tensor([0, 1, 2, 3, 4, 5])

    Args:
        data: the container; its rows run along the first batch dim.
        batch_size: the number of rows of a batch on each rank.
        shuffle: visit the rows in another order in each epoch: `True` mixes all rows. A number visits the shards of a
            data set or a concatenation in random order, and mixes the rows of so many shards at a time. At a URL, each
            shard is then fetched once in an epoch.
        seed: the seed of the order.
        drop_last: leave out smaller batches, so that all ranks have the same number of batches.
        num_workers: the number of processes that read; with 0, a thread of this process reads ahead.
        prefetch: the number of batches that are read ahead (by each worker). With 0 and without workers, batches are
            read on demand.
        read_ahead: how many bytes of shards are fetched ahead from a URL, many shards at once, unless `shuffle=True`.
            It should exceed the bytes that the link passes while one request is answered. One shard is always fetched
            ahead, and the shards that are mixed stay, too. With workers, only `prefetch` counts.
        rank, ranks: this rank, and the number of ranks; by default those of `torch.distributed` if it is initialized.
        transform: a function that replaces each batch, called in the thread or process that reads it.
        options: other options of `torch.utils.data.DataLoader`, for workers (`pin_memory`, `multiprocessing_context`,
            ...).

    Raises:
        ValueError: a number is out of range, or options are given without workers.

    Each rank of `torch.distributed` has rows of its own. Seed and number of the epoch determine the order, which takes
    no memory. With a number as `shuffle` it follows from the shards, too: open the data set on all ranks before it is
    compacted, or on all after that. To resume, load the :meth:`state_dict` into another loader: it continues with the
    next batch. No row is seen twice, whatever was read ahead, even if the data set has grown or was compacted since.
    """

    def __init__(
        self,
        data: Any,
        batch_size: int,
        *,
        shuffle: bool | int = True,
        seed: int = 0,
        drop_last: bool = False,
        num_workers: int = 0,
        prefetch: int = 2,
        read_ahead: int = _READ_AHEAD,
        rank: int | None = None,
        ranks: int | None = None,
        transform: Callable[[Any], Any] | None = None,
        **options: Any,
    ) -> None:
        if batch_size < 1 or num_workers < 0 or prefetch < 0 or read_ahead < 0:
            raise ValueError(
                "batch_size is 1 or more, num_workers, prefetch and read_ahead 0 or more; got "
                f"{batch_size}, {num_workers}, {prefetch} and {read_ahead}"
            )
        if options and not num_workers:
            raise ValueError(f"{sorted(options)} are options of worker processes: pass num_workers, too")
        initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.rank = rank if rank is not None else torch.distributed.get_rank() if initialized else 0
        self.ranks = ranks if ranks is not None else torch.distributed.get_world_size() if initialized else 1
        if not 0 <= self.rank < self.ranks:
            raise ValueError(f"rank {self.rank} is none of {self.ranks} ranks: they begin at 0")
        self.data, self.batch_size = data, batch_size
        self.shuffle, self.seed, self.drop_last = _check_shuffle(shuffle), seed, drop_last
        self._num_workers, self._prefetch, self._read_ahead = num_workers, prefetch, read_ahead
        self._transform, self._options = transform, options
        self.epoch = 0
        # The rows of this epoch that all ranks have finished, their total number, and their segments in a data set.
        self._start = 0
        self._count, self._segments = _snapshot_rows(data)
        # The numbers of rows of the shards of this epoch, if shards are mixed.
        self._sizes: NDArray[np.int64] | None = None
        if type(shuffle) is not bool:
            _list_sizes(data)
        # After `load_state_dict`, the rows of the epoch that the next iteration continues.
        self._resumed: Any = None

    def _order(self, count: int, start: int) -> Order:
        seed = self.seed * 1_000_003 + self.epoch if self.shuffle else None
        shards = None
        if type(self.shuffle) is not bool and self._sizes is not None and seed is not None:
            shards = ShardShuffle(self._sizes, self.shuffle, seed)
        return Order(count, self.batch_size, seed, self.rank, self.ranks, start, self.drop_last, shards)

    def __len__(self) -> int:
        """Return the number of batches of the next iteration on this rank."""
        resumed = self._resumed is not None
        return len(self._order(self._count if resumed else len(self.data), self._start if resumed else 0))

    def __iter__(self) -> Iterator[Any]:
        rows, start = self._resumed, self._start
        self._resumed = None
        if rows is None:
            rows, start = self.data, 0
            # Fix the rows of the epoch, because the data set may grow meanwhile.
            self._count, self._segments = _snapshot_rows(rows)
            self._sizes = None if type(self.shuffle) is bool else _list_sizes(rows, self._count)
        self._start = start
        step = self.batch_size * self.ranks
        for number, batch in enumerate(self._read(rows, self._order(self._count, start))):
            # While the caller uses this batch, `state_dict` points behind it.
            self._start = min(start + (number + 1) * step, self._count)
            yield batch
        self.epoch += 1
        self._start = 0

    def _read(self, rows: Any, order: Order) -> Iterator[Any]:
        fetch = _EpochBatches(rows, order, self._transform)
        if self._num_workers:
            numbers = range(len(order))
            prefetch = self._prefetch or None
            options = {"prefetch_factor": prefetch, "collate_fn": _return_batch, **self._options}
            yield from DataLoader(fetch, None, sampler=numbers, num_workers=self._num_workers, **options)
            return
        ahead: ShardsAhead | None = None
        shards = rows._wrapped_container() if is_node(rows) else None
        if isinstance(shards, LazyConcatenatedTensorDict) and self.shuffle is not True and self._read_ahead:
            is_remote = shards._joint.in_flight > 1
            ahead = ShardsAhead(shards, order.batch, len(order), self._read_ahead) if is_remote else None
        read = fetch.__getitem__ if ahead is None else partial(ahead.read, fetch.read)
        try:
            if not self._prefetch:
                yield from map(read, range(len(order)))
            else:
                yield from self._prefetch_batches(read, len(order))
        finally:
            if ahead is not None:
                ahead.close()

    def _prefetch_batches(self, read: Callable[[int], Any], count: int) -> Iterator[Any]:
        with ThreadPoolExecutor(1, thread_name_prefix="tensordict-batches") as pool:
            under_way: deque[Future[Any]] = deque()
            try:
                for number in range(count):
                    under_way.append(pool.submit(read, number))
                    if len(under_way) > self._prefetch:
                        yield under_way.popleft().result()
                while under_way:
                    yield under_way.popleft().result()
            finally:
                for future in under_way:
                    future.cancel()

    # --- going on -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the iteration, after the last yielded batch, as plain numbers and strings.

        All ranks must save it after the same number of batches. Loaders with another number of ranks or another
        `batch_size` may load it.
        """
        return {
            "epoch": self.epoch,
            "start": self._start,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "rows": self._count,
            "segments": None if self._segments is None else [list(part) for part in self._segments],
            # Runs of shards of one size. A compaction may change the shards, and the order must stay.
            "shards": None
            if self._sizes is None
            else [[size, len(list(run))] for size, run in itertools.groupby(self._sizes.tolist())],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another loader was.

        Args:
            state: the `state_dict` of the other loader. This loader also takes over its seed and `shuffle`.

        Raises:
            ValueError: the state is invalid, or belongs to other rows.
            SaveError: rows of the data set are gone.
        """
        # Loaders that could not mix shards saved no sizes.
        if {*state, "shards"} != _FIELDS:
            raise ValueError(f"the state of a loader has {sorted(_FIELDS)}, got {sorted(state)}")
        count, segments, rows = int(state["rows"]), state["segments"], self.data
        if segments is not None:
            own = _snapshot_rows(rows)[1]
            if own is None:
                raise ValueError(f"the state belongs to a data set, and this loader reads a {type(rows).__name__}")
            segments = [(str(writer), int(start), int(stop)) for writer, start, stop in segments]
            if own != segments:
                rows = rows._rewrap(rows._wrapped_container().at(segments))
        if len(rows) != count:
            raise ValueError(f"the state belongs to {count:,} rows, and this loader has {len(rows):,}")
        runs = state.get("shards")
        sizes = None if runs is None else np.repeat(*np.asarray(runs, dtype=np.int64).reshape(-1, 2).T)
        if sizes is not None and (sizes.sum() != count or (sizes < 0).any()):
            raise ValueError(f"the state has {count:,} rows, and shards with {sizes.sum():,} rows")
        # Without sizes, a number was another way to write a bool.
        shuffle = _check_shuffle(state["shuffle"] if "shards" in state else bool(state["shuffle"]))
        self.seed, self._sizes = int(state["seed"]), sizes
        self.shuffle = shuffle
        self.epoch, self._start = int(state["epoch"]), int(state["start"])
        self._count, self._segments = count, segments
        self._resumed = rows if self._start else None


class _EpochBatches(torch.utils.data.Dataset[Any]):
    """The batches of an epoch by number. Worker processes get a copy of this object."""

    def __init__(self, rows: Any, order: Order, transform: Callable[[Any], Any] | None) -> None:
        self._rows, self._order, self._transform = rows, order, transform

    def __getitem__(self, number: int) -> Any:
        return self.read(self._order.batch(number))

    def read(self, rows: NDArray[np.int64]) -> Any:
        """Return the batch of some rows."""
        at = torch.from_numpy(rows)
        if torch.utils.data.get_worker_info() is None or self._transform is not None:
            batch = self._rows[at]
        else:
            with scattered.into_shared_memory():
                batch = self._rows[at]
        return batch if self._transform is None else self._transform(batch)


def _check_shuffle(shuffle: Any) -> bool | int:
    """Return `True`, `False` or the number of shards to mix."""
    if isinstance(shuffle, (bool, np.bool_)):
        return bool(shuffle)
    if not isinstance(shuffle, (int, np.integer)) or shuffle < 1:
        raise ValueError(f"shuffle is True, False, or the number of shards to mix, 1 or more; got {shuffle!r}")
    return int(shuffle)


def _list_sizes(rows: Any, count: int | None = None) -> NDArray[np.int64]:
    """Return the numbers of rows of the shards with the first `count` rows."""
    data = rows._wrapped_container() if is_node(rows) else rows
    if not isinstance(data, LazyConcatenatedTensorDict):
        raise ValueError(
            f"shuffle is a number of shards, and a {type(data).__name__} has none: pass shuffle=True to mix all rows"
        )
    stops = np.asarray([block.stop for block in data._row_blocks()], dtype=np.int64)
    if count is not None:
        # The data set may have grown since it was counted.
        stops = np.unique(np.minimum(stops, count))
    return np.diff(stops, prepend=0)


def _return_batch(batch: Any) -> Any:
    return batch


def _snapshot_rows(rows: Any) -> tuple[int, list[Segment] | None]:
    """Return the number of rows, and their segments in a data set; `None` for other containers."""
    data = rows._wrapped_container()
    return data._snapshot() if isinstance(data, Dataset) else (len(rows), None)
