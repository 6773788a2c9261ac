"""Re-export the tensorclass decorator and module tracing, for programs that import them from here."""

from tensordict.containers.api import from_dataclass
from tensordict.containers.tensor_class import TensorClass, tensorclass
from tensordict.nn.tracing import symbolic_trace

__all__ = ["TensorClass", "from_dataclass", "symbolic_trace", "tensorclass"]
