"""Summarize the scores of a data set: accuracies over prompts, over instructions, and per type of instruction."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from tensordict.containers.dense import TensorDict
from tensordict.containers.nontensor import unwrap
from tensordict.containers.tensor_class import TensorClass
from tensordict.core.keys import Key, canonical
from tensordict.llm.scorer import flatten_rows
from tensordict.ops.collection import TensorCollection


class IFEvalSummary(TensorClass):
    """The accuracies of a data set as fractions; NaN when there is nothing to average.

    Args:
        prompt_level_strict_acc, prompt_level_loose_acc: the share of prompts whose instructions are all followed.
        inst_level_strict_acc, inst_level_loose_acc: the share of followed instructions, over all prompts.
        prompts, instructions: how many were scored.
        prompt_errors, inst_errors: how many could not be scored; no accuracy includes them.
        types: for every instruction id, a container of `strict_acc`, `loose_acc`, `instructions` and `inst_errors`.
    """

    prompt_level_strict_acc: torch.Tensor
    inst_level_strict_acc: torch.Tensor
    prompt_level_loose_acc: torch.Tensor
    inst_level_loose_acc: torch.Tensor
    prompts: torch.Tensor
    instructions: torch.Tensor
    prompt_errors: torch.Tensor
    inst_errors: torch.Tensor
    types: TensorDict

    def table(self) -> list[tuple[str, str, str, str]]:
        """Return the accuracies as rows of text: name, strict accuracy, loose accuracy, count."""
        rows = [
            ("prompts", self.prompt_level_strict_acc, self.prompt_level_loose_acc, self.prompts),
            ("instructions", self.inst_level_strict_acc, self.inst_level_loose_acc, self.instructions),
            *((name, of["strict_acc"], of["loose_acc"], of["instructions"]) for name, of in self.types.items()),
        ]
        return [
            (name, format_percent(strict), format_percent(loose), str(int(count)))
            for name, strict, loose, count in rows
        ]

    def __repr__(self) -> str:
        """Show the accuracies as a table; several summaries print like any container."""
        if self.batch_size:
            return super().__repr__()
        rows = [("", "strict", "loose", "number"), *self.table()]
        width = max(len(name) for name, *_ in rows)
        lines = [f"{name.ljust(width)}  {strict:>6}  {loose:>6}  {count:>6}" for name, strict, loose, count in rows]
        failed = f", {int(self.prompt_errors)} could not be scored" if int(self.prompt_errors) else ""
        return "\n    ".join([f"IFEvalSummary({int(self.prompts)} prompts{failed}", *lines]) + ")"


def format_percent(fraction: torch.Tensor) -> str:
    """Format a fraction in percent; `-` for NaN."""
    value = float(fraction)
    return "-" if math.isnan(value) else f"{100 * value:.1f}%"


def ifeval_summary(
    data: TensorCollection, *, score_key: Key = "ifeval_score", instruction_ids_key: Key = "instruction_id_list"
) -> IFEvalSummary:
    """Summarize the scores that :class:`IFEvalScorer` wrote.

    Args:
        data: a container with scores, of a single response or of a batch of any dims.
        score_key: the key of the scores.
        instruction_ids_key: the key of the instruction ids.

    Returns:
        A new container without batch dims. Accuracies are float64, counts int64.

    Raises:
        KeyError: a key is missing.
        ValueError: a row has more or fewer scores than instructions.

    Example:
        >>> from tensordict import TensorDict, lazy_stack
        >>> from tensordict.llm import IFEvalScorer, ifeval_summary
        >>> prompt = {"prompt": "No commas!", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
        >>> data = lazy_stack([TensorDict({**prompt, "response": text}) for text in ("Yes, sir.", "Done.", "OK.")])
        >>> summary = ifeval_summary(IFEvalScorer()(data))
        >>> summary.prompt_level_strict_acc
        tensor(0.6667, dtype=torch.float64)
        >>> summary.types["punctuation:no_comma", "instructions"]
        tensor(3)
        >>> summary
        IFEvalSummary(3 prompts
                                  strict   loose  number
            prompts                66.7%   66.7%       3
            instructions           66.7%   66.7%       3
            punctuation:no_comma   66.7%   66.7%       3)
    """
    scores_of, ids_of = canonical(score_key), canonical(instruction_ids_key)
    prompts, instructions, types = _Tally(), _Tally(), dict[str, _Tally]()
    for row in flatten_rows(data):
        scores = row[scores_of]
        strict, loose = (scores.get(name).tolist() for name in ("inst_level_strict_acc", "inst_level_loose_acc"))
        prompts.add(*(scores.get(name).item() for name in ("prompt_level_strict_acc", "prompt_level_loose_acc")))
        for pair in zip(strict, loose):
            instructions.add(*pair)
        for name, pair in zip(_read_ids(row, ids_of, strict), zip(strict, loose)):
            types.setdefault(name, _Tally()).add(*pair)
    return IFEvalSummary(
        prompt_level_strict_acc=prompts.accuracy("strict"),
        inst_level_strict_acc=instructions.accuracy("strict"),
        prompt_level_loose_acc=prompts.accuracy("loose"),
        inst_level_loose_acc=instructions.accuracy("loose"),
        prompts=torch.tensor(prompts.scored),
        instructions=torch.tensor(instructions.scored),
        prompt_errors=torch.tensor(prompts.errors),
        inst_errors=torch.tensor(instructions.errors),
        types=TensorDict({name: types[name].entries() for name in sorted(types)}),
        batch_size=[],
    )


@dataclass(slots=True)
class _Tally:
    """Counts of prompts or instructions: scored ones, ones that could not be scored, and followed ones."""

    scored: int = 0
    errors: int = 0
    followed: dict[str, float] = field(default_factory=lambda: {"strict": 0.0, "loose": 0.0})

    def add(self, strict: float, loose: float) -> None:
        if math.isnan(strict):
            self.errors += 1
            return
        self.scored += 1
        self.followed["strict"] += strict
        self.followed["loose"] += loose

    def accuracy(self, kind: str) -> torch.Tensor:
        return torch.tensor(self.followed[kind] / self.scored if self.scored else math.nan, dtype=torch.float64)

    def entries(self) -> dict[str, torch.Tensor]:
        return {
            "strict_acc": self.accuracy("strict"),
            "loose_acc": self.accuracy("loose"),
            "instructions": torch.tensor(self.scored),
            "inst_errors": torch.tensor(self.errors),
        }


def _read_ids(row: TensorCollection, key: Key, scores: list[float]) -> list[str]:
    """Return the instruction ids of a row; [] when the scorer could not read them."""
    ids = unwrap(row.get(key, None))
    readable = isinstance(ids, (list, tuple)) and all(isinstance(name, str) for name in ids)
    if readable and len(ids) == len(scores):
        return list(ids)
    if all(map(math.isnan, scores)):
        return []
    if ids is None:
        raise KeyError(f"{key!r} is missing next to the scores: pass instruction_ids_key")
    raise ValueError(f"{len(scores)} scores of instructions do not fit {key!r}: {ids!r}")
