"""IFEvalScorer: write scores of instruction following next to the responses in a container."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, TypeVar

import torch

from tensordict.containers.dense import TensorDict
from tensordict.containers.free_functions import lazy_stack, maybe_dense_stack
from tensordict.containers.nontensor import NonTensorData, NonTensorStack, unwrap
from tensordict.core.exceptions import ContainerExpected, InstructionError
from tensordict.core.keys import Key, canonical
from tensordict.llm.checkers import judge, registry
from tensordict.llm.scores import FIELDS, IFEvalScoreData
from tensordict.ops.collection import TensorCollection
from tensordict.ops.entries.locking import raise_locked

T = TypeVar("T")
V = TypeVar("V")

_MISSING = object()


class IFEvalScorer:
    """Score how well responses follow the instructions of their prompts, and write the scores next to them.

    The extra `ifeval` brings the checkers, from EleutherAI's lm-evaluation-harness. Scoring uses no network: when a
    checker lacks data, the error says what to install.

    Args:
        prompt_key, response_key, instruction_ids_key, keyword_args_key: the keys of the prompt and the response (text),
            of the instruction ids (a list for each response), and of the arguments of the checkers (a list of as many
            dicts; `None` stands for an omitted argument). The defaults are the names of the public data set.
        score_key: the key for the scores, an :class:`IFEvalScoreData` with the batch size of the container.
        reward_key: the key for a reward, float32 of shape `[*batch, 1]`; `None` writes no reward.
        weights: the weight of each score in the reward. Scores of instructions are averaged before they are weighted. A
            score that is left out weighs 0. By default, each of the four weighs 1/4.
        errors: `"raise"` stops at the first row that cannot be scored. `"collect"` writes NaN for such scores and
            rewards, writes all others, and lists the problems under `errors_key`.
        errors_key: the key for the collected problems: a list of lines for each row.
        num_workers: the number of processes that share a batch, with `map`; 0 uses this process alone.

    Raises:
        ValueError: two of the keys are equal, or a weight names an unknown score.

    Example:
        >>> from tensordict import TensorDict
        >>> from tensordict.llm import IFEvalScorer
        >>> data = TensorDict(
        ...     prompt="Name two colours. Use no commas, and no more than 9 words.",
        ...     instruction_id_list=["punctuation:no_comma", "length_constraints:number_words"],
        ...     kwargs=[{}, {"num_words": 10, "relation": "less than"}],
        ...     response="Red, and blue.",
        ... )
        >>> scores = IFEvalScorer()(data)["ifeval_score"]
        >>> scores.prompt_level_strict_acc, scores.inst_level_strict_acc
        (tensor([0.]), tensor([0., 1.]))
    """

    def __init__(
        self,
        *,
        prompt_key: Key = "prompt",
        response_key: Key = "response",
        instruction_ids_key: Key = "instruction_id_list",
        keyword_args_key: Key = "kwargs",
        score_key: Key = "ifeval_score",
        reward_key: Key | None = None,
        weights: Mapping[str, float] | None = None,
        errors: Literal["raise", "collect"] = "raise",
        errors_key: Key = "ifeval_errors",
        num_workers: int = 0,
    ) -> None:
        self.prompt_key = canonical(prompt_key)
        self.response_key = canonical(response_key)
        self.instruction_ids_key = canonical(instruction_ids_key)
        self.keyword_args_key = canonical(keyword_args_key)
        self.score_key = canonical(score_key)
        self.reward_key = None if reward_key is None else canonical(reward_key)
        self.errors_key = canonical(errors_key)
        self.weights = dict.fromkeys(FIELDS, 0.25) if weights is None else dict(weights)
        self.errors = errors
        self.num_workers = num_workers
        if unknown := sorted(self.weights.keys() - set(FIELDS)):
            raise ValueError(f"weights of {unknown}, which are not scores; the scores are {list(FIELDS)}")
        if errors not in ("raise", "collect"):
            raise ValueError(f"errors must be 'raise' or 'collect', got {errors!r}")
        keys = [*self._inputs(), self.score_key, self.reward_key, self.errors_key]
        if twice := sorted({repr(key) for key in keys if keys.count(key) > 1}):
            raise ValueError(f"each key needs a place of its own, got {', '.join(twice)} twice")

    def __call__(self, data: T) -> T:
        """Score the responses of a container: a single one, or a batch of any dims.

        Args:
            data: a container with the four inputs. Its other entries stay unchanged.

        Returns:
            `data` itself, with the scores, the reward and the collected errors.

        Raises:
            InstructionError: a row cannot be scored. The message names the row and the field, and nothing was written.
            ContainerExpected: `data` is not a container.
            LockedError: `data` is locked.
            ModuleNotFoundError: the extra `ifeval` is not installed.
        """
        if not isinstance(data, TensorCollection):
            raise ContainerExpected(f"IFEvalScorer scores a container, got {type(data).__name__}; use TensorDict(data)")
        if data.is_locked:
            raise_locked(f"write {self.score_key!r}")
        registry()
        results = self._build_results(list(self._iter_verdicts(data)), data.batch_size)
        # Write into a shallow copy first: if that fails for one key, `data` keeps its old entries.
        for target in (data.copy(), data):
            for key, value in results.items():
                target.set(key, value)
        return data

    def _build_results(self, verdicts: list[_Verdict], size: torch.Size) -> dict[Key, TensorCollection | torch.Tensor]:
        """Build the entries to write for a batch of this size, by key."""
        results: dict[Key, TensorCollection | torch.Tensor] = {}
        if verdicts:
            scores = (verdict.scores() for verdict in verdicts)
            results[self.score_key] = _stack_batch(scores, size, maybe_dense_stack)
        else:
            results[self.score_key] = IFEvalScoreData(batch_size=size)
        if self.reward_key is not None:
            rewards = [verdict.reward(self.weights) for verdict in verdicts]
            results[self.reward_key] = torch.tensor(rewards, dtype=torch.float32).reshape(*size, 1)
        if self.errors == "collect":
            problems = (NonTensorData(verdict.problems) for verdict in verdicts)
            none = NonTensorData([], batch_size=size)
            results[self.errors_key] = (
                _stack_batch(problems, size, lambda items: NonTensorStack(*items)) if verdicts else none
            )
        return results

    def _inputs(self) -> list[Key]:
        return [self.prompt_key, self.response_key, self.instruction_ids_key, self.keyword_args_key]

    def _iter_verdicts(self, data: TensorCollection) -> Iterator[_Verdict]:
        """Yield the verdicts of all rows, in order.

        Raises:
            InstructionError: a row has a problem, and `errors` is "raise".
        """
        indices = product(*map(range, data.batch_size))
        for index, verdict in zip(indices, self._judge_all(data)):
            if verdict.problems and self.errors == "raise":
                place = f"row {index[0] if len(index) == 1 else index}: " if index else ""
                raise InstructionError(place + verdict.problems[0])
            yield verdict

    def _judge_all(self, data: TensorCollection) -> Iterable[_Verdict]:
        elements = flatten_rows(data)
        if not self.num_workers or len(elements) < 2:
            return map(self._judge_row, elements)
        inputs = lazy_stack([row.select(*self._inputs(), strict=False) for row in elements])
        judged = inputs.map(self._judge_part, 0, num_workers=self.num_workers)
        return [_Verdict(*parts) for parts in judged["verdict"]]

    def _judge_part(self, part: TensorCollection) -> TensorDict:
        """Judge one part of a batch, in a worker process."""
        verdicts = map(self._judge_row, flatten_rows(part))
        held = [NonTensorData((verdict.strict, verdict.loose, verdict.problems)) for verdict in verdicts]
        return TensorDict({"verdict": NonTensorStack(*held)}, part.batch_size)

    # --- one row ------------------------------------------------------------------------------------------------------

    def _judge_row(self, row: TensorCollection) -> _Verdict:
        verdict = _Verdict([], [], [])
        ids: Any = None
        try:
            ids = self._ids(row)
            response, arguments = self._text(row, self.response_key), self._arguments(row, len(ids))
            self._text(row, self.prompt_key)
        except InstructionError as error:
            verdict.fail(str(error), len(ids or [None]))
            return verdict
        for position, (instruction_id, given) in enumerate(zip(ids, arguments)):
            try:
                verdict.add(*map(float, judge(instruction_id, given, response)))
            except InstructionError as error:
                verdict.fail(f"{self.instruction_ids_key!r}[{position}], {instruction_id!r}: {error}", 1)
        return verdict

    def _text(self, row: TensorCollection, key: Key) -> str:
        value = self._value(row, key)
        if not isinstance(value, str):
            raise InstructionError(f"{key!r} is not text, but a {type(value).__name__}")
        return value

    def _ids(self, row: TensorCollection) -> list[str]:
        key = self.instruction_ids_key
        ids = _to_list(self._value(row, key), key, "of ids")
        if not ids:
            raise InstructionError(f"{key!r} is empty: there is no instruction to follow")
        for position, instruction_id in enumerate(ids):
            if not isinstance(instruction_id, str):
                raise InstructionError(f"{key!r}[{position}] is no id, but a {type(instruction_id).__name__}")
        return ids

    def _arguments(self, row: TensorCollection, count: int) -> list[dict[str, Any]]:
        """Return the arguments of the checkers, without None and NaN."""
        key = self.keyword_args_key
        given = _to_list(self._value(row, key), key, "of dicts")
        if len(given) != count:
            raise InstructionError(
                f"{key!r} has {len(given)} dicts for the {count} instructions in {self.instruction_ids_key!r}; each "
                "instruction needs its own, which may be empty"
            )
        for position, item in enumerate(given):
            if item is not None and not isinstance(item, Mapping):
                raise InstructionError(f"{key!r}[{position}] is no dict, but a {type(item).__name__}")
        return [{name: value for name, value in (item or {}).items() if _is_given(value)} for item in given]

    def _value(self, row: TensorCollection, key: Key) -> object:
        value = unwrap(row.get(key, _MISSING))
        if value is _MISSING or value is None:
            raise InstructionError(f"{key!r} is missing")
        return value


@dataclass(slots=True)
class _Verdict:
    """The scores of the instructions of one row, NaN for unscored ones, and the problems of the row."""

    strict: list[float]
    loose: list[float]
    problems: list[str]

    def add(self, strict: float, loose: float) -> None:
        self.strict.append(strict)
        self.loose.append(loose)

    def fail(self, problem: str, count: int) -> None:
        self.problems.append(problem)
        for _ in range(count):
            self.add(math.nan, math.nan)

    def values(self) -> dict[str, list[float]]:
        return {
            "prompt_level_strict_acc": [_prompt_score(self.strict)],
            "inst_level_strict_acc": self.strict,
            "prompt_level_loose_acc": [_prompt_score(self.loose)],
            "inst_level_loose_acc": self.loose,
        }

    def scores(self) -> IFEvalScoreData:
        values = self.values()
        return IFEvalScoreData(*(torch.tensor(values[name], dtype=torch.float32) for name in FIELDS), batch_size=[])

    def reward(self, weights: Mapping[str, float]) -> float:
        values = self.values()
        return sum(weight * sum(values[name]) / len(values[name]) for name, weight in weights.items())


def _prompt_score(scores: Sequence[float]) -> float:
    """Return the score of a prompt: the least score of its instructions, or NaN if one of them is NaN."""
    return math.nan if any(map(math.isnan, scores)) else min(scores)


def _is_given(value: object) -> bool:
    # Tables store a missing argument as None, or as NaN in a column of numbers.
    return not (value is None or (isinstance(value, float) and math.isnan(value)))


def _to_list(value: object, key: object, what: str) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise InstructionError(f"{key!r} is no list {what}, but a {type(value).__name__}")
    return list(value)


def flatten_rows(data: TensorCollection) -> list[TensorCollection]:
    """Return the elements of a batch of any dims, in order."""
    return [row for part in data.unbind(0) for row in flatten_rows(part)] if data.batch_dims else [data]


def _stack_batch(items: Iterator[V], size: Sequence[int], stack: Callable[[Sequence[V]], Any]) -> Any:
    """Stack items, in order, to a batch of this size."""
    if not size:
        return next(items)
    return stack([_stack_batch(items, size[1:], stack) for _ in range(size[0])])
