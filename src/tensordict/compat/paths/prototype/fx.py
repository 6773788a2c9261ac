"""Names that were here when pickles were written, or programs."""

from tensordict.nn.fx import TDGraphModule, symbolic_trace

__all__ = ["TDGraphModule", "symbolic_trace"]
