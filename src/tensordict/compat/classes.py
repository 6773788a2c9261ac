"""Questions about the classes of entries, under private names that client programs import."""

from __future__ import annotations

from tensordict.core.contract import Contract


def _is_non_tensor(cls: type) -> bool:
    """Return whether a class holds a value that is not a tensor. TorchRL needs it for its OpenX data sets.

    Example:
        >>> from tensordict import NonTensorStack, TensorDict
        >>> from tensordict.compat.classes import _is_non_tensor
        >>> _is_non_tensor(NonTensorStack), _is_non_tensor(TensorDict)
        (True, False)
    """
    return issubclass(cls, Contract) and cls._is_non_tensor is True
