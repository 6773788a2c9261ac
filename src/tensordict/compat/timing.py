"""`timeit`: measure how long blocks and functions take, and add the times up by name."""

from __future__ import annotations

import time
from contextlib import ContextDecorator
from typing import Any, ClassVar

from tensordict.core.logs import logger


class timeit(ContextDecorator):
    """Measure a block, or each call of a decorated function, and add the time up under a name.

    Args:
        name: the name under which times are added up.

    Example:
        >>> from tensordict.utils import timeit
        >>> with timeit("sum"):
        ...     total = sum(range(10))
        >>> mean, seconds, calls = timeit._REG["sum"]
        >>> calls
        1
        >>> timeit.erase()
    """

    # For each name: mean and total in seconds, and the number of measurements.
    _REG: ClassVar[dict[str, list[Any]]] = {}

    def __init__(self, name: str) -> None:
        self.name = name
        self._starts: list[float] = []

    def __enter__(self) -> None:
        self._starts.append(time.perf_counter())

    def __exit__(self, *error: object) -> None:
        record = self._REG.setdefault(self.name, [0.0, 0.0, 0])
        record[1] += time.perf_counter() - self._starts.pop()
        record[2] += 1
        record[0] = record[1] / record[2]

    @classmethod
    def print(cls, prefix: str | None = None) -> None:
        """Log the mean and the total time of each name, in the order of the names. Each line begins with `prefix`."""
        for name, (mean, total, _) in sorted(cls._REG.items()):
            logger.info("%s%s took %.6f msec (total = %s sec)", f"{prefix} " if prefix else "", name, mean * 1e3, total)

    @classmethod
    def erase(cls) -> None:
        """Set all times to zero. The names stay."""
        for name in cls._REG:
            cls._REG[name] = [0.0, 0.0, 0]
