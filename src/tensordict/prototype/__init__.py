"""Names that programs import from here: the tensorclass decorator, and tracing of modules over containers."""

from tensordict.convert.dataclasses import from_dataclass
from tensordict.prototype.fx import symbolic_trace
from tensordict.tensorclass import TensorClass, tensorclass

__all__ = ["TensorClass", "from_dataclass", "symbolic_trace", "tensorclass"]
