"""The verifier as other frameworks call a reward: TRL's GRPOTrainer and verl. Their signatures, our verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attnrl.errors import DataError
from attnrl.verify.verifier import shared

GOLD_COLUMNS = ("answer", "final_answer", "ground_truth", "solution", "gold")


def trl_reward(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """The reward of each response, for `GRPOTrainer(reward_funcs=trl_reward)`; None for an error, which TRL leaves out.

    The gold, text or a list of alternatives, is the data set's column `answer`, `final_answer`, `ground_truth`,
    `solution` or `gold`, the first of them that is there. Responses may be texts or messages.

    >>> trl_reward(prompts=["1+1?"] * 2, completions=[r"\\boxed{2}", [{"content": "no"}]], answer=["2", "2"])
    [1.0, 0.0]
    """
    gold = next((name for name in GOLD_COLUMNS if name in columns), None)
    if gold is None:
        raise DataError(f"the data set has no column with the reference answer; name one of {', '.join(GOLD_COLUMNS)}")
    items = [(_text(said), _golds(one)) for said, one in zip(completions, columns[gold], strict=True)]
    return [None if verdict.error else verdict.reward for verdict in shared.grade(items)]


def verl_reward(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None, **_: Any
) -> dict[str, Any]:
    """The reward of one response, for verl's `custom_reward_function`: `path: pkg://attnrl.verify, name: verl_reward`.

    `score` is the reward, `acc` whether it is right, `pred` the extracted answer; `verify_error` is 1 where the verdict
    is an error, which verl cannot leave out.

    >>> verl_reward("math", r"So \\boxed{\\frac{2}{4}}.", "0.5")
    {'score': 1.0, 'acc': 1.0, 'pred': '\\\\frac{2}{4}', 'verify_error': 0.0}
    """
    (verdict,) = shared.grade([(solution_str, _golds(ground_truth))])
    return {
        "score": verdict.reward,
        "acc": float(verdict.right),
        "pred": verdict.answer or "",
        "verify_error": float(verdict.error is not None),
    }


def _text(said: Any) -> str:
    """A response that is a text, or messages of which the last one counts."""
    return said if isinstance(said, str) else str(said[-1]["content"])


def _golds(gold: Any) -> list[str]:
    """Golds from a text, a number, or a list or array of them; none where it is null."""
    listed = gold.tolist() if hasattr(gold, "tolist") else gold
    golds = listed if isinstance(listed, list | tuple) else [listed]
    return [str(one) for one in golds if one is not None]
