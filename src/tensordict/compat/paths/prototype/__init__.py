"""Re-export the tensorclass decorator and module tracing, for programs that import them from here."""

from tensordict.containers.tensor_class import TensorClass, tensorclass
from tensordict.convert.dataclasses import from_dataclass
from tensordict.nn.tracing import symbolic_trace

__all__ = ["TensorClass", "from_dataclass", "symbolic_trace", "tensorclass"]
