"""`ShardsAhead`: fetches the shards of the next batches from a URL, many at once and no more than allowed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensordict.containers.concatenated import LazyConcatenatedTensorDict
from tensordict.memory import system

# The most batches that are looked at ahead, and the most rows of them, whose numbers take 8 bytes each.
_MOST_BATCHES, _MOST_ROWS = 1024, 1 << 20


class ShardsAhead:
    """Fetches shards in the order in which batches need them, and keeps each until its last batch.

    Args:
        data: the rows.
        batch: returns the rows of a batch by its number.
        count: the number of batches.
        nbytes: the bytes of shards that are under way or wait for their batch; at least one shard is.
    """

    def __init__(
        self,
        data: LazyConcatenatedTensorDict,
        batch: Callable[[int], NDArray[np.int64]],
        count: int,
        nbytes: int,
    ) -> None:
        self._data, self._batch, self._count, self._most = data, batch, count, nbytes
        self._row_bytes = data._row_nbytes()
        # Each shard that was fetched is an open file.
        self._most_shards = system.count_maps_and_files()[1] // 4
        self._pool = ThreadPoolExecutor(data._joint.in_flight, thread_name_prefix="tensordict-shards")
        self._next = 0  # the number of the next batch to look at
        # The rows and the shards of each batch that was looked at and not read yet, and the number of these rows.
        self._looked: dict[int, tuple[NDArray[np.int64], list[int]]] = {}
        self._num_rows = 0
        # The last known batch that uses a shard, by the number of the shard.
        self._last: dict[int, int] = {}
        self._fetched: dict[int, Future[Any]] = {}
        # The bytes that wait for a batch, by its number.
        self._waiting: dict[int, int] = {}

    def read(self, read: Callable[[NDArray[np.int64]], Any], number: int) -> Any:
        """Wait for the shards of a batch and return `read(rows)` for its rows. Begins to fetch those of later batches.

        An error of a fetch is left to `read`, which meets it again.
        """
        while self._next <= number or (self._next < self._end(number) and self._has_room()):
            self._look_at(self._next)
            self._next += 1
        self._waiting.pop(number, None)
        rows, shards = self._looked.pop(number)
        self._num_rows -= len(rows)
        wait([self._fetched[shard] for shard in shards])
        batch = read(rows)
        for shard in shards:
            # Let go of shards that no later batch needs, as far as they are known.
            if self._last[shard] == number:
                del self._last[shard], self._fetched[shard]
        return batch

    def close(self) -> None:
        """End the threads. Shards that were not begun are not fetched."""
        self._pool.shutdown(cancel_futures=True)

    def _has_room(self) -> bool:
        has_room = len(self._fetched) < self._most_shards and self._num_rows < _MOST_ROWS
        return has_room and sum(self._waiting.values()) < self._most

    def _end(self, number: int) -> int:
        return min(self._count, number + _MOST_BATCHES)

    def _look_at(self, number: int) -> None:
        rows = self._batch(number)
        shards, counts = self._data._count_rows_by_part(rows)
        self._looked[number] = rows, shards
        self._num_rows += len(rows)
        for shard, count in zip(shards, counts, strict=True):
            self._last[shard] = number
            if shard not in self._fetched:
                self._fetched[shard] = self._pool.submit(self._data._fetch_part, shard)
                self._waiting[number] = self._waiting.get(number, 0) + count * self._row_bytes
