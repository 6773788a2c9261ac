"""Names that programs import from here: the tensorclass decorator, and tracing of modules over containers."""

from tensordict.containers.tensorclass import TensorClass, tensorclass
from tensordict.convert.dataclasses import from_dataclass
from tensordict.nn.fx import symbolic_trace

__all__ = ["TensorClass", "from_dataclass", "symbolic_trace", "tensorclass"]
