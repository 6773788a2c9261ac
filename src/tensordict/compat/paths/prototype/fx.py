"""Re-export module tracing for old pickles and programs that import it from here."""

from tensordict.nn.tracing import TDGraphModule, symbolic_trace

__all__ = ["TDGraphModule", "symbolic_trace"]
