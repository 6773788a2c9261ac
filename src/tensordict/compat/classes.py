"""Questions about the classes of entries, under the private names that programs know."""

from __future__ import annotations

from tensordict.core.contract import Contract


def _is_non_tensor(cls: type) -> bool:
    """Whether instances of a class stand for values that are no tensors. TorchRL: the OpenX data sets.

    Example:
        >>> from tensordict import NonTensorStack, TensorDict
        >>> from tensordict.compat.classes import _is_non_tensor
        >>> _is_non_tensor(NonTensorStack), _is_non_tensor(TensorDict)
        (True, False)
    """
    return issubclass(cls, Contract) and cls._is_non_tensor is True
