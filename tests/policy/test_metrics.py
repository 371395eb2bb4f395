"""Sums of microbatches, minibatches and ranks add up to one mean, by hand; counters stop a run that only skips."""

from __future__ import annotations

import pytest
import torch

from attnrl.errors import TrainingError
from attnrl.policy.metrics import UpdateMetrics
from attnrl.policy.rates import Counters


def part(loss: float, tokens: int, ratio: float, **marks: float) -> UpdateMetrics:
    sums = {"loss": torch.tensor(loss), "entropy": torch.tensor(2.0 * tokens)}
    sums |= {name: torch.tensor(value) for name, value in marks.items()}
    return UpdateMetrics(sums, torch.tensor(ratio), tokens=tokens, units=tokens, path_tokens=10, microbatches=1)


def test_parts_of_unequal_size_make_one_mean_over_all_tokens() -> None:
    total = UpdateMetrics(norms=[1.0, 3.0], skipped=1)
    for one in (part(8.0, 2, 1.5), part(1.0, 1, 4.0, clip_high=1.0), UpdateMetrics()):
        total.add(one)
    found = total.summary(lr=0.5, samples=7)
    assert found["policy/loss"] == pytest.approx(3.0)  # 9 over 3 tokens; a mean of means would be 2.5
    assert found["policy/entropy"] == pytest.approx(2.0)
    assert found["policy/clip_high"] == found["policy/clip_fraction"] == pytest.approx(1 / 3)  # of one part alone
    assert (found["policy/ratio_max"], found["policy/grad_norm"]) == (4.0, 2.0)
    assert (found["train/tokens"], found["train/path_tokens"], found["train/microbatches"]) == (3.0, 20.0, 2.0)
    assert (found["policy/updates"], found["policy/skipped_updates"], found["train/samples"]) == (2.0, 1.0, 7.0)


def test_the_order_of_parts_does_not_matter_and_nothing_is_taken_twice() -> None:
    one, other = part(6.0, 2, 1.5, mine=1.0), part(3.0, 4, 1.0)
    there, back = UpdateMetrics(), UpdateMetrics()
    there.add(one)
    there.add(other)
    back.add(other)
    back.add(one)
    assert there.summary(lr=0.0, samples=0) == back.summary(lr=0.0, samples=0)
    assert (float(one.sums["loss"]), one.tokens) == (6.0, 2)


def test_so_many_skipped_updates_in_a_row_stop_the_run() -> None:
    counters = Counters()
    counters.skip(3)
    counters.skip(3)
    counters.made()
    counters.skip(3)
    assert counters == Counters(updates=1, skipped=3, skipped_in_a_row=1)
    counters.skip(3)
    with pytest.raises(TrainingError, match="3 updates in a row"):
        counters.skip(3)


@pytest.mark.parametrize("norm", [float("nan"), float("inf")])
def test_a_step_left_out_adds_nothing_but_itself(norm: float) -> None:
    metrics, counters = UpdateMetrics(), Counters()
    metrics.add_step(part(6.0, 2, 1.5), 0.5, counters, 2)
    metrics.add_step(part(float("nan"), 4, 9.0), norm, counters, 2)
    assert (metrics.norms, metrics.skipped, metrics.tokens, metrics.total("loss")) == ([0.5], 1, 2, 6.0)
    assert counters == Counters(updates=1, skipped=1, skipped_in_a_row=1)
    with pytest.raises(TrainingError, match="2 updates in a row"):
        metrics.add_step(part(6.0, 2, 1.5), norm, counters, 2)
