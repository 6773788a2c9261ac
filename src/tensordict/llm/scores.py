"""The record of the IFEval scores of a response, which the scorer writes."""

from __future__ import annotations

import torch

from tensordict.containers.tensor_class import TensorClass


class IFEvalScoreData(TensorClass):
    """Scores of how well responses follow the instructions of their prompts, as IFEval (arXiv 2311.07911) defines them.

    A score is 1 if the instruction is followed, 0 if not, and NaN if it could not be checked. The strict score checks
    the unchanged response. The loose score also accepts the response without markdown asterisks, and without its first
    or last line.

    Args:
        prompt_level_strict_acc: whether all instructions of a prompt are followed, of shape `[*batch, 1]`.
        inst_level_strict_acc: whether each instruction is followed, of shape `[*batch, instructions]`.
        prompt_level_loose_acc: like `prompt_level_strict_acc`, judged loosely.
        inst_level_loose_acc: like `inst_level_strict_acc`, judged loosely.
        batch_size: one element per response; empty for the record of one response.

    An omitted field becomes zeros of shape `[*batch, 1]`. A field of the shape of the batch gains a trailing dim of
    size 1. Records with different numbers of instructions stack lazily (:func:`~tensordict.maybe_dense_stack`). Read
    them padded with `get(..., as_padded_tensor=True, padding_value=...)`.

    Example:
        >>> import torch
        >>> from tensordict import lazy_stack
        >>> from tensordict.llm import IFEvalScoreData
        >>> one = IFEvalScoreData(torch.tensor(1.0), torch.ones(1), batch_size=[])
        >>> two = IFEvalScoreData(torch.tensor(0.0), torch.tensor([1.0, 0.0]), batch_size=[])
        >>> one.prompt_level_strict_acc, one.prompt_level_loose_acc
        (tensor([1.]), tensor([0.]))
        >>> lazy_stack([one, two]).get("inst_level_strict_acc", as_padded_tensor=True, padding_value=float("nan"))
        tensor([[1., nan],
                [1., 0.]])
    """

    prompt_level_strict_acc: torch.Tensor | None = None
    inst_level_strict_acc: torch.Tensor | None = None
    prompt_level_loose_acc: torch.Tensor | None = None
    inst_level_loose_acc: torch.Tensor | None = None

    # Type checkers would read the constructor's arguments as arguments of this method.
    def __post_init__(self) -> None:
        present = set(self.keys())
        for name in FIELDS:
            if name not in present:
                self.set(name, torch.zeros(*self.batch_size, 1, device=self.device))
            elif len(self.get_item_shape(name)) == self.ndim:
                self.set(name, self.get(name).unsqueeze(-1))


FIELDS = tuple(field.name for field in IFEvalScoreData.fields())
