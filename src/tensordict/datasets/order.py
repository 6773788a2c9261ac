"""`Order`: the rows of each batch of an epoch, shuffled by a seed and divided among ranks, without a list of rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 6
_MASK = (1 << 64) - 1


def shuffle_positions(positions: NDArray[np.int64], count: int, seed: int) -> NDArray[np.int64]:
    """Return the rows at some positions of a random permutation of `count` rows, which the seed determines.

    Example:
        >>> import numpy as np
        >>> from tensordict.datasets.order import shuffle_positions
        >>> sorted(shuffle_positions(np.arange(5), 5, seed=1).tolist())
        [0, 1, 2, 3, 4]

    A Feistel network permutes the numbers of a nearly square rectangle. Results of `count` or more go through it again
    until they are smaller (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002: generalized Feistel, cycle
    walking). So the permutation needs no memory.
    """
    width = math.isqrt(count - 1) + 1 if count > 1 else 1
    height = -(-count // width)
    keys = [_mix_int(seed + number) for number in range(1, _ROUNDS + 1)]
    found = _permute(positions.astype(np.uint64), width, height, keys)
    while len(beyond := np.flatnonzero(found >= count)):
        found[beyond] = _permute(found[beyond], width, height, keys)
    return found.astype(np.int64)


def _permute(values: NDArray[np.uint64], width: int, height: int, keys: list[int]) -> NDArray[np.uint64]:
    upper, lower = np.divmod(values, np.uint64(width))
    for number, key in enumerate(keys):
        mixed = _mix(upper + np.uint64(key))
        mixed += lower
        mixed %= np.uint64(height if number % 2 else width)
        lower, upper = upper, mixed
    upper *= np.uint64(width)
    upper += lower
    return upper


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Replace each value by 48 bits of the SplitMix64 finalizer (Steele, Lea and Flood, 2014), in place."""
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    values >>= np.uint64(16)
    return values


def _mix_int(value: int) -> int:
    value = (value * 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class ShardShuffle:
    """Shards in random order, the rows of several consecutive ones mixed.

    Args:
        sizes: the number of rows of each shard.
        mixed: the number of shards whose rows are mixed.
        seed: determines the order.
    """

    def __init__(self, sizes: NDArray[np.int64], mixed: int, seed: int) -> None:
        order = shuffle_positions(np.arange(len(sizes)), len(sizes), seed)
        self._seed = seed
        # Of each shard in the new order: its first row in the old order, and the positions at which it starts and ends.
        self._firsts = (sizes.cumsum() - sizes)[order]
        self._stops = sizes[order].cumsum()
        self._starts = self._stops - sizes[order]
        # The positions at which the mixed shards start, and the end.
        self._bounds = np.append(self._starts[::mixed], self._stops[-1:])

    def rows_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows at some positions."""
        found = np.empty_like(positions)
        groups = self._bounds.searchsorted(positions, "right") - 1
        for group in np.unique(groups).tolist():
            own = groups == group
            start, stop = (int(bound) for bound in self._bounds[group : group + 2])
            mixed = start + shuffle_positions(positions[own] - start, stop - start, self._seed + 1 + group)
            shard = self._stops.searchsorted(mixed, "right")
            found[own] = self._firsts[shard] + mixed - self._starts[shard]
        return found


@dataclass(frozen=True, slots=True)
class Order:
    """The batches of one rank in one epoch.

    Position p of the epoch is row p, or row p of the permutation. From `start` on, a rank has every `ranks`-th
    position, so no two ranks have the same row.

    Args:
        count: the number of rows.
        batch_size: the rows of a batch.
        seed: the seed of the permutation; `None` for the order of the rows.
        rank, ranks: this rank, and the number of ranks.
        start: the number of positions that all ranks together have finished.
        drop_last: leave out batches that are not whole on every rank.
        shards: gives the rows, instead of the permutation.
    """

    count: int
    batch_size: int
    seed: int | None
    rank: int = 0
    ranks: int = 1
    start: int = 0
    drop_last: bool = False
    shards: ShardShuffle | None = None

    def __len__(self) -> int:
        """Return the number of batches."""
        left = max(0, self.count - self.start)
        if self.drop_last:
            return left // (self.batch_size * self.ranks)
        own = len(range(self.rank, left, self.ranks))
        return -(-own // self.batch_size)

    def batch(self, number: int) -> NDArray[np.int64]:
        """Return the rows of a batch."""
        first = self.start + number * self.batch_size * self.ranks + self.rank
        stop = min(first + self.batch_size * self.ranks, self.count)
        positions = np.arange(first, stop, self.ranks, dtype=np.int64)
        if self.shards is not None:
            return self.shards.rows_at(positions)
        return positions if self.seed is None else shuffle_positions(positions, self.count, self.seed)
