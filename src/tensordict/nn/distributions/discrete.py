"""Categorical distributions over one-hot encoded values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Size, Tensor
from torch import distributions as D
from torch.distributions import constraints
from torch.nn import functional as F

if TYPE_CHECKING:
    from typing_extensions import Self


def _encode_one_hot(index: Tensor, count: int) -> Tensor:
    # Torch's `one_hot` checks the values, which `vmap` does not allow.
    return (index.unsqueeze(-1) == torch.arange(count, device=index.device)).long()


def rand_one_hot(values: Tensor, do_softmax: bool = True) -> Tensor:
    """Draw one-hot vectors, by inversion of the cumulative distribution.

    Args:
        values: floating-point logits along the last dim; probabilities with `do_softmax=False`.
        do_softmax: whether `values` are logits.

    Returns:
        A new int64 tensor of the shape of `values`, with a single 1 along the last dim.

    Example:
        >>> import torch
        >>> from tensordict.nn import rand_one_hot
        >>> rand_one_hot(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), do_softmax=False)
        tensor([[0, 1],
                [1, 0]])
    """
    cumulative = (values.softmax(-1) if do_softmax else values).cumsum(-1)
    drawn = torch.rand_like(cumulative[..., :1]) * cumulative[..., -1:]
    return _encode_one_hot((cumulative[..., :-1] <= drawn).sum(-1), values.shape[-1])


class OneHotCategorical(D.Categorical):
    """A categorical distribution whose values are one-hot vectors (int64).

    `has_rsample` is False, so that programs draw exact one-hot integers. Programs that want a differentiable relaxation
    can still call `rsample`.

    Args:
        logits: unnormalised log-probabilities along the last dim; the dims before it are the batch shape.
        probs: probabilities along the last dim, instead of `logits`.
        **kwargs: `validate_args`, as in torch.

    Raises:
        ValueError: both or neither of `logits` and `probs` are given, or they violate their constraint.

    Example:
        >>> import torch
        >>> from tensordict.nn import OneHotCategorical
        >>> dist = OneHotCategorical(probs=torch.tensor([0.25, 0.75]))
        >>> dist.mode, dist.log_prob(torch.tensor([1, 0])).exp()
        (tensor([0, 1]), tensor(0.2500))
    """

    num_params = 1
    support: constraints.Constraint = constraints.one_hot

    def __init__(self, logits: Tensor | None = None, probs: Tensor | None = None, **kwargs: bool | None) -> None:
        super().__init__(probs=probs, logits=logits, **kwargs)
        self._event_shape = self._param.shape[-1:]

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> Self:
        """Return this distribution with expanded batch dims. Its parameters are views."""
        new = self.__new__(type(self)) if _instance is None else _instance
        super().expand(batch_shape, new)  # type: ignore[no-untyped-call]
        new._event_shape = self._event_shape
        return new

    @property
    def mean(self) -> Tensor:
        """The probabilities."""
        return self.probs

    @property
    def variance(self) -> Tensor:
        """The variance of each element of the vectors."""
        return self.probs * (1 - self.probs)

    @property
    def mode(self) -> Tensor:
        """The most probable vector."""
        return _encode_one_hot(self._param.argmax(-1), self._num_events)

    deterministic_sample = mode

    def sample(self, sample_shape: Sequence[int] | None = None) -> Tensor:
        """Draw one-hot vectors, int64, of shape `(*sample_shape, *batch_shape, n)`."""
        shape = Size(sample_shape or ())
        with torch.no_grad():
            index = torch.multinomial(self.probs.reshape(-1, self._num_events), shape.numel(), True)
            return _encode_one_hot(index.T.reshape(shape + self._batch_shape), self._num_events)

    def rsample(self, sample_shape: Sequence[int] | None = None) -> Tensor:
        """Draw one-hot vectors with the dtype of the parameters and the gradient of a softmax.

        Straight-through Gumbel-softmax with temperature 1: Jang, Gu and Poole, Categorical Reparameterization with
        Gumbel-Softmax, ICLR 2017.
        """
        return F.gumbel_softmax(self.logits.expand(self._extended_shape(Size(sample_shape or ()))), hard=True)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-probability of one-hot vectors. The largest element of a vector is its category.

        Args:
            value: a tensor of any dtype. Its last dim is the number of categories, and it broadcasts with the
                parameters.

        Returns:
            A tensor with the broadcast shape of `value`, without its last dim.

        Raises:
            ValueError: the last dim of `value` is not the number of categories.
        """
        if value.shape[-1:] != self._event_shape:
            raise ValueError(
                f"one-hot vectors over {self._num_events} categories end in a dim of that size, got {list(value.shape)}"
            )
        index = (value.byte() if value.dtype is torch.bool else value).argmax(-1, keepdim=True)
        size = torch.broadcast_shapes(index.shape, self.logits.shape)  # type: ignore[no-untyped-call]
        index, logits = index.expand(*size[:-1], 1), self.logits.expand(size)
        return logits.gather(-1, index).squeeze(-1)

    def enumerate_support(self, expand: bool = True) -> Tensor:
        """Return all one-hot vectors (int64) along a new first dim."""
        count = self._num_events
        values = torch.eye(count, dtype=torch.long, device=self._param.device)
        values = values.view(count, *[1] * len(self._batch_shape), count)
        return values.expand(count, *self._batch_shape, count) if expand else values
