"""Modules that build a distribution from entries of a container, and write a value of the distribution."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Generator, Tensor, nn
from torch.distributions import Distribution

from tensordict.containers.dense import TensorDict
from tensordict.core.contract import Contract
from tensordict.core.keys import Key, is_nested_key, path_of, unravel_key, unravel_key_list
from tensordict.nn import generators
from tensordict.nn.dispatch import dispatch
from tensordict.nn.distributions.composite import (
    CompositeDistribution,
    _add_suffix,
    composite_lp_aggregate,
    find_joint_draw,
    set_composite_lp_aggregate,
)
from tensordict.nn.distributions.continuous import Delta
from tensordict.nn.generators import use_generator as _use_generator
from tensordict.nn.interaction import InteractionType, Sample, interaction_type, set_interaction_type, take_value
from tensordict.nn.module import C, TensorDictModuleBase
from tensordict.nn.sequence import TensorDictSequential, run_where_possible
from tensordict.nn.skipping import must_skip
from tensordict.ops.collection import TensorCollection
from tensordict.ops.entries.atomic_updates import set_all

__all__ = [
    "InteractionType",
    "ProbabilisticTensorDictModule",
    "ProbabilisticTensorDictSequential",
    "_use_generator",
    "composite_lp_aggregate",
    "interaction_type",
    "set_composite_lp_aggregate",
    "set_interaction_type",
]


class ProbabilisticTensorDictModule(TensorDictModuleBase):
    """A module that reads the parameters of a distribution, and writes a value of it: a sample, its mean, or another.

    Args:
        in_keys: the key, or the list of keys, of the parameters. The last name of each key is the name of the argument
            of `distribution_class`. Or a mapping from argument names to keys.
        out_keys: the key, or the list of keys, for the value. For a `CompositeDistribution`, the default is the keys of
            its parts.
        default_interaction_type: the way to take the value, if no :class:`set_interaction_type` chooses one.
        distribution_class: called with the parameters as keyword arguments; returns a distribution.
        distribution_kwargs: further keyword arguments. In a :class:`~tensordict.TensorDictParams`, they follow the
            module to other devices and dtypes.
        return_log_prob: also write the log-probability of the value.
        log_prob_keys: the keys for it, one per out-key; `<out-key>_log_prob` by default.
        log_prob_key: the key for a single log-probability. Under `set_composite_lp_aggregate(True)`, it is the sum over
            all values, with the default key `"sample_log_prob"`.
        cache_dist: accepted for compatibility; the parameters stay in the container in any case.
        n_empirical_estimate: the number of samples for an estimate of the mean, if the distribution has no mean.
        num_samples: the number of samples, or their shape: leading dims of the result.
        generator: the source of random numbers: a generator, which advances with every call; an int, which seeds one;
            or the key of an entry that holds a generator or a seed. Each call replaces the seed by the next one.
            Compiled code ignores it.

    Raises:
        KeyError: (when called) a parameter is missing. The message names the module and the existing keys.
        RuntimeError: `log_prob_key` is given for several log-probabilities that are not summed.
        TypeError: (when called) `distribution_class` does not accept the parameters. The message names them.

    Example:
        >>> import torch
        >>> from torch.distributions import Normal
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import ProbabilisticTensorDictModule
        >>> draw = ProbabilisticTensorDictModule(
        ...     in_keys=["loc", "scale"], out_keys=["action"], distribution_class=Normal, return_log_prob=True
        ... )
        >>> td = draw(TensorDict(loc=torch.zeros(3), scale=torch.ones(3), batch_size=[3]))
        >>> td["action"], td["action_log_prob"]
        (tensor([0., 0., 0.]), tensor([-0.9189, -0.9189, -0.9189]))
    """

    _CHANGE_IN_C_LP_A = (
        "composite_lp_aggregate() changed after a {} was made, from `{}` to `{}`: the keys of its log-probabilities "
        "depend on it. Call it under the same setting, or give log_prob_keys"
    )

    dist_keys: tuple[str, ...]
    default_interaction_type: InteractionType
    n_empirical_estimate: int
    cache_dist: bool
    return_log_prob: bool
    num_samples: torch.Size | None
    _generator: Generator | Key | None
    _composite_lp_aggreate_at_init: bool
    _log_prob_keys: list[Key]
    _log_prob_key: Key | None

    def __init__(
        self,
        in_keys: Key | Sequence[Key] | Mapping[str, Key],
        out_keys: Key | Sequence[Key] | None = None,
        *,
        default_interaction_type: InteractionType | str = InteractionType.DETERMINISTIC,
        distribution_class: Callable[..., Distribution] = Delta,
        distribution_kwargs: Mapping[str, Any] | TensorCollection | None = None,
        return_log_prob: bool = False,
        log_prob_keys: Sequence[Key] | None = None,
        log_prob_key: Key | None = None,
        cache_dist: bool = False,
        n_empirical_estimate: int = 1000,
        num_samples: int | Sequence[int] | None = None,
        generator: generators.Source = None,
    ) -> None:
        super().__init__()
        if isinstance(in_keys, Mapping):
            names, in_keys = list(in_keys), list(in_keys.values())
        else:
            in_keys = [in_keys] if is_nested_key(in_keys) else list(in_keys)
            names = [path_of(key)[-1] for key in in_keys]
        if out_keys is None:
            out_keys = _find_composite_keys(distribution_class, distribution_kwargs)
        self._assign(
            in_keys=in_keys,
            _out_keys=unravel_key_list([out_keys] if is_nested_key(out_keys) else out_keys),
            dist_keys=tuple(names),
            default_interaction_type=InteractionType(default_interaction_type),
            n_empirical_estimate=n_empirical_estimate,
            cache_dist=cache_dist,
            return_log_prob=return_log_prob,
            num_samples=_as_sample_shape(num_samples),
            _generator=generators.as_source(generator),
            _composite_lp_aggreate_at_init=composite_lp_aggregate(nowarn=True),
        )
        # Set as module attributes, because they may be modules or containers of parameters.
        self.distribution_class = distribution_class
        self.distribution_kwargs = {} if distribution_kwargs is None else distribution_kwargs
        scores, score = self._as_log_prob_keys(log_prob_keys, log_prob_key)
        self._assign(_log_prob_keys=scores, _log_prob_key=score)

    def _as_log_prob_keys(self, keys: Sequence[Key] | None, key: Key | None) -> tuple[list[Key], Key | None]:
        """Return the keys of the log-probabilities of the parts, and the key of their sum (`None` if it is unused)."""
        samples = self._out_keys
        if key is not None and not self._composite_lp_aggreate_at_init and len(samples) != 1:
            raise RuntimeError(
                f"log_prob_key names one log-probability, and there is one for each of the out-keys {samples}: give "
                "log_prob_keys, or set_composite_lp_aggregate(True) for their sum"
            )
        if keys is None:
            keys = [_add_suffix(sample, "_log_prob") for sample in samples]
            if key is not None and not self._composite_lp_aggreate_at_init and len(samples) == 1:
                keys = [key]
        elif self._composite_lp_aggreate_at_init and key is None and len(keys) == 1:
            key = keys[0]
        keys = unravel_key_list(keys)
        if len(keys) != len(samples):
            raise ValueError(f"log_prob_keys has {len(keys)} keys, {keys}, for the {len(samples)} out-keys {samples}")
        if not self._composite_lp_aggreate_at_init:
            return keys, None
        return keys, "sample_log_prob" if key is None else unravel_key(key)

    # --- keys ---------------------------------------------------------------------------------------------------------

    @property  # type: ignore[misc]  # they follow from the arguments
    def out_keys(self) -> list[Key]:
        """The keys of the values and, with `return_log_prob`, of the log-probabilities."""
        return self._out_keys + self.log_prob_keys if self.return_log_prob else self._out_keys

    @property
    def out_keys_source(self) -> list[Key]:
        """The same keys as :attr:`out_keys`."""
        return self.out_keys

    @property
    def log_prob_keys(self) -> list[Key]:
        """The keys of the log-probabilities: one per value, or the key of their sum.

        Raises:
            RuntimeError: `composite_lp_aggregate()` has changed since the module was made.
        """
        self._check_aggregate()
        return self._log_prob_keys if self._log_prob_key is None else [self._log_prob_key]

    @property
    def log_prob_key(self) -> Key:
        """The key of the log-probability.

        Raises:
            RuntimeError: there are several keys, or `composite_lp_aggregate()` has changed since the module was made.
        """
        keys = self.log_prob_keys
        if len(keys) != 1:
            raise RuntimeError(
                f"{type(self).__name__} has several log-probabilities, at log_prob_keys={keys}: log_prob_key is there "
                "for one, or for their sum under set_composite_lp_aggregate(True)"
            )
        return keys[0]

    def _check_aggregate(self) -> None:
        aggregate = composite_lp_aggregate()
        if aggregate != self._composite_lp_aggreate_at_init:
            raise RuntimeError(
                self._CHANGE_IN_C_LP_A.format(type(self).__name__, self._composite_lp_aggreate_at_init, aggregate)
            )

    @property
    def SAMPLE_LOG_PROB_KEY(self) -> Key:
        """Raises an error: use :attr:`log_prob_key`."""
        raise RuntimeError("SAMPLE_LOG_PROB_KEY is fully deprecated. Use `obj.log_prob_key` instead.")

    @property
    def dist_params_keys(self) -> list[Key]:
        """The keys of the parameters."""
        return self.in_keys

    @property
    def dist_sample_keys(self) -> list[Key]:
        """The keys of the values."""
        return self._out_keys

    # --- distributions ------------------------------------------------------------------------------------------------

    def get_dist(self, tensordict: Any) -> Distribution:
        """Build the distribution from the parameters in a container.

        Raises:
            KeyError: a parameter is missing.
            TypeError: the distribution does not accept the parameters.
        """
        parameters: dict[str, Any] = {}
        for name, key in zip(self.dist_keys, self.in_keys):
            value = tensordict._entries.get(key) if type(key) is str else None
            parameters[name] = value if type(value) is Tensor else tensordict.get(key, None)
        kwargs = self.distribution_kwargs
        try:
            return self.distribution_class(**parameters, **(kwargs if type(kwargs) is dict else dict(kwargs.items())))
        except Exception as error:
            missing = [key for name, key in zip(self.dist_keys, self.in_keys) if parameters[name] is None]
            if missing:
                raise KeyError(
                    f"{type(self).__name__} reads {', '.join(map(repr, missing))}, not found in the container, which "
                    f"has the keys {list(tensordict.keys(True, True))}"
                ) from error
            if isinstance(error, TypeError) and "argument" in str(error):
                raise TypeError(
                    "distribution keywords and tensordict keys indicated by ProbabilisticTensorDictModule.dist_keys "
                    f"must match: {error}, with dist_keys={list(self.dist_keys)}"
                ) from error
            raise

    def build_dist_from_params(self, tensordict: Any) -> Distribution:
        """Call :meth:`get_dist`."""
        return self.get_dist(tensordict)

    def log_prob(self, tensordict: Any, *, dist: Any = None) -> Any:
        """Return the log-probability of the value in a container.

        Args:
            tensordict: has the value, and the parameters unless `dist` is given.
            dist: the distribution.

        Returns:
            A tensor. For a `CompositeDistribution` whose log-probabilities are not summed, a container with one per
            part.

        Raises:
            KeyError: a value is missing.
        """
        self._check_aggregate()
        if dist is None:
            dist = self.get_dist(tensordict)
        if isinstance(dist, CompositeDistribution):
            log_prob = dist.log_prob(tensordict)
            if isinstance(log_prob, TensorCollection):
                self._update_td_lp(log_prob)
            return log_prob
        return dist.log_prob(*self._values(tensordict))

    def _values(self, tensordict: TensorCollection) -> tuple[Any, ...]:
        """Return the values that a container has at the keys of the samples."""
        values = tuple(tensordict.get(key, None) for key in self._out_keys)
        for key, value in zip(self._out_keys, values):
            if value is None:
                raise KeyError(
                    f"{type(self).__name__} scores {key!r}, not found in the container, which has the keys "
                    f"{list(tensordict.keys(True, True))}"
                )
        return values

    def _update_td_lp(self, lp: TensorCollection) -> None:
        """Rename the log-probabilities of the parts of a composite distribution to `log_prob_keys`."""
        for sample, key in zip(self._out_keys, self._log_prob_keys):
            default = _add_suffix(sample, "_log_prob")
            if default != key and default in lp.keys(True):
                lp.rename_key_(default, key)

    # --- values -------------------------------------------------------------------------------------------------------

    @dispatch(auto_batch_size=False)
    def forward(self, tensordict: Any, tensordict_out: Any = None, _requires_sample: bool = True) -> Any:
        """Read the parameters, and write a value of the distribution.

        Args:
            tensordict: a container, or (by :class:`dispatch`) the parameters.
            tensordict_out: a container to write into, instead of the one that is read.
            _requires_sample: `False` keeps the value in the container, and writes only its log-probability. A
                :class:`ProbabilisticTensorDictSequential` passes it to its last module.

        Returns:
            The container that was written into; an expanded one with `num_samples`.
        """
        if must_skip(self, tensordict):
            return tensordict
        if tensordict_out is None:
            tensordict_out = tensordict
        dist = self.get_dist(tensordict)
        if not _requires_sample:
            if not self.return_log_prob:
                return tensordict_out
            composite = isinstance(dist, CompositeDistribution)
            kept = tensordict.select(*self._out_keys) if composite else self._values(tensordict)
            return self._write(tensordict_out, dist, kept)
        if self._generator is None:
            value, log_prob = self._draw(dist, None)
        else:
            generator, hand_on = self._resolve_generator(tensordict)
            value, log_prob = self._draw(dist, generator)
            if hand_on is not None and generator is not None:
                hand_on(generator)
        if self.num_samples is not None:
            tensordict_out = tensordict_out.expand(self.num_samples + tensordict_out.shape)
        return self._write(tensordict_out, dist, value, log_prob)

    def _draw(self, dist: Any, generator: Generator | None) -> tuple[Sample, Any]:
        """Return a value, and its log-probability if the distribution computes both at once, else `None`.

        The log-probability from a composite distribution is a list with one tensor for each part.
        """
        kind = interaction_type()
        drawn = self.default_interaction_type if kind is None else kind
        if self.return_log_prob and drawn is InteractionType.RANDOM:
            draw = find_joint_draw(dist)
            if draw is not None:
                with _use_generator(generator):
                    return draw(self.num_samples or torch.Size())
        return self._dist_sample(dist, kind, generator=generator), None

    def _write(self, tensordict: TensorCollection, dist: Any, value: Sample, log_prob: Any = None) -> TensorCollection:
        """Write a value, and its log-probability if requested; all or nothing."""
        if isinstance(value, TensorCollection):
            if self.return_log_prob:
                self._check_aggregate()
                composite = isinstance(dist, CompositeDistribution)
                if composite and log_prob is None:
                    log_prob = dist._log_probs(value)
                if self._log_prob_key is not None:
                    if composite:
                        parts = TensorDict(dist._add_suffixes(log_prob, "_log_prob"), value.batch_size)
                    else:
                        with set_composite_lp_aggregate(False):
                            parts = dist.log_prob(value)
                    total = parts.sum(dim="feature", reduce=True)
                    value.update(parts).set(self._log_prob_key, total)
                elif composite:
                    # Write directly into the value: 6 us less for three parts than through a separate container.
                    named = dict(zip(self._out_keys, self._log_prob_keys))
                    keys = [named.get(key) or _add_suffix(key, "_log_prob") for key in dist.dists]
                    set_all(value, keys, log_prob)
                else:
                    parts = dist.log_prob(value)
                    self._update_td_lp(parts)
                    value.update(parts)
            return tensordict.update(value)
        values = value if isinstance(value, tuple) else (value,)
        keys = self._out_keys
        if len(values) != len(keys):
            raise RuntimeError(f"{dist} gave {len(values)} values for the {len(keys)} out-keys {keys}")
        if self.return_log_prob:
            log_prob = dist.log_prob(*values) if log_prob is None else log_prob
            set_all(tensordict, [*keys, self.log_prob_key], [*values, log_prob])
        elif len(keys) == 1:
            tensordict.set(keys[0], values[0])
        else:
            set_all(tensordict, keys, values)
        return tensordict

    def _resolve_generator(
        self, tensordict: TensorCollection
    ) -> tuple[Generator | None, Callable[[Generator], None] | None]:
        """Return the generator of this call, and a function to call with it afterwards, or `None`."""
        for key in self.in_keys:
            value = tensordict.get(key, None)
            if value is not None and value.device is not None:
                return generators.resolve(self._generator, tensordict, value.device)
        return generators.resolve(self._generator, tensordict, torch.device("cpu"))

    def _dist_sample(
        self, dist: Distribution, interaction_type: InteractionType | None = None, *, generator: Generator | None = None
    ) -> Sample:
        """Take a value from a distribution, with this interaction type, or the module's default if it is `None`."""
        kind = self.default_interaction_type if interaction_type is None else interaction_type
        if generator is None:
            return take_value(dist, kind, self.num_samples, self.n_empirical_estimate)
        with _use_generator(generator):
            return take_value(dist, kind, self.num_samples, self.n_empirical_estimate)

    def _repr_fields(self) -> dict[str, object]:
        return {
            **super()._repr_fields(),
            "distribution_class": self.distribution_class,
            "distribution_kwargs": self.distribution_kwargs,
            "default_interaction_type": str(self.default_interaction_type),
            "num_samples": self.num_samples,
        }


