"""In which order rows are visited: shuffled from a seed, shared out among ranks, resumed anywhere; without a list."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 6
_MASK = (1 << 64) - 1


def shuffled(positions: NDArray[np.int64], count: int, seed: int) -> NDArray[np.int64]:
    """Where each of some positions lies in a permutation of so many rows, which the seed gives.

    The numbers of a rectangle that is nearly square are permuted by a Feistel network; what is `count` or more goes
    through it again, until it is less (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002: generalized
    Feistel, cycle walking). So nothing is kept for a row, however many there are.

    Example:
        >>> import numpy as np
        >>> from tensordict.datasets.order import shuffled
        >>> sorted(shuffled(np.arange(5), 5, seed=1).tolist())
        [0, 1, 2, 3, 4]
    """
    width = math.isqrt(count - 1) + 1 if count > 1 else 1
    height = -(-count // width)
    keys = [_mixed_int(seed + number) for number in range(1, _ROUNDS + 1)]
    found = _network(positions.astype(np.uint64), width, height, keys)
    while len(beyond := np.flatnonzero(found >= count)):
        found[beyond] = _network(found[beyond], width, height, keys)
    return found.astype(np.int64)


def _network(values: NDArray[np.uint64], width: int, height: int, keys: list[int]) -> NDArray[np.uint64]:
    upper, lower = np.divmod(values, np.uint64(width))
    for number, key in enumerate(keys):
        mixed = _mixed(upper + np.uint64(key))
        mixed += lower
        mixed %= np.uint64(height if number % 2 else width)
        lower, upper = upper, mixed
    upper *= np.uint64(width)
    upper += lower
    return upper


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """48 bits for each value, which is overwritten: of the finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    values >>= np.uint64(16)
    return values


def _mixed_int(value: int) -> int:
    value = (value * 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@dataclass(frozen=True, slots=True)
class Order:
    """The batches of one epoch that one rank has.

    Position p of the epoch is row p, or the row that a permutation has there. Of the positions from `start` on, a rank
    has every `ranks`-th: no two ranks ever have the same row.

    Args:
        count: how many rows there are.
        batch_size: the rows of a batch.
        seed: of the permutation; `None` for the order of the rows.
        rank, ranks: which of how many ranks this is.
        start: how many positions all ranks together have had before.
        drop_last: leave out batches that are not whole on every rank.
    """

    count: int
    batch_size: int
    seed: int | None
    rank: int = 0
    ranks: int = 1
    start: int = 0
    drop_last: bool = False

    def __len__(self) -> int:
        """How many batches there are."""
        left = max(0, self.count - self.start)
        if self.drop_last:
            return left // (self.batch_size * self.ranks)
        own = len(range(self.rank, left, self.ranks))
        return -(-own // self.batch_size)

    def batch(self, number: int) -> NDArray[np.int64]:
        """The rows of a batch."""
        first = self.start + number * self.batch_size * self.ranks + self.rank
        stop = min(first + self.batch_size * self.ranks, self.count)
        positions = np.arange(first, stop, self.ranks, dtype=np.int64)
        return positions if self.seed is None else shuffled(positions, self.count, self.seed)
