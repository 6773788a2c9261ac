"""Uses of tensorclasses that type checkers refuse; each line with `# bad` has one mistake."""

from __future__ import annotations

import torch

from tensordict import TensorClass


class Data(TensorClass):
    x: torch.Tensor
    label: str = "none"


item = Data(torch.zeros(3), batch_size=[3])
Data(batch_size=[3])  # bad
Data(torch.zeros(3), "a", "b")  # bad
Data(torch.zeros(3), unknown=1)  # bad
Data(torch.zeros(3), label=3)  # bad
Data("x")  # bad
item.x = "a"  # bad
print(item.unknown)  # bad
item.label.missing()  # bad
