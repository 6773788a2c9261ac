"""CompositeDistribution: several distributions as one, whose values are containers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Size, Tensor
from torch import distributions as D
from torch.distributions import constraints

from tensordict.containers.dense import TensorDict
from tensordict.core.contract import Contract, is_node, named_error
from tensordict.core.exceptions import ContainerExpected, DuplicateKeyError
from tensordict.core.keys import Key, joined, path_of, unravel_key
from tensordict.core.settings import from_environment
from tensordict.nn.choices import Choice, Setting
from tensordict.nn.interaction import InteractionType, take_value
from tensordict.ops.collection import TensorCollection
from tensordict.ops.entries.atomic_updates import set_all

C = TypeVar("C", bound=TensorCollection)
V = TypeVar("V")

# The default `n_empirical_estimate` of probabilistic modules, for use without a module.
_ESTIMATED_FROM = 1000


_choice: Choice[bool] = Choice(bool(from_environment("COMPOSITE_LP_AGGREGATE")))


class set_composite_lp_aggregate(Setting):  # a function to its callers, as in torch
    """Choose whether composite distributions sum their log-probabilities and entropies to one tensor.

    Works as a `with` block, a decorator or, with `set()`, for the rest of the program. Initially they are not summed,
    unless the environment variable `COMPOSITE_LP_AGGREGATE` is `1`.

    Args:
        mode: `True` gives one tensor, `False` or `None` a container with one tensor per distribution.
        thread_local: `True` affects only the calling thread, and keeps the blocks of other threads out of it; see
            :class:`set_interaction_type`. `False` affects all threads.

    Raises:
        TypeError: `mode` is neither a bool nor `None`.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import CompositeDistribution, set_composite_lp_aggregate
        >>> params = TensorDict(x={"loc": torch.zeros(3, 2), "scale": torch.ones(3, 2)}, batch_size=[3])
        >>> dist = CompositeDistribution(params, {"x": torch.distributions.Normal})
        >>> with set_composite_lp_aggregate(True):
        ...     dist.log_prob(dist.mode)
        tensor([-1.8379, -1.8379, -1.8379])
        >>> dist.log_prob(dist.mode)["x_log_prob"].shape
        torch.Size([3, 2])
    """

    _choice = _choice

    def __init__(self, mode: bool | None = True, *, thread_local: bool = False) -> None:
        if mode is not None and not isinstance(mode, int):
            raise TypeError(
                f"set_composite_lp_aggregate takes True or False, got {mode!r} of type {type(mode).__name__}"
            )
        super().__init__(bool(mode), thread_local)

    def clone(self) -> set_composite_lp_aggregate:
        """Return a copy with the same choice; a decorated function uses a new one for every call."""
        return type(self)(self._value, thread_local=self._thread_local)

    def set(self) -> None:
        """Apply the choice to the rest of the program, or until `unset()`; inside a block, to its rest."""
        self._choose()

    def unset(self) -> None:
        """Return to the choice before the last `set()` of this object.

        Raises:
            RuntimeError: `set()` was not called before.
        """
        if not self._replaced:
            raise RuntimeError("unset() undoes a set() of the same object, which has not been called")
        self._undo()


def composite_lp_aggregate(nowarn: bool = False) -> bool:
    """Return whether composite distributions sum their log-probabilities and entropies here.

    Args:
        nowarn: accepted for compatibility; there is never a warning.

    Example:
        >>> from tensordict.nn import composite_lp_aggregate, set_composite_lp_aggregate
        >>> with set_composite_lp_aggregate(True):
        ...     composite_lp_aggregate()
        True
    """
    return _choice.get() if _choice.in_threads else _choice.shared


def _add_suffix(key: Key, suffix: str) -> Key:
    """Add a suffix to the last name of a key: `("a", "b")` and `"_x"` give `("a", "b_x")`."""
    if type(key) is str:
        return key + suffix
    path = path_of(key)
    return joined((*path[:-1], path[-1] + suffix))


def _sum_features(value: Tensor | Contract, ndim: int) -> Tensor:
    """Sum a tensor, or all leaves of a container, over all dims after the first `ndim`."""
    if isinstance(value, Contract):
        return _add_up([_sum_features(child, ndim) for child in value._entries.values()])
    behind = value.ndim - ndim
    if behind <= 0:
        return value
    return value.sum(-1) if behind == 1 else value.flatten(ndim).sum(-1)


def _add_up(values: Sequence[Tensor]) -> Tensor:
    return functools.reduce(torch.add, values) if values else torch.zeros(())


class CompositeDistribution(D.Distribution, Mapping[Key, D.Distribution]):  # guarded: a KeyError reads all keys
    """Independent distributions under nested keys, as one distribution whose values are containers.

    It is also a mapping from keys to these distributions.

    Args:
        params: a container with the parameters. At each key of `distribution_map` it holds a container with the
            arguments of that distribution. Its batch size is the batch shape.
        distribution_map: distribution classes, or functions that return distributions, by the keys of their arguments.
        name_map: a mapping from keys of `distribution_map` to other keys for the values.
        extra_kwargs: a mapping from keys of `distribution_map` to dicts of further keyword arguments.
        log_prob_key: the key for the sum of the log-probabilities; `"sample_log_prob"` by default.
        entropy_key: the key for the sum of the entropies; `"entropy"` by default.

    Raises:
        KeyError: a key of `distribution_map` is not in `params`, or a key of `name_map` or `extra_kwargs` is not in
            `distribution_map`.
        TypeError: `params` is not a container, or a distribution cannot be made from its arguments.
        ValueError: a distribution rejects its arguments, or two values would have the same key.

    Example:
        >>> import torch
        >>> from torch.distributions import Categorical, Normal
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import CompositeDistribution
        >>> params = TensorDict(
        ...     {
        ...         "move": {"loc": torch.zeros(3, 4), "scale": torch.ones(3, 4)},
        ...         ("say", "word"): {"logits": torch.zeros(3, 7)},
        ...     },
        ...     batch_size=[3],
        ... )
        >>> dist = CompositeDistribution(params, {"move": Normal, ("say", "word"): Categorical})
        >>> value = dist.sample((5,))
        >>> value.batch_size, value["say", "word"].shape
        (torch.Size([5, 3]), torch.Size([5, 3]))
        >>> sorted(dist.log_prob(value).keys(True, True), key=str)
        [('say', 'word_log_prob'), 'move_log_prob']
    """

    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012 (as in torch)
    _event_shape = Size()
    _validate_args = False
    dists: dict[Key, D.Distribution]

    def __init__(
        self,
        params: object,
        distribution_map: Mapping[Key, Callable[..., D.Distribution]],
        *,
        name_map: Mapping[Key, Key] | None = None,
        extra_kwargs: Mapping[Key, Mapping[str, Any]] | None = None,
        log_prob_key: Key | None = None,
        entropy_key: Key | None = None,
    ) -> None:
        if not isinstance(params, TensorCollection):
            raise ContainerExpected(f"the parameters must be in a container, got {type(params).__name__}")
        keys = [unravel_key(key) for key in distribution_map]
        extra = {} if extra_kwargs is None else _check_keys("extra_kwargs", extra_kwargs, keys)
        dists = {
            key: _make_distribution(params, key, make, extra.get(key) or {})
            for key, make in zip(keys, distribution_map.values())
        }
        self._start(params.batch_size, dists, name_map)
        self._name_results(log_prob_key, entropy_key)

    @classmethod
    def from_distributions(
        cls,
        params: TensorCollection,
        distributions: Mapping[Key, D.Distribution],
        *,
        name_map: Mapping[Key, Key] | None = None,
        log_prob_key: Key | None = None,
        entropy_key: Key | None = None,
    ) -> CompositeDistribution:
        """Build a composite from existing distributions.

        Args:
            params: a container. Only its batch size is used, as the batch shape.
            distributions: the distributions, by the keys of their values.
            name_map: a mapping from keys of `distributions` to other keys for the values.
            log_prob_key: as for the class.
            entropy_key: as for the class.

        Raises:
            KeyError: a key of `name_map` is not in `distributions`.
            TypeError: one of `distributions` is not a distribution.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from tensordict.nn import CompositeDistribution
            >>> normal = torch.distributions.Normal(torch.zeros(3), 1.0)
            >>> CompositeDistribution.from_distributions(TensorDict(batch_size=[3]), {"a": normal}).mean["a"]
            tensor([0., 0., 0.])
        """
        self = cls.__new__(cls)
        dists = {unravel_key(key): dist for key, dist in distributions.items()}
        self._start(params.batch_size, dists, name_map)
        self._name_results(log_prob_key, entropy_key)
        return self

    def _start(self, batch_shape: Size, dists: dict[Key, D.Distribution], name_map: Mapping[Key, Key] | None) -> None:
        # Do the work of the base class's `__init__`, in a tenth of the time.
        self._batch_shape = batch_shape
        ndim = len(self._batch_shape)
        # For each distribution: the number of batch dims beyond the batch dims of the composite.
        self._beyond = []
        for key, dist in dists.items():
            if not isinstance(dist, D.Distribution):
                raise TypeError(f"entry {key!r}: a distribution is needed, got {dist!r} of type {type(dist).__name__}")
            self._beyond.append(len(dist.batch_shape) - ndim)
        if name_map is not None:
            names = _check_keys("name_map", name_map, dists)
            renamed = {unravel_key(names.get(key, key)): dist for key, dist in dists.items()}
            if len(renamed) != len(dists):
                raise DuplicateKeyError(f"name_map gives values of several distributions the same key: {name_map}")
            dists = renamed
        self.dists = dists

    def _name_results(self, log_prob_key: Key | None, entropy_key: Key | None) -> None:
        self._log_prob_key = "sample_log_prob" if log_prob_key is None else unravel_key(log_prob_key)
        self._entropy_key = "entropy" if entropy_key is None else unravel_key(entropy_key)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if "_beyond" not in state:
            # Pickles of the reference lack these attributes.
            ndim = len(self._batch_shape)
            self._beyond = [len(dist.batch_shape) - ndim for dist in self.dists.values()]
            self._name_results(state.get("_log_prob_key"), state.get("_entropy_key"))

    @property
    def log_prob_key(self) -> Key:
        """The key of the sum of the log-probabilities."""
        return self._log_prob_key

    @log_prob_key.setter
    def log_prob_key(self, key: Key) -> None:
        self._log_prob_key = unravel_key(key)

    @property
    def entropy_key(self) -> Key:
        """The key of the sum of the entropies."""
        return self._entropy_key

    @entropy_key.setter
    def entropy_key(self, key: Key) -> None:
        self._entropy_key = unravel_key(key)

    # --- the mapping --------------------------------------------------------------------------------------------------

    def __getitem__(self, key: Key) -> D.Distribution:
        try:
            return self.dists[unravel_key(key)]
        except (KeyError, TypeError, RuntimeError):  # guarded: the error message reads all keys
            raise KeyError(f"no distribution has the key {key!r}; there are {list(self.dists)}") from None

    def __iter__(self) -> Iterator[Key]:
        return iter(self.dists)

    def __len__(self) -> int:
        return len(self.dists)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.dists})"

    # --- values -------------------------------------------------------------------------------------------------------

    @property
    def has_rsample(self) -> bool:  # type: ignore[override]
        """True if all distributions have `rsample`."""
        return all(dist.has_rsample for dist in self.dists.values())

    def _each(self, what: str, fn: Callable[[Key, D.Distribution], V]) -> dict[Key, V]:
        """Return the results of `fn(key, distribution)` by key. `what` names the result in errors."""
        results: dict[Key, V] = {}
        for key, dist in self.dists.items():
            try:
                results[key] = fn(key, dist)
            except NotImplementedError as error:
                raise NotImplementedError(f"entry {key!r}: {type(dist).__name__} has no {what}") from error
        return results

    def _property(self, name: str) -> TensorDict:
        return TensorDict(self._each(name, lambda key, dist: getattr(dist, name)), self._batch_shape)

    def sample(self, shape: Sequence[int] | None = None) -> TensorDict:  # type: ignore[override]
        """Draw values without gradients.

        Args:
            shape: the leading dims of the samples; one sample by default.

        Returns:
            A new container of batch size `(*shape, *batch_shape)`.
        """
        size = Size(shape or ())
        return TensorDict({key: dist.sample(size) for key, dist in self.dists.items()}, size + self._batch_shape)

    def rsample(self, shape: Sequence[int] | None = None) -> TensorDict:  # type: ignore[override]
        """Draw values that are differentiable in the parameters; see :meth:`sample`.

        Raises:
            NotImplementedError: a distribution has no `rsample`. The message names it.
        """
        size = Size(shape or ())
        return TensorDict(self._each("rsample", lambda key, dist: dist.rsample(size)), size + self._batch_shape)

    def sample_and_log_prob(self, shape: Sequence[int] | None = None) -> tuple[TensorDict, Tensor | TensorDict]:
        """Draw values without gradients, and return their log-probabilities with them.

        A distribution that has a `sample_and_log_prob` computes both at once. The others run `sample`, then `log_prob`.

        Args:
            shape: the leading dims of the samples; one sample by default.

        Returns:
            The results of :meth:`sample` and of :meth:`log_prob`.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from tensordict.nn import CompositeDistribution
            >>> params = TensorDict(x={"logits": torch.zeros(3, 4)}, batch_size=[3])
            >>> dist = CompositeDistribution(params, {"x": torch.distributions.Categorical})
            >>> value, log_prob = dist.sample_and_log_prob()
            >>> value["x"].shape, log_prob["x_log_prob"]
            (torch.Size([3]), tensor([-1.3863, -1.3863, -1.3863]))
        """
        sample, log_probs = self._draw("sample", Size(shape or ()))
        return sample, self._join_log_probs(log_probs, sample)

    def rsample_and_log_prob(self, shape: Sequence[int] | None = None) -> tuple[TensorDict, Tensor | TensorDict]:
        """Draw values that are differentiable in the parameters, with their log-probabilities.

        See :meth:`sample_and_log_prob`. A distribution that has an `rsample_and_log_prob` computes both at once.

        Raises:
            NotImplementedError: a distribution has no `rsample`. The message names it.
        """
        sample, log_probs = self._draw("rsample", Size(shape or ()))
        return sample, self._join_log_probs(log_probs, sample)

    def _draw(self, method: str, shape: Size) -> tuple[TensorDict, list[Tensor]]:
        """Draw a sample with `sample` or `rsample`, and return it with the log-probabilities of its values."""
        pairs = self._each(method, lambda key, dist: _draw_with_log_prob(dist, method, shape))
        sample = TensorDict({key: value for key, (value, _) in pairs.items()}, shape + self._batch_shape)
        return sample, [log_prob for _, log_prob in pairs.values()]

    @property
    def mode(self) -> TensorDict:  # type: ignore[override]
        """The modes, in a new container of the batch shape."""
        return self._property("mode")

    @property
    def mean(self) -> TensorDict:  # type: ignore[override]
        """The means, in a new container of the batch shape."""
        return self._property("mean")

    @property
    def deterministic_sample(self) -> TensorDict:
        """The values that `InteractionType.DETERMINISTIC` gives, in a new container of the batch shape."""
        kind = InteractionType.DETERMINISTIC
        values = {key: take_value(dist, kind, None, _ESTIMATED_FROM) for key, dist in self.dists.items()}
        return TensorDict(values, self._batch_shape)

    def expand(self, batch_shape: Sequence[int], _instance: object = None) -> CompositeDistribution:
        """Return this distribution with expanded batch dims. The parameters are views."""
        size, own = Size(batch_shape), len(self._batch_shape)
        return self.from_distributions(
            TensorDict(batch_size=size),
            {key: dist.expand(size + dist.batch_shape[own:]) for key, dist in self.dists.items()},
            log_prob_key=self._log_prob_key,
            entropy_key=self._entropy_key,
        )

    # --- log-probabilities --------------------------------------------------------------------------------------------

    def _log_probs(self, sample: object) -> list[Tensor]:
        return [dist.log_prob(_get_value(sample, key)) for key, dist in self.dists.items()]

    def _add_suffixes(self, values: list[Tensor], suffix: str) -> dict[Key, Tensor]:
        return {_add_suffix(key, suffix): value for key, value in zip(self.dists, values)}

    def _sum_of_log_probs(self, log_probs: list[Tensor], sample: TensorCollection) -> Tensor:
        """Sum the log-probabilities over all dims except batch dims and leading sample dims.

        If the sample has more batch dims than that, these are kept, too.
        """
        ndim = len(sample.batch_size)
        return _add_up(
            [_sum_features(value, max(ndim, value.ndim - beyond)) for value, beyond in zip(log_probs, self._beyond)]
        )

    def log_prob(self, sample: Any) -> Tensor | TensorDict:  # type: ignore[override]
        """Return the log-probability of a sample.

        Args:
            sample: a container with a value for each distribution, such as :meth:`sample` returns.

        Returns:
            Under `set_composite_lp_aggregate(True)`, the sum over all values: a tensor with the sample dims and the
            batch shape, whatever the batch size of `sample`. Otherwise the result of :meth:`log_prob_composite`.

        Raises:
            KeyError: a value is missing.
        """
        return self._join_log_probs(self._log_probs(sample), sample)

    def _join_log_probs(self, log_probs: list[Tensor], sample: TensorCollection) -> Tensor | TensorDict:
        """Return the log-probabilities of a sample in a container, or their sum."""
        if composite_lp_aggregate(nowarn=True):
            return self._sum_of_log_probs(log_probs, sample)
        return TensorDict(self._add_suffixes(log_probs, "_log_prob"), sample.batch_size)

    def log_prob_composite(self, sample: C, *, include_sum: bool | None = None) -> C | TensorDict:
        """Return the log-probability of each value of a sample, under its key with the suffix `_log_prob`.

        Args:
            sample: as for :meth:`log_prob`.
            include_sum: also write their sum, under `log_prob_key`. The default follows `composite_lp_aggregate()`.

        Returns:
            A new container with the batch size of `sample`. Under `set_composite_lp_aggregate(True)`, `sample` itself,
            with the log-probabilities written into it.

        Raises:
            KeyError: a value is missing. Nothing was written.
        """
        aggregate = composite_lp_aggregate(nowarn=True)
        log_probs = self._log_probs(sample)
        results = self._add_suffixes(log_probs, "_log_prob")
        if aggregate if include_sum is None else include_sum:
            results[self._log_prob_key] = self._sum_of_log_probs(log_probs, sample)
        if not aggregate:
            return TensorDict(results, sample.batch_size)
        return _write_results(sample, results)

    # --- entropies ----------------------------------------------------------------------------------------------------

    @overload  # type: ignore[override]
    def entropy(
        self, samples_mc: int = ..., *, aggregate_probabilities: Literal[True], include_sum: bool | None = ...
    ) -> Tensor: ...
    @overload
    def entropy(
        self, samples_mc: int = ..., *, aggregate_probabilities: Literal[False], include_sum: bool | None = ...
    ) -> TensorDict: ...
    @overload
    def entropy(
        self, samples_mc: int = ..., *, aggregate_probabilities: bool | None = ..., include_sum: bool | None = ...
    ) -> Tensor | TensorDict: ...
    def entropy(
        self,
        samples_mc: int = 1,
        *,
        aggregate_probabilities: bool | None = None,
        include_sum: bool | None = None,
    ) -> Tensor | TensorDict:
        """Return the entropy in nats.

        Args:
            samples_mc: the number of samples for an estimate, if a distribution has no closed form.
            aggregate_probabilities: return the sum. The default follows `composite_lp_aggregate()`.
            include_sum: as for :meth:`entropy_composite`, whose result is returned if the entropies are not summed.

        Returns:
            The sum as a tensor of the batch shape, or a container.
        """
        if composite_lp_aggregate(nowarn=True) if aggregate_probabilities is None else aggregate_probabilities:
            ndim = len(self._batch_shape)
            return _add_up([_sum_features(_estimate_entropy(dist, samples_mc), ndim) for dist in self.dists.values()])
        return self.entropy_composite(samples_mc, include_sum=include_sum)

    def entropy_composite(self, samples_mc: int = 1, *, include_sum: bool | None = None) -> TensorDict:
        """Return the entropy of each distribution, under its key with the suffix `_entropy`.

        Args:
            samples_mc: the number of samples for an estimate, if a distribution has no closed form.
            include_sum: also write their sum, under `entropy_key`. The default follows `composite_lp_aggregate()`.

        Returns:
            A new container of the batch shape.
        """
        results = {
            _add_suffix(key, "_entropy"): _estimate_entropy(dist, samples_mc) for key, dist in self.dists.items()
        }
        if composite_lp_aggregate(nowarn=True) if include_sum is None else include_sum:
            ndim = len(self._batch_shape)
            results[self._entropy_key] = _add_up([_sum_features(value, ndim) for value in results.values()])
        return TensorDict(results, self._batch_shape)

    # --- distribution functions ---------------------------------------------------------------------------------------

    def cdf(self, sample: C) -> C:  # type: ignore[override]
        """Write the cumulative probability of each value, under its key with the suffix `_cdf`.

        Returns:
            `sample` itself.

        Raises:
            KeyError: a value is missing. Nothing was written.
            NotImplementedError: a distribution has no `cdf`. The message names it.
        """
        return self._transform(sample, "cdf", _get_value)

    def icdf(self, sample: C) -> C:  # type: ignore[override]
        """Write the value for each cumulative probability, under the key of the value with the suffix `_icdf`.

        Args:
            sample: a container with the probabilities under the keys that :meth:`cdf` writes. Where such a key is
                missing, the probability is read from the key of the value.

        Returns:
            `sample` itself.

        Raises:
            KeyError: a probability is missing. Nothing was written.
            NotImplementedError: a distribution has no `icdf`. The message names it.
        """

        def probability(sample: object, key: Key) -> Tensor:
            written = _add_suffix(key, "_cdf")
            has_it = isinstance(sample, TensorCollection) and written in sample.keys(True)
            return _get_value(sample, written if has_it else key)

        return self._transform(sample, "icdf", probability)

    def _transform(self, sample: C, method: str, read: Callable[[object, Key], Tensor]) -> C:
        results = self._each(method, lambda key, dist: getattr(dist, method)(read(sample, key)))
        return _write_results(sample, {_add_suffix(key, f"_{method}"): value for key, value in results.items()})


def find_joint_draw(dist: Any) -> Callable[[Size], tuple[Any, Any]] | None:
    """Return a function that draws a value of a shape with its log-probability, if the distribution has one.

    For a composite distribution, one of its parts must have one. The function returns its log-probabilities as a list.
    """
    if not _draws_jointly(dist):
        return None
    method = "rsample" if dist.has_rsample else "sample"
    if isinstance(dist, CompositeDistribution):
        return functools.partial(dist._draw, method) if any(map(_draws_jointly, dist.dists.values())) else None
    return _joint_method(dist, method)


def _draws_jointly(dist: object) -> bool:
    return hasattr(dist, "rsample_and_log_prob") or hasattr(dist, "sample_and_log_prob")


def _joint_method(dist: object, method: str) -> Callable[[Size], tuple[Any, Any]] | None:
    return getattr(dist, f"{method}_and_log_prob", None)


def _draw_with_log_prob(dist: Any, method: str, shape: Size) -> tuple[Any, Any]:
    both = _joint_method(dist, method)
    if both is not None:
        return both(shape)
    value = getattr(dist, method)(shape)
    return value, dist.log_prob(value)


def _check_keys(what: str, given: Mapping[Key, V], keys: Collection[Key]) -> dict[Key, V]:
    """Return a mapping with canonical keys, after checking that these are among `keys`."""
    mapping = {unravel_key(key): value for key, value in given.items()}
    unknown = [key for key in mapping if key not in keys]
    if unknown:
        raise KeyError(f"{what} has the keys {unknown}, which no distribution has; there are {list(keys)}")
    return mapping


def _make_distribution(
    params: TensorCollection, key: Key, make: Callable[..., D.Distribution], extra: Mapping[str, object]
) -> D.Distribution:
    """Build the distribution from the arguments at a key."""
    arguments = params.get(key, None)
    if arguments is None:
        raise KeyError(f"there are no parameters at {key!r}; the container has {list(params.keys(True, True))}")
    if not is_node(arguments):
        raise TypeError(
            f"entry {key!r} must be a container of the arguments of the distribution, got {type(arguments).__name__}"
        )
    # Takes half the time of `**arguments`.
    given = {name: value if type(value) is Tensor else arguments[name] for name, value in arguments.items()}
    try:
        return make(**given, **extra)
    except (TypeError, ValueError) as error:
        there = f"{error}. The arguments are {[*given, *extra]}"
        raise named_error(type(error)(there), path_of(key)) from error


def _get_value(sample: object, key: Key) -> Tensor:
    if not isinstance(sample, TensorCollection):
        raise ContainerExpected(
            f"a sample is a container with the keys of the distributions, got {type(sample).__name__}"
        )
    value: Tensor | None = sample.get(key, None)
    if value is None:
        raise KeyError(f"the sample has no value at {key!r}; it has {list(sample.keys(True, True))}")
    return value


def _estimate_entropy(dist: D.Distribution, samples: int) -> Tensor:
    """Return the entropy of a distribution, or an estimate from samples if it has no closed form."""
    try:
        return dist.entropy()
    except NotImplementedError:
        size = Size((samples,))
        values = dist.rsample(size) if dist.has_rsample else dist.sample(size)
        return -dist.log_prob(values).mean(0)


def _write_results(sample: C, results: dict[Key, Tensor]) -> C:
    set_all(sample, list(results), list(results.values()))
    return sample
