"""How a value is taken from a distribution: `InteractionType`, and the type that holds for a block."""

from __future__ import annotations

import enum
from types import TracebackType

from torch.utils._contextlib import _DecoratorContextManager


class InteractionType(str, enum.Enum):
    """How a probabilistic module takes a value from its distribution.

    `MODE`, `MEDIAN` and `MEAN` read the property of that name; `RANDOM` draws a sample, by `rsample` where the
    distribution has it. `DETERMINISTIC` reads `deterministic_sample` where there is one, otherwise the mode of discrete
    distributions and the mean of others.

    A member equals its value: `InteractionType.MEAN == "mean"`.

    Example:
        >>> from tensordict.nn import InteractionType
        >>> InteractionType.from_str("random")
        <InteractionType.RANDOM: 'random'>
    """

    MODE = "mode"
    MEDIAN = "median"
    MEAN = "mean"
    RANDOM = "random"
    DETERMINISTIC = "deterministic"

    def __str__(self) -> str:
        return self.value

    @classmethod
    def from_str(cls, type_str: str) -> InteractionType:
        """The member of this name, in any case; `ValueError` for another."""
        return cls(type_str.lower())


_current: InteractionType | None = None


class set_interaction_type(_DecoratorContextManager):  # a function to its callers, as in the public API
    """Choose how all probabilistic modules take their values, for a `with` block or a decorated function.

    The choice holds for all threads.

    Args:
        type: the type or its name; `None` leaves the choice to each module's `default_interaction_type`.

    Raises:
        ValueError: there is no such type.

    Example:
        >>> from tensordict.nn import InteractionType, set_interaction_type
        >>> from tensordict.nn.probabilistic import interaction_type
        >>> with set_interaction_type("mean"):
        ...     interaction_type()
        <InteractionType.MEAN: 'mean'>
    """

    def __init__(self, type: InteractionType | str | None = InteractionType.DETERMINISTIC) -> None:
        super().__init__()
        self.type = InteractionType.from_str(type) if isinstance(type, str) else type

    def clone(self) -> set_interaction_type:
        return self.__class__(self.type)

    def __enter__(self) -> None:
        global _current
        self._before = _current
        _current = self.type

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        global _current
        _current = self._before


def interaction_type() -> InteractionType | None:
    """The type that the surrounding :class:`set_interaction_type` asks for; `None` outside of one."""
    return _current
