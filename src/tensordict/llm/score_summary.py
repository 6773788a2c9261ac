"""Summarize the scores of a data set: accuracies over prompts, over instructions, and per type of instruction."""

from __future__ import annotations

import math

import torch

from tensordict.containers.dense import TensorDict
from tensordict.containers.nontensor import unwrap
from tensordict.containers.tensor_class import TensorClass
from tensordict.core.keys import Key, canonical
from tensordict.llm.scorer import flatten_rows
from tensordict.ops.collection import TensorCollection

# The strict and the loose score of each prompt or instruction; NaN if it could not be scored.
_Pairs = list[tuple[float, ...]]


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
    prompts, instructions, types = _Pairs(), _Pairs(), dict[str, _Pairs]()
    for row in flatten_rows(data):
        scores = row[scores_of]
        strict, loose = (scores.get(name).tolist() for name in ("inst_level_strict_acc", "inst_level_loose_acc"))
        prompts += [tuple(scores.get(name).item() for name in ("prompt_level_strict_acc", "prompt_level_loose_acc"))]
        pairs = list(zip(strict, loose))
        instructions += pairs
        for name, pair in zip(_read_ids(row, ids_of, strict), pairs):
            types.setdefault(name, []).append(pair)
    of_prompts, of_instructions = _summarize(prompts), _summarize(instructions)
    return IFEvalSummary(
        prompt_level_strict_acc=of_prompts["strict_acc"],
        inst_level_strict_acc=of_instructions["strict_acc"],
        prompt_level_loose_acc=of_prompts["loose_acc"],
        inst_level_loose_acc=of_instructions["loose_acc"],
        prompts=of_prompts["instructions"],
        instructions=of_instructions["instructions"],
        prompt_errors=of_prompts["inst_errors"],
        inst_errors=of_instructions["inst_errors"],
        types=TensorDict({name: _summarize(types[name]) for name in sorted(types)}),
        batch_size=[],
    )


def _summarize(scores: _Pairs) -> dict[str, torch.Tensor]:
    """Return the accuracies, and the numbers of scored and of unscored pairs, under their names in `types`."""
    table = torch.tensor(scores, dtype=torch.float64).reshape(-1, 2)
    failed = table[:, 0].isnan()
    strict, loose = table[~failed].mean(0)
    return {"strict_acc": strict, "loose_acc": loose, "instructions": (~failed).sum(), "inst_errors": failed.sum()}


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
