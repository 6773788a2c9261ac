"""The score record of instruction-following evaluation (IFEval)."""

from __future__ import annotations

import torch

from tensordict.containers.tensorclass import TensorClass


class IFEvalScoreData(TensorClass):
    """How well responses follow the instructions of their prompts, as IFEval (arXiv 2311.07911) measures it.

    Scores are 1 for what is followed, 0 for what is not, and NaN for what could not be checked. "Strict" looks at the
    response as it is; "loose" also without markdown asterisks, and without its first or last line, and takes the best.

    Args:
        prompt_level_strict_acc: whether all instructions of a prompt are followed, of shape `[*batch, 1]`.
        inst_level_strict_acc: whether each instruction is, of shape `[*batch, instructions]`.
        prompt_level_loose_acc: as `prompt_level_strict_acc`, judged loosely.
        inst_level_loose_acc: as `inst_level_strict_acc`, judged loosely.
        batch_size: one record per element; none for the record of one response.

    A field that is left out is zeros of shape `[*batch, 1]`, and one of the shape of the batch gains a trailing dim of
    size 1. Records with different numbers of instructions stack lazily, see :func:`~tensordict.maybe_dense_stack`; read
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

    # Type checkers take the arguments that every constructor has for ones that this method is given.
    def __post_init__(self) -> None:
        present = set(self.keys())
        for name in FIELDS:
            if name not in present:
                self.set(name, torch.zeros(*self.batch_size, 1, device=self.device))
            elif len(self.get_item_shape(name)) == self.ndim:
                self.set(name, self.get(name).unsqueeze(-1))


FIELDS = tuple(field.name for field in IFEvalScoreData.fields())
