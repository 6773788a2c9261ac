"""Score how well responses of language models follow instructions (IFEval)."""

from tensordict.llm.score_summary import IFEvalSummary, ifeval_summary
from tensordict.llm.scorer import IFEvalScorer
from tensordict.llm.scores import IFEvalScoreData

__all__ = ["IFEvalScoreData", "IFEvalScorer", "IFEvalSummary", "ifeval_summary"]
