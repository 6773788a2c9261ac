"""A tensorclass for tests of several processes, under the path of the reference."""

import torch

from tensordict.containers.tensor_class import TensorClass

__all__ = ["MyDistData"]


class MyDistData(TensorClass):
    """A tensorclass of two fields, which the workers of a test can import by its name."""

    a: torch.Tensor
    b: torch.Tensor
