"""The symbolic grader, math-verify over sympy: runs only in worker processes, under their limits.

Its LaTeX path builds sympy objects from a grammar and never evaluates text; its plain-expression path goes through
sympy's parse_expr, which does, and is not used here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

# no timeouts of its own: they are SIGALRM handlers, and the worker's alarm must stay the kernel's
logging.getLogger("math_verify").setLevel(logging.CRITICAL)

_CONFIG = (
    LatexExtractionConfig(
        boxed_match_priority=0,
        normalization_config=NormalizationConfig(
            basic_latex=True, units=True, malformed_operators=True, nits=True, boxed="all", equations=False
        ),
    ),
)


def symbolic_equal(answer: str, gold: str) -> bool:
    """Whether math-verify takes the answer for the gold; both as LaTeX without delimiters.

    >>> symbolic_equal(r"\\frac{1}{2}", r"\\int_0^1 x dx")
    True
    """
    golds = parse(f"\\boxed{{{gold}}}", extraction_config=_CONFIG, parsing_timeout=None)
    answers = parse(f"\\boxed{{{answer}}}", extraction_config=_CONFIG, parsing_timeout=None)
    if not golds or not answers:
        return False
    return bool(verify(golds, answers, timeout_seconds=None))


def grader() -> Callable[[dict[str, Any]], bool]:
    """What a worker serves: whether math-verify takes an `answer` for one of the `golds`."""

    def symbolic_any(question: dict[str, Any]) -> bool:
        return any(symbolic_equal(question["answer"], gold) for gold in question["golds"])

    symbolic_any({"answer": "1", "golds": ["1"]})  # first-use costs
    return symbolic_any
