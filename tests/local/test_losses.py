"""Eq. 1 against numbers worked out by hand and against a loop over tokens."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnrl.errors import ConfigError
from attnrl.local.losses import LossOptions, importance_weights, k3, loss_sums, policy_loss

LOG2 = math.log(2.0)


def one(new: float, old: float, advantage: float, **options: float) -> float:
    tensors = [torch.tensor([x]) for x in (new, old, advantage)]
    return policy_loss(*tensors, LossOptions(**options))[0].item()


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "expected"),
    [
        (0.0, 1.5, -1.5),  # ratio 1
        (LOG2, 1.0, -1.28),  # ratio 2, held at 1 + 0.28
        (LOG2, -1.0, 2.0),  # ratio 2, not held: the pessimistic side
        (-LOG2, 1.0, -0.5),  # ratio 0.5, not held
        (-LOG2, -1.0, 0.8),  # ratio 0.5, held at 1 - 0.2
    ],
)
def test_clip_higher_by_hand(log_ratio: float, advantage: float, expected: float) -> None:
    assert one(log_ratio - 1.0, -1.0, advantage) == pytest.approx(expected, abs=1e-6)


def test_dual_clip_bounds_only_negative_advantages() -> None:
    assert one(math.log(10.0), 0.0, -1.0, dual_clip=3.0) == pytest.approx(3.0)
    assert one(math.log(2.0), 0.0, -1.0, dual_clip=3.0) == pytest.approx(2.0)
    assert one(math.log(10.0), 0.0, 1.0, dual_clip=3.0) == pytest.approx(-1.28)


def test_clipped_tokens_have_no_gradient() -> None:
    new = torch.tensor([LOG2, -LOG2, LOG2, math.log(10.0)], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, -1.0, -1.0])
    policy_loss(new, torch.zeros(4), advantages, LossOptions(dual_clip=3.0))[0].sum().backward()
    assert new.grad is not None
    torch.testing.assert_close(new.grad, torch.tensor([0.0, 0.0, 2.0, 0.0]))


def test_k3_by_hand() -> None:
    torch.testing.assert_close(k3(torch.tensor([0.0, LOG2, -LOG2])), torch.tensor([0.0, 1 - LOG2, LOG2 - 0.5]))


def test_importance_weight_is_capped_and_detached() -> None:
    old = torch.tensor([LOG2, -LOG2], requires_grad=True)
    weights = importance_weights(old, torch.zeros(2), cap=1.5)
    torch.testing.assert_close(weights, torch.tensor([1.5, 0.5]))
    assert not weights.requires_grad


def test_importance_weight_moves_the_ratio_to_the_learner() -> None:
    """new = old = 0.5 * sampler probability: ratio 1 against the learner, weight 0.5 on a token of advantage 2."""
    sums = loss_sums(
        torch.tensor([-LOG2]),
        torch.tensor([0.0]),
        advantages_N=torch.tensor([2.0]),
        behaviour_N=torch.tensor([0.0]),
        options=LossOptions(importance_cap=2.0, kl_weight=0.0),
        old_N=torch.tensor([-LOG2]),
    )
    assert sums.loss.item() == pytest.approx(-1.0)
    assert sums.ratio_max.item() == pytest.approx(1.0)


def naive(rows: list[tuple[float, ...]], options: LossOptions) -> tuple[float, dict[str, float]]:
    """Eq. 1 summed token by token in Python floats."""
    total, high, low = 0.0, 0, 0
    for new, behaviour, reference, old, advantage, entropy in rows:
        base, weight = behaviour, 1.0
        if options.importance_cap is not None:
            base, weight = old, min(math.exp(old - behaviour), options.importance_cap)
        ratio = math.exp(new - base)
        held = min(max(ratio, 1 - options.clip_low), 1 + options.clip_high)
        gain = min(ratio * advantage, held * advantage)
        if options.dual_clip is not None and advantage < 0:
            gain = max(gain, options.dual_clip * advantage)
        d = reference - new
        total += -weight * gain + options.kl_weight * (math.exp(d) - d - 1) - options.entropy_weight * entropy
        high += advantage > 0 and ratio > 1 + options.clip_high
        low += advantage < 0 and ratio < 1 - options.clip_low
    return total, {"clip_high": high, "clip_low": low}


logprob = st.floats(-3.0, 0.0)
token = st.tuples(logprob, logprob, logprob, logprob, st.floats(-3.0, 3.0), st.floats(0.0, 3.0))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(token, min_size=1, max_size=12),
    options=st.builds(
        LossOptions,
        clip_low=st.floats(0.05, 0.5),
        clip_high=st.floats(0.05, 0.5),
        kl_weight=st.floats(0.001, 1.0),
        dual_clip=st.none() | st.floats(1.5, 4.0),
        importance_cap=st.none() | st.floats(0.5, 3.0),
        entropy_weight=st.floats(0.0, 0.1),
    ),
)
def test_loss_equals_a_loop_over_tokens(rows: list[tuple[float, ...]], options: LossOptions) -> None:
    columns = [torch.tensor(c, dtype=torch.float64) for c in zip(*rows, strict=True)]
    new, behaviour, reference, old, advantages, entropy = columns
    sums = loss_sums(
        new,
        entropy,
        advantages_N=advantages,
        behaviour_N=behaviour,
        options=options,
        reference_N=reference,
        old_N=old,
    )
    expected, counts = naive(rows, options)
    assert sums.loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    for name, count in counts.items():
        assert sums.sums[name].item() == count


def test_an_absurd_log_ratio_stays_finite() -> None:
    new = torch.tensor([-500.0, 0.0], requires_grad=True)
    sums = loss_sums(
        new,
        torch.zeros(2),
        advantages_N=torch.tensor([1.0, -1.0]),
        behaviour_N=torch.tensor([0.0, -500.0]),
        options=LossOptions(),
        reference_N=torch.zeros(2),
    )
    sums.loss.backward()
    assert new.grad is not None
    assert torch.isfinite(sums.loss)
    assert torch.isfinite(new.grad).all()


@pytest.mark.parametrize("bad", [{"clip_low": 1.5}, {"dual_clip": 1.0}, {"kl_weight": -1.0}, {"importance_cap": 0.0}])
def test_bad_options_name_their_key(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        LossOptions(**bad)
