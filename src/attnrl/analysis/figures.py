"""The figures of the page: which metric each one draws, and how to read it.

One line a run; solve ratios draw one for trunks, one for branches, one for both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Unit = Literal["share", "count", "tokens", "seconds", "number"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One panel: a metric over the course of the runs."""

    key: str
    title: str
    note: str
    unit: Unit = "number"
    lines: tuple[tuple[str, str], ...] = ()  # several metrics in one panel, each by its key and name


@dataclass(frozen=True, slots=True)
class Section:
    """Panels that belong together, under one vertical scale where they are there to be compared."""

    title: str
    note: str
    figures: tuple[Figure, ...]
    shared_scale: bool = False


def _solved(name: str, title: str, note: str) -> Figure:
    kinds = ("trunks", "branches", "both")
    return Figure(f"trunks/{name}", title, note, "share", tuple((f"{kind}/{name}", kind) for kind in kinds))


SECTIONS = (
    Section(
        "Solve ratios",
        "Shares of prompts solved by all, by none, and by some of their responses. Trunks count every prompt of the "
        "batch; branches, and both together, the prompts that were branched. The more responses a prompt has, the "
        "fewer are all right or all wrong: hold both of a run that branches against the trunks of one that does not.",
        (
            _solved("solve_all", "Solve-all", "prompts with every response right"),
            _solved("solve_none", "Solve-none", "prompts with every response wrong"),
            _solved("valid", "Valid", "some right, some wrong: these prompts teach"),
        ),
        shared_scale=True,
    ),
    Section(
        "Signal and batches",
        "How much of what was generated could teach, and how adaptive sampling answered.",
        (
            Figure("train/valid_token_share", "Valid token share", "tokens with a non-zero advantage", "share"),
            Figure("train/valid_share", "Valid sample share", "samples with some non-zero advantage", "share"),
            Figure("batch/filtered_share", "Filtered share", "prompts the attention filter dropped (Eq. 8)", "share"),
            Figure("batch/prompts", "Prompt batch", "prompts an iteration (Eq. 10)", "count"),
            Figure("train/samples", "Train batch", "samples the policy was updated on", "count"),
            Figure("train/valid_tokens", "Valid tokens", "an iteration", "tokens"),
        ),
    ),
    Section(
        "Policy and responses",
        "What training does to the policy and to what it writes.",
        (
            Figure("trunks/accuracy", "Training accuracy", "share of right trunks", "share"),
            Figure("generate/length", "Response length", "mean tokens of a rollout", "tokens"),
            Figure("generate/truncated_share", "Truncated share", "rollouts cut off by the length limit", "share"),
            Figure("policy/entropy", "Entropy", "mean of the next-token distribution, nats"),
            Figure("policy/kl", "KL to the start policy", "k3 estimate, mean over loss tokens"),
            Figure("policy/clip_fraction", "Clip fraction", "loss tokens whose ratio was clipped", "share"),
            Figure("policy/grad_norm", "Gradient norm", "before clipping, mean over updates"),
            Figure("policy/behaviour_kl", "KL to the behaviour policy", "between the sampling and the learning policy"),
            Figure("policy/loss", "Loss", "Eq. 1, mean over loss tokens"),
        ),
    ),
    Section(
        "Step scores",
        "Forward Context Influence: how strongly later text attends to a step (Eq. 4-6).",
        (
            Figure("score/fci_mean", "Mean FCI", "over the steps of all trunks"),
            Figure("score/fci_max", "Largest FCI", "of an iteration"),
            Figure("branches/point_share", "Branch points", "mean position in the trunk, 0 start, 1 end", "share"),
        ),
    ),
)

DRAWN = frozenset(key for s in SECTIONS for f in s.figures for key in (f.key, *(key for key, _ in f.lines)))
