"""Evaluation over any Backend: pass@1 and unbiased pass@k with intervals, resumable, comparable."""

from __future__ import annotations

from attnrl.evaluation.compare import Comparison, compare
from attnrl.evaluation.estimates import pass_at_k, summarize
from attnrl.evaluation.results import Report, Response
from attnrl.evaluation.sampling import check_samples, evaluate
from attnrl.evaluation.stored import grade_stored

__all__ = [
    "Comparison",
    "Report",
    "Response",
    "check_samples",
    "compare",
    "evaluate",
    "grade_stored",
    "pass_at_k",
    "summarize",
]
