"""The curves of the paper's figures, as numbers of one iteration."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from attnrl.types import Branch, Forest, Group, Rollout, Sample, Trunk


def solve_ratios(name: str, outcomes: Iterable[Sequence[Trunk | Branch]]) -> dict[str, float]:
    """Share of prompts whose responses are all right, all not, and of those whose rewards differ ("valid": there is
    something to learn). With rewards of 0 and 1 the three add up to 1. Paper: Fig. 6.
    """
    rows = [row for row in outcomes if row]
    if not rows:
        return {}
    return {
        f"{name}/solve_all": float(np.mean([all(r.right for r in row) for row in rows])),
        f"{name}/solve_none": float(np.mean([not any(r.right for r in row) for row in rows])),
        f"{name}/valid": float(np.mean([len({r.reward for r in row}) > 1 for row in rows])),
    }


def group_statistics(groups: Sequence[Group]) -> dict[str, float]:
    """Accuracy, solve ratios, FCI and lengths of the trunks of a batch, before the filter."""
    trunks = [t for g in groups for t in g.trunks]
    if not trunks:
        return {}
    metrics = {
        "trunks/accuracy": float(np.mean([t.right for t in trunks])),
        "trunks/reward": float(np.mean([t.reward for t in trunks])),
        "trunks/steps": float(np.mean([len(t.steps) for t in trunks])),
        "trunks/truncated_share": float(np.mean([t.rollout.finish == "length" for t in trunks])),
        **solve_ratios("trunks", (g.trunks for g in groups)),
    }
    fci = np.concatenate([t.scores.fci for t in trunks])
    entropy = np.concatenate([t.scores.entropy for t in trunks])
    if np.isfinite(fci).any():
        metrics["score/fci_mean"] = float(np.nanmean(fci))
        metrics["score/fci_max"] = float(np.nanmax(fci))
    if np.isfinite(entropy).any():
        metrics["score/entropy"] = float(np.nanmean(entropy))
    return metrics


def forest_statistics(forests: Sequence[Forest]) -> dict[str, float]:
    """Solve ratios of the branches and of both samplings, for prompts that were branched, and how far easy prompts
    stay easy (Fig. 7a: all branches right where all trunks were).
    """
    branched = [f for f in forests if any(t.branches for t in f.trees)]
    branches = [[b for t in f.trees for b in t.branches] for f in branched]
    both: list[list[Trunk | Branch]] = [
        [*(t.trunk for t in f.trees), *drawn] for f, drawn in zip(branched, branches, strict=True)
    ]
    metrics = {
        "trees/count": float(sum(bool(t.branches) for f in forests for t in f.trees)),
        "trees/leaves": float(sum(1 + len(t.branches) for f in forests for t in f.trees)),
        **solve_ratios("branches", branches),
        **solve_ratios("both", both),
    }
    points = [b.point / len(t.trunk.rollout.ids) for f in forests for t in f.trees for b in t.branches]
    if points:
        metrics["branches/accuracy"] = float(np.mean([b.right for drawn in branches for b in drawn]))
        metrics["branches/point_share"] = float(np.mean(points))
    easy = [drawn for f, drawn in zip(branched, branches, strict=True) if all(t.trunk.right for t in f.trees)]
    if easy:
        metrics["branches/easy_solve_all"] = float(np.mean([all(b.right for b in drawn) for drawn in easy]))
    return metrics


def generation_statistics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Tokens drawn and their lengths, truncation, and the sampler's mean surprisal."""
    lengths = [len(r.ids) for r in rollouts]
    if not lengths:
        return {}
    return {
        "generate/rollouts": float(len(lengths)),
        "generate/tokens": float(sum(lengths)),
        "generate/length": float(np.mean(lengths)),
        "generate/truncated_share": float(np.mean([r.finish == "length" for r in rollouts])),
        "generate/surprisal": float(-np.mean(np.concatenate([r.logprobs for r in rollouts]))),
    }


def sample_statistics(every: Sequence[Sample], trained: Sequence[Sample]) -> dict[str, float]:
    """How much of the train batch has signal: samples, tokens, and their shares of all. Paper: Fig. 7b, Table 3."""
    signal = [s for s in trained if s.has_signal]
    tokens = sum(len(s.response) for s in every)
    carrying = (s.advantages if s.mask is None else s.advantages[s.mask] for s in signal)
    valid = sum(int(np.count_nonzero(a)) for a in carrying)
    return {
        "train/samples": float(len(trained)),
        "train/valid_samples": float(len(signal)),
        "train/valid_share": len(signal) / max(len(every), 1),
        "train/valid_tokens": float(valid),
        "train/valid_token_share": valid / max(tokens, 1),
        "train/response_tokens": float(sum(len(s.response) for s in trained)),
    }
