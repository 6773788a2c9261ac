"""Score how well responses of language models follow instructions (IFEval)."""

from tensordict.llm.scorer import IFEvalScorer
from tensordict.llm.scores import IFEvalScoreData
from tensordict.llm.summary import IFEvalSummary, ifeval_summary

__all__ = ["IFEvalScoreData", "IFEvalScorer", "IFEvalSummary", "ifeval_summary"]
