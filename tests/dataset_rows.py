"""Rows for tests of data sets."""

from __future__ import annotations

from typing import Any

import torch

from tensordict import TensorClass, TensorDict


class Step(TensorClass):
    obs: torch.Tensor
    note: str = "none"


def rows(first: int, count: int) -> TensorDict:
    """Rows with all that a row can have."""
    number = torch.arange(first, first + count)
    tokens = torch.nested.nested_tensor([torch.arange(int(n) % 4) for n in number], layout=torch.jagged)
    step = Step(obs=number.float().unsqueeze(1).expand(-1, 3), batch_size=[count])
    td = TensorDict({"number": number, "tokens": tokens, "in": {"half": number.half()}, "step": step}, [count])
    td["name"] = [f"row {n}" for n in number.tolist()]
    return td


def assert_rows(found: Any, numbers: list[int]) -> None:
    assert found.batch_size == torch.Size([len(numbers)])
    found = found[torch.arange(len(found))]
    assert found["number"].tolist() == numbers
    assert [row.tolist() for row in found["tokens"].unbind()] == [list(range(n % 4)) for n in numbers]
    assert found["in", "half"].tolist() == numbers
    assert type(found["step"]) is Step and found["step"].obs[:, 2].tolist() == numbers
    assert found["name"] == [f"row {n}" for n in numbers]