def _find_composite_keys(distribution_class: object, kwargs: Mapping[str, Any] | TensorCollection | None) -> list[Key]:
    """Return the keys of the values of a composite distribution; other distributions need explicit keys."""
    if not (isinstance(distribution_class, type) and issubclass(distribution_class, CompositeDistribution)):
        return ["_"]
    options = kwargs or {}
    if renamed := options.get("name_map"):
        return list(renamed.values())
    if (parts := options.get("distribution_map")) is None:
        raise ValueError("out_keys can be left out if distribution_kwargs has a distribution_map or a name_map")
    return list(parts)


def _as_sample_shape(num_samples: int | Sequence[int] | None) -> torch.Size | None:
    if num_samples is None:
        return None
    return torch.Size((num_samples,) if isinstance(num_samples, int) else num_samples)


class ProbabilisticTensorDictSequential(TensorDictSequential):
    """A sequence of modules, some of which write values of distributions; usually the last one does.

    Values that earlier modules have written are kept. If they write all values of the last module, and it is
    probabilistic, it draws no value, and only writes the log-probability of the existing one.

    Args:
        *modules: as for :class:`TensorDictSequential`.
        partial_tolerant: as for :class:`TensorDictSequential`.
        return_composite: the result of :meth:`get_dist`. `False` gives the distribution of the last module, which must
            be probabilistic; all others run as ordinary modules. `True` gives a `CompositeDistribution` of all. `None`
            means `True` if there are several probabilistic modules, or the last one is not probabilistic.
        selected_out_keys: as for :class:`TensorDictSequential`.
        inplace: as for :class:`TensorDictSequential`.

    Raises:
        ValueError: no modules are given.
        TypeError: `return_composite=False`, and the last module is not probabilistic.

    Example:
        >>> import torch
        >>> from torch.distributions import Normal
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import (
        ...     NormalParamExtractor,
        ...     ProbabilisticTensorDictModule,
        ...     ProbabilisticTensorDictSequential,
        ...     TensorDictModule,
        ... )
        >>> policy = ProbabilisticTensorDictSequential(
        ...     TensorDictModule(torch.nn.Linear(3, 4), in_keys=["obs"], out_keys=["params"]),
        ...     TensorDictModule(NormalParamExtractor(), in_keys=["params"], out_keys=["loc", "scale"]),
        ...     ProbabilisticTensorDictModule(["loc", "scale"], ["action"], distribution_class=Normal),
        ... )
        >>> td = policy(TensorDict(obs=torch.zeros(5, 3), batch_size=[5]))
        >>> policy.get_dist(td).batch_shape, policy.log_prob(td).shape
        (torch.Size([5, 2]), torch.Size([5, 2]))
    """

    # `False` if modules before the last one write all of its values.
    _requires_sample: bool = True

    def __init__(
        self,
        *modules: object,
        partial_tolerant: bool = False,
        return_composite: bool | None = None,
        selected_out_keys: Sequence[Key] | None = None,
        inplace: bool | str | None = None,
    ) -> None:
        if not modules:
            raise ValueError("a ProbabilisticTensorDictSequential is made of modules, the last one a probabilistic one")
        # A class of TorchRL overrides the base's `__init__` with fewer arguments, so pass no argument that is `None`.
        options: dict[str, Any] = {} if inplace is None else {"inplace": inplace}
        super().__init__(*modules, partial_tolerant=partial_tolerant, **options)
        ends_in_one = len(self) > 0 and isinstance(self._last_module, _PROBABILISTIC)
        if return_composite is None:
            return_composite = len(self._probabilistic) != 1 or not ends_in_one
        elif not return_composite and not ends_in_one:
            raise TypeError(
                f"the last module is a {type(self._last_module).__name__}: with return_composite=False it must be a "
                "ProbabilisticTensorDictModule or a ProbabilisticTensorDictSequential"
            )
        self.return_composite = return_composite
        self._requires_sample = self._find_whether_to_draw()
        if selected_out_keys is not None:
            self.select_out_keys(*selected_out_keys)

    @property
    def _last_module(self) -> Any:
        return self._list_modules()[-1]

    @property
    def _probabilistic(self) -> list[_Probabilistic]:
        """The probabilistic modules, last one first."""
        return [module for module in reversed(self._list_modules()) if isinstance(module, _PROBABILISTIC)]

    def _last_probabilistic(self) -> _Probabilistic:
        for module in reversed(self._list_modules()):
            if isinstance(module, _PROBABILISTIC):
                return module
        raise TypeError(f"none of the modules of this {type(self).__name__} is probabilistic")

    def _part_class(self, modules: Sequence[nn.Module]) -> Callable[..., TensorDictSequential]:
        return type(self) if any(isinstance(module, _PROBABILISTIC) for module in modules) else TensorDictSequential

    @property
    def det_part(self) -> TensorDictSequential:
        """All modules except the last one."""
        return TensorDictSequential(*self._list_modules()[:-1], partial_tolerant=self.partial_tolerant)

    @property
    def log_prob_keys(self) -> list[Key]:
        """The keys of the log-probabilities of all probabilistic modules, last module first."""
        return [key for module in self._probabilistic for key in module.log_prob_keys]

    @property
    def log_prob_key(self) -> Key:
        """The key of the log-probability of the last probabilistic module; `RuntimeError` if it has several."""
        return self._last_probabilistic().log_prob_key

    @property
    def dist_params_keys(self) -> list[Key]:
        """The keys of the parameters of all distributions, last module first."""
        return [key for module in self._probabilistic for key in module.dist_params_keys]

    @property
    def dist_sample_keys(self) -> list[Key]:
        """The keys of the values of all distributions, last module first."""
        return [key for module in self._probabilistic for key in module.dist_sample_keys]

    @property
    def num_samples(self) -> torch.Size:
        """The leading dims that the probabilistic modules add, last module first."""
        return torch.Size([n for module in self._probabilistic for n in module.num_samples or ()])

    @property
    def default_interaction_type(self) -> InteractionType:
        """The default interaction type of the last probabilistic module."""
        return self._last_probabilistic().default_interaction_type

    # --- distributions ------------------------------------------------------------------------------------------------

    def get_dist_params(self, tensordict: C, tensordict_out: C | None = None, **kwargs: Any) -> C:
        """Run all modules except the last one. Returns the container, which then has the parameters."""
        with set_interaction_type(interaction_type() or self.default_interaction_type):
            if tensordict_out is None and isinstance(tensordict, Contract):
                # Building `det_part` for a single call would take 90 us.
                return super()._through(tensordict, self._list_modules()[:-1])
            return self.det_part(tensordict, tensordict_out=tensordict_out, **kwargs)

    def get_dist(self, tensordict: Any, tensordict_out: Any = None, **kwargs: Any) -> Distribution:
        """Run the modules on a container, and return the distribution.

        The modules write their results into the container, unless the distribution is a composite one.

        Args:
            tensordict: the container.
            tensordict_out: a container that receives the results of the modules.
        """
        if self.return_composite:
            return self._composite(tensordict.copy(), scored=False)
        return self._last_module.get_dist(self.get_dist_params(tensordict, tensordict_out, **kwargs))  # type: ignore[no-any-return]

    def build_dist_from_params(self, tensordict: Any) -> Distribution:
        """Build the distribution from parameters that a container has already. Runs no module."""
        if not self.return_composite:
            return self._last_module.build_dist_from_params(tensordict)  # type: ignore[no-any-return]
        dists: dict[Key, Distribution] = {}
        for module in reversed(self._probabilistic):
            _add_parts(dists, module, module.build_dist_from_params(tensordict))
        return CompositeDistribution.from_distributions(tensordict, dists)

    def _composite(self, tensordict: TensorCollection, scored: bool) -> CompositeDistribution:
        """Return the distributions of all modules. With `scored`, later ones are conditioned on the values."""
        dists: dict[Key, Distribution] = {}
        for module in self:
            if isinstance(module, _PROBABILISTIC):
                _add_parts(dists, module, module.get_dist(tensordict))
                if scored and all(tensordict._has(path_of(key)) for key in module.dist_sample_keys):
                    continue
            tensordict = module(tensordict)
        if not dists:
            self._last_probabilistic()  # raises
        return CompositeDistribution.from_distributions(tensordict, dists)

    def log_prob(self, tensordict: Any, tensordict_out: Any = None, *, dist: Any = None, **kwargs: Any) -> Any:
        """Return the log-probability of the values in a container.

        If values depend on earlier ones, their log-probabilities are conditional: the distributions are built from the
        values in the container.

        Args:
            tensordict: has the values.
            tensordict_out: a container that receives the results of the modules.
            dist: the distribution; by default the result of :meth:`get_dist`.

        Returns:
            A tensor. With `return_composite`, unless log-probabilities are summed, a container with one per value.
        """
        if not self.return_composite:
            if dist is None:
                dist = self.get_dist(tensordict, tensordict_out, **kwargs)
            return self._last_module.log_prob(tensordict, dist=dist)
        if dist is None:
            dist = self._composite(tensordict.copy(), scored=True)
        return dist.log_prob(tensordict)

    def _dist_sample(
        self, dist: Distribution, interaction_type: InteractionType | None = None, *, generator: Generator | None = None
    ) -> Sample:
        return self._last_probabilistic()._dist_sample(dist, interaction_type, generator=generator)

    def _through(self, tensordict: C, modules: Sequence[Callable[[C], C]], _requires_sample: bool | None = None) -> C:
        """Run modules one after the other.

        With `return_composite=False`, the modules before the last one see the `default_interaction_type` of the
        sequence, unless the caller has set a type. The last module sees the type of the caller, or else its own
        default. It draws no value if an earlier module has written one.
        """
        if self.return_composite or interaction_type() is not None:
            tensordict = super()._through(tensordict, modules[:-1])
        else:
            with set_interaction_type(self.default_interaction_type):
                tensordict = super()._through(tensordict, modules[:-1])
        last: Any = modules[-1] if modules else None
        if (_requires_sample is not False and self._requires_sample) or not isinstance(last, _PROBABILISTIC):
            return super()._through(tensordict, modules[-1:])
        if self.partial_tolerant:
            return run_where_possible(last, tensordict, _requires_sample=False)  # type: ignore[no-any-return]
        # If out-keys were selected on a module after this sequence was made, the value may be missing. Draw it then.
        kept = all(tensordict._has(path_of(key)) for key in last.dist_sample_keys)
        return last(tensordict, _requires_sample=not kept)

    def _update_keys(self) -> None:
        super()._update_keys()
        self._requires_sample = self._find_whether_to_draw()

    def _find_whether_to_draw(self) -> bool:
        """Return whether the last module has to draw any of its values, because no earlier module writes it."""
        *before, last = self._list_modules() or [None]
        if not isinstance(last, _PROBABILISTIC):
            return True
        _, written = self._compute_in_and_out_keys(before)
        return not all(key in written for key in last.dist_sample_keys)


_PROBABILISTIC = (ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential)
_Probabilistic: TypeAlias = ProbabilisticTensorDictModule | ProbabilisticTensorDictSequential


def _add_parts(dists: dict[Key, Distribution], module: _Probabilistic, dist: Distribution) -> None:
    """Add the distribution of a module, or its parts, under the keys of its values."""
    if isinstance(dist, CompositeDistribution):
        dists.update(dist.dists)
        return
    keys = module.dist_sample_keys
    if len(keys) != 1:
        raise RuntimeError(
            f"each part of a composite distribution has one value, but {type(dist).__name__} has the values {keys}"
        )
    dists[keys[0]] = dist
