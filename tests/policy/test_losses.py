"""Every loss against numbers worked out by hand and against a loop over tokens in Python floats."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnrl.config import UpdateConfig, load_config
from attnrl.errors import ConfigError, TrainingError
from attnrl.policy.losses import LOSSES, TokenLoss, mean_over_samples
from attnrl.policy.objective import LossSums, Objective, importance_weights, k3, loss_sums, objective

LOG2 = math.log(2.0)


def of(name: str, new: Any, old: Any, advantages: Any, counts: list[int] | None = None, **options: Any) -> TokenLoss:
    """The loss of float64 tokens, all of one sample where no counts are given."""
    made = objective(UpdateConfig(loss=name, **options))
    columns = [
        x if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=torch.float64) for x in (new, old, advantages)
    ]
    return made.loss(*columns, torch.tensor(counts or [len(columns[0])]))


def summed(
    rows: list[tuple[float, ...]], counts: list[int], options: UpdateConfig, *, reference: bool = True
) -> LossSums:
    """`loss_sums` of rows (new, behaviour, reference, old, advantage, entropy), in float64."""
    new, behaviour, ref, old, advantages, entropy = (
        torch.tensor(c, dtype=torch.float64) for c in zip(*rows, strict=True)
    )
    return loss_sums(
        new,
        entropy,
        advantages_N=advantages,
        behaviour_N=behaviour,
        counts=counts,
        objective=objective(options),
        reference_N=ref if reference else None,
        old_N=old,
    )


class TestClip:
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
    def test_clip_higher_by_hand(self, log_ratio: float, advantage: float, expected: float) -> None:
        found = of("clip", [log_ratio - 1.0], [-1.0], [advantage])
        assert found.loss_N.item() == pytest.approx(expected, abs=1e-12)

    def test_dual_clip_bounds_only_negative_advantages(self) -> None:
        log10 = math.log(10.0)
        found = of("clip", [log10, LOG2, log10, log10], [0.0] * 4, [-1.0, -1.0, 1.0, 0.0], dual_clip=3.0)
        assert found.loss_N.tolist() == pytest.approx([3.0, 2.0, -1.28, 0.0])
        assert found.marks["dual_clip"].tolist() == [True, False, False, False]
        assert "dual_clip" not in of("clip", [log10], [0.0], [-1.0]).marks

    def test_clipped_tokens_have_no_gradient_and_are_marked(self) -> None:
        new = torch.tensor([LOG2, -LOG2, LOG2, math.log(10.0), LOG2], requires_grad=True)
        advantages = torch.tensor([1.0, -1.0, -1.0, -1.0, 0.0])
        found = of("clip", new, torch.zeros(5), advantages, dual_clip=3.0)
        found.loss_N.sum().backward()
        assert new.grad is not None
        torch.testing.assert_close(new.grad, torch.tensor([0.0, 0.0, 2.0, 0.0, 0.0]))
        assert found.marks["clip_high"].tolist() == [True, False, False, False, False]
        assert found.marks["clip_low"].tolist() == [False, True, False, False, False]

    def test_a_ratio_at_the_bound_is_not_held(self) -> None:
        found = of("clip", [LOG2, -LOG2], [0.0, 0.0], [1.0, -1.0], clip_high=1.0, clip_low=0.5)
        assert not found.marks["clip_high"].any()
        assert not found.marks["clip_low"].any()
        assert not of("clip", [LOG2], [0.0], [-1.0], dual_clip=2.0).marks["dual_clip"].any()
        assert not of("cispo", [LOG2], [0.0], [1.0], loss_options={"cap": 2.0}).marks["clip_high"].any()


class TestCispo:
    def test_by_hand(self) -> None:
        """Weights min(r, 5): 2, 5, 0.5; the loss is minus weight times advantage times log-prob."""
        found = of("cispo", [-1.0, -1.0, -1.0], [-1.0 - LOG2, -1.0 - math.log(8.0), -1.0 + LOG2], [1.0, -3.0, 4.0])
        assert found.loss_N.tolist() == pytest.approx([2.0, -15.0, 2.0])
        assert found.marks["clip_high"].tolist() == [False, True, False]

    def test_every_token_keeps_its_gradient_and_the_ratio_gives_none(self) -> None:
        """Gradient -min(r, cap) A: the one of the weighted log-prob, also where the ratio is over the bound."""
        new = torch.tensor([-1.0, -1.0], requires_grad=True)
        old = torch.tensor([-1.0 - LOG2, -1.0 - math.log(8.0)])
        found = of("cispo", new, old, torch.tensor([1.0, 1.0]), loss_options={"cap": 3.0})
        found.loss_N.sum().backward()
        assert new.grad is not None
        assert new.grad.tolist() == pytest.approx([-2.0, -3.0])


class TestGspo:
    def test_by_hand(self) -> None:
        """Log-ratios 1e-4, 3e-4 (mean 2e-4) and -1e-3: the first sample is inside the bounds, the second below."""
        found = of("gspo", [1e-4, 3e-4, -1e-3], [0.0] * 3, [1.0, -2.0, -1.0], counts=[2, 1])
        inside = math.exp(2e-4)
        assert found.loss_N.tolist() == pytest.approx([-inside, 2 * inside, 1 - 3e-4], abs=1e-12)
        assert found.marks["clip_low"].tolist() == [False, False, True]
        assert not found.marks["clip_high"].any()

    def test_the_upper_bound(self) -> None:
        found = of("gspo", [1e-3, 1e-3], [0.0] * 2, [1.0, -1.0], counts=[2])
        assert found.loss_N.tolist() == pytest.approx([-(1 + 4e-4), math.exp(1e-3)], abs=1e-12)
        assert found.marks["clip_high"].tolist() == [True, False]

    def test_gradient_is_the_samples_ratio_times_the_tokens_advantage(self) -> None:
        """Token by token, not spread over the sample: that is the stop-gradient form."""
        new = torch.tensor([0.2, -0.1, 0.3], dtype=torch.float64, requires_grad=True)
        advantages = torch.tensor([1.0, -2.0, 0.0], dtype=torch.float64)
        wide = {"low": 0.9, "high": 9.0}
        of(
            "gspo", new, torch.zeros(3, dtype=torch.float64), advantages, counts=[3], loss_options=wide
        ).loss_N.sum().backward()
        assert new.grad is not None
        ratio = math.exp(0.4 / 3)
        assert new.grad.tolist() == pytest.approx([-ratio, 2 * ratio, 0.0])

    def test_the_minibatch_is_a_mean_over_samples(self) -> None:
        """One token of loss -1 and three of 1: a mean of -1 and 1, not (-1 + 3) / 4."""
        rows = [(0.0, 0.0, 0.0, 0.0, a, 0.0) for a in (1.0, -1.0, -1.0, -1.0)]
        sums = summed(rows, [1, 3], UpdateConfig(loss="gspo", kl_weight=0.0))
        assert sums.units == 2
        assert sums.loss.item() / sums.units == pytest.approx(0.0, abs=1e-12)
        tokens = summed(rows, [1, 3], UpdateConfig(kl_weight=0.0))
        assert tokens.units == 4
        assert tokens.loss.item() / tokens.units == pytest.approx(0.5)

    def test_a_sample_without_loss_tokens_is_none_of_the_mean(self) -> None:
        assert objective(UpdateConfig(loss="gspo")).units([2, 0, 1]) == 2
        assert objective(UpdateConfig()).units([2, 0, 1]) == 3


def test_what_an_update_sums_by_hand() -> None:
    """Ratio 2 to the sampler and advantage 1, held at 1.28, half as likely in the reference; and a token at rest."""
    rows = [(0.0, -LOG2, -LOG2, 0.0, 1.0, 0.5), (0.0, 0.0, 0.0, 0.0, -3.0, 1.5)]
    found = summed(rows, [2], UpdateConfig(kl_weight=0.5, entropy_weight=0.1))
    kl = LOG2 - 0.5  # d = -log 2
    assert {name: value.item() for name, value in found.sums.items()} == pytest.approx(
        {
            "loss": 1.72 + 0.5 * kl - 0.2,
            "surrogate": -1.28 + 3.0,
            "kl": kl,
            "behaviour_kl": 1 - LOG2,  # d = log 2
            "entropy": 2.0,
            "importance_weight": 2.0,
            "clip_high": 1.0,
            "clip_low": 0.0,
        }
    )
    assert (found.loss.item(), found.ratio_max.item()) == pytest.approx((1.72 + 0.5 * kl - 0.2, 2.0))


def test_a_loss_gets_its_counts_where_its_tokens_are() -> None:
    """The meta device holds no values, and refuses tensors of another device like any."""
    seen = []

    def loss(new_N: torch.Tensor, old_N: torch.Tensor, advantages_N: torch.Tensor, counts_S: torch.Tensor) -> Any:
        seen.append(counts_S.device.type)
        return new_N * advantages_N

    column_N = torch.zeros(2, device="meta")
    made = Objective(partial(loss), UpdateConfig())
    loss_sums(column_N, column_N, advantages_N=column_N, behaviour_N=column_N, counts=[2], objective=made)
    assert seen == ["meta"]


def test_k3_by_hand() -> None:
    torch.testing.assert_close(k3(torch.tensor([0.0, LOG2, -LOG2])), torch.tensor([0.0, 1 - LOG2, LOG2 - 0.5]))


class TestImportanceWeights:
    old = torch.tensor([math.log(w) for w in (0.4, 0.5, 1.7, 2.0, 2.1)], dtype=torch.float64, requires_grad=True)

    def test_truncated_by_hand(self) -> None:
        weights = importance_weights(self.old, torch.zeros(5), cap=1.5)
        assert weights.tolist() == pytest.approx([0.4, 0.5, 1.5, 1.5, 1.5])
        assert not weights.requires_grad

    def test_masked_by_hand(self) -> None:
        weights = importance_weights(self.old, torch.zeros(5), mask=(0.499999, 2.000001))
        assert weights.tolist() == pytest.approx([0.0, 0.5, 1.7, 2.0, 0.0])
        assert not weights.requires_grad

    def test_both_bounds_of_a_mask_are_included(self) -> None:
        """Log-probs of 0, so that the weight is 1 to the last bit."""
        for bounds in ((1.0, 2.0), (0.5, 1.0)):
            assert importance_weights(torch.zeros(1), torch.zeros(1), mask=bounds).item() == 1.0

    def test_the_ratio_moves_to_the_learner(self) -> None:
        """new = old = 0.5 * sampler probability: ratio 1 against the learner, weight 0.5 on a token of advantage 2."""
        row = (-LOG2, 0.0, 0.0, -LOG2, 2.0, 0.0)
        for kind in ({"importance_cap": 2.0}, {"importance_mask": (0.4, 2.0)}):
            sums = summed([row], [1], UpdateConfig(kl_weight=0.0, **kind), reference=False)
            assert sums.loss.item() == pytest.approx(-1.0)
            assert sums.ratio_max.item() == pytest.approx(1.0)

    def test_a_masked_token_keeps_its_kl_and_its_place_in_the_mean(self) -> None:
        rows = [(0.0, -LOG2 * 2, LOG2, 0.0, 5.0, 0.0), (0.0, 0.0, 0.0, 0.0, 1.0, 0.0)]  # weights 4 and 1
        sums = summed(rows, [2], UpdateConfig(kl_weight=1.0, importance_mask=(0.5, 2.0)))
        assert sums.loss.item() == pytest.approx((1 - LOG2) - 1.0)
        assert sums.units == 2
        assert sums.sums["importance_weight"].item() == pytest.approx(1.0)


def naive(rows: list[tuple[float, ...]], counts: list[int], o: UpdateConfig) -> tuple[float, dict[str, int]]:
    """Eq. 1 token by token, and the mean over tokens (over samples for gspo)."""
    total, high, low, at = 0.0, 0, 0, 0
    for count in counts:
        sample, at = rows[at : at + count], at + count
        weighted = o.importance_cap is not None or o.importance_mask is not None
        logs = [new - (old if weighted else behaviour) for new, behaviour, _, old, _, _ in sample]
        for (new, behaviour, reference, old, advantage, entropy), log_ratio in zip(sample, logs, strict=True):
            ratio = math.exp(sum(logs) / count) if o.loss == "gspo" else math.exp(log_ratio)
            below, above = (3e-4, 4e-4) if o.loss == "gspo" else (o.clip_low, o.clip_high)
            if o.loss == "cispo":
                gain = min(ratio, 5.0) * advantage * new
                high += ratio > 5.0
            else:
                gain = min(ratio * advantage, min(max(ratio, 1 - below), 1 + above) * advantage)
                high += advantage > 0 and ratio > 1 + above
                low += advantage < 0 and ratio < 1 - below
            if o.dual_clip is not None and advantage < 0:
                gain = max(gain, o.dual_clip * advantage)
            weight = math.exp(old - behaviour) if weighted else 1.0
            if o.importance_cap is not None:
                weight = min(weight, o.importance_cap)
            if o.importance_mask is not None and not o.importance_mask[0] <= weight <= o.importance_mask[1]:
                weight = 0.0
            d = reference - new
            term = -weight * gain + o.kl_weight * (math.exp(d) - d - 1) - o.entropy_weight * entropy
            total += term / (count * len(counts) if o.loss == "gspo" else len(rows))
    return total, {"clip_high": high, "clip_low": low}


logprob = st.floats(-3.0, 0.0)
token = st.tuples(logprob, logprob, logprob, logprob, st.floats(-3.0, 3.0), st.floats(0.0, 3.0))
shared = {"kl_weight": st.floats(0.001, 1.0), "entropy_weight": st.floats(0.0, 0.1)}
bounds = {"clip_low": st.floats(0.05, 0.5), "clip_high": st.floats(0.05, 0.5)}
sections = st.one_of(
    st.builds(UpdateConfig, **shared, **bounds, dual_clip=st.none() | st.floats(1.5, 4.0)),
    st.builds(UpdateConfig, **shared, **bounds, importance_cap=st.floats(0.5, 3.0)),
    st.builds(UpdateConfig, **shared, loss=st.sampled_from(["clip", "cispo", "gspo"])),
    st.builds(UpdateConfig, **shared, loss=st.sampled_from(sorted(LOSSES)), importance_mask=st.just((0.5, 2.0))),
)


@settings(max_examples=150, deadline=None)
@given(samples=st.lists(st.lists(token, min_size=1, max_size=6), min_size=1, max_size=4), options=sections)
def test_loss_equals_a_loop_over_tokens(samples: list[list[tuple[float, ...]]], options: UpdateConfig) -> None:
    rows, counts = [row for sample in samples for row in sample], [len(sample) for sample in samples]
    sums = summed(rows, counts, options)
    expected, held = naive(rows, counts, options)
    assert sums.loss.item() / sums.units == pytest.approx(expected, rel=1e-9, abs=1e-9)
    for name, count in held.items():
        assert sums.sums.get(name, torch.tensor(0.0)).item() == count


def test_a_log_ratio_is_held_within_twenty() -> None:
    assert of("clip", [0.0], [-500.0], [-1.0]).loss_N.item() == pytest.approx(math.exp(20))
    assert of("clip", [-500.0], [0.0], [1.0]).loss_N.item() == pytest.approx(-math.exp(-20))
    assert k3(torch.tensor([500.0, -500.0])).tolist() == pytest.approx(
        [math.exp(20) - 21, math.exp(-20) + 19], rel=1e-5
    )


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_an_absurd_log_ratio_stays_finite(name: str) -> None:
    new = torch.tensor([-500.0, 0.0], requires_grad=True)
    sums = loss_sums(
        new,
        torch.zeros(2),
        advantages_N=torch.tensor([1.0, -1.0]),
        behaviour_N=torch.tensor([0.0, -500.0]),
        counts=[1, 1],
        objective=objective(UpdateConfig(loss=name)),
        reference_N=torch.zeros(2),
    )
    sums.loss.backward()
    assert new.grad is not None
    assert torch.isfinite(sums.loss)
    assert torch.isfinite(new.grad).all()


OWN = """
import torch
from attnrl.policy.losses import TokenLoss, mean_over_samples

def reinforce(new_N, old_N, advantages_N, counts_S):
    return -advantages_N * new_N

def summed_up(new_N, old_N, advantages_N, counts_S):
    return (-advantages_N * new_N).sum()

def forgets(new_N, old_N, advantages_N, counts_S):
    -advantages_N * new_N

def unmoved(new_N, old_N, advantages_N, counts_S):
    return -advantages_N * new_N.detach()

def narrow(new_N):
    return new_N

@mean_over_samples
def held(new_N, old_N, advantages_N, counts_S, *, clip_low, strength=1.0):
    return TokenLoss(-strength * clip_low * advantages_N * new_N, {"odd": advantages_N > 1})
"""


class TestByName:
    @pytest.fixture(autouse=True)
    def own_file(self, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "own_losses.py").write_text(OWN)
        monkeypatch.syspath_prepend(tmp_path)

    def test_a_users_own_may_return_a_bare_tensor(self) -> None:
        rows = [(-1.0, -2.0, 0.0, 0.0, 3.0, 0.0), (-2.0, -1.0, 0.0, 0.0, 1.0, 0.0)]
        sums = summed(rows, [2], UpdateConfig(loss="own_losses:reinforce", kl_weight=0.0))
        assert (sums.loss.item(), sums.units) == (pytest.approx(5.0), 2)

    def test_a_users_own_gets_knobs_and_options_and_has_its_marks_counted(self) -> None:
        options = UpdateConfig(loss="own_losses:held", loss_options={"strength": 2.0}, clip_low=0.5, kl_weight=0.0)
        sums = summed([(-1.0, -2.0, 0.0, 0.0, 3.0, 0.0)] * 2, [2], options)
        assert (sums.loss.item(), sums.units, sums.sums["odd"].item()) == (pytest.approx(3.0), 1, 2)

    @pytest.mark.parametrize(("name", "got"), [("summed_up", r"\(\)"), ("forgets", "NoneType")])
    def test_a_loss_that_is_not_one_for_each_token_is_named(self, name: str, got: str) -> None:
        """A sum would be spread over all tokens, and the loss of a batch grow with its size."""
        said = rf"update\.loss: the loss {name} must return a loss for each token, a tensor of shape \(2,\), not {got}"
        with pytest.raises(TrainingError, match=said):
            summed([(-1.0, -2.0, 0.0, 0.0, 3.0, 0.0)] * 2, [2], UpdateConfig(loss=f"own_losses:{name}"))

    def test_a_loss_that_does_not_follow_the_policy_is_named(self) -> None:
        rows_N = torch.zeros(2, requires_grad=True)
        said = r"update\.loss: the loss unmoved must depend on the policy's log-probs"
        with pytest.raises(TrainingError, match=said):
            loss_sums(
                rows_N,
                torch.zeros(2),
                advantages_N=torch.ones(2),
                behaviour_N=torch.zeros(2),
                counts=[2],
                objective=objective(UpdateConfig(loss="own_losses:unmoved")),
            )

    @pytest.mark.parametrize(
        ("name", "option", "inside", "outside"),
        [
            ("cispo", "cap", [0.5, 5.0], [0.0, -1.0]),
            ("gspo", "low", [1e-6, 0.5], [0.0, 1.0]),
            ("gspo", "high", [1e-6, 9.0], [0.0, -1.0]),
            ("clip", "dual_clip", [1.5], [1.0]),
        ],
    )
    def test_options_have_ranges(self, name: str, option: str, inside: list[float], outside: list[float]) -> None:
        for value in inside:
            made = objective(UpdateConfig(loss=name, loss_options={option: value}))
            assert made.loss.keywords[option] == value
        for value in outside:
            with pytest.raises(ConfigError, match=rf"update\.loss: option {option} = {value}: .* than"):
                objective(UpdateConfig(loss=name, loss_options={option: value}))

    @pytest.mark.parametrize(
        ("overrides", "message"),
        [
            (
                {"loss": "own_losses:narrow"},
                r"update\.loss: must be callable as \(new_N, base_N, advantages_N, counts_S\)",
            ),
            ({"loss": "clop"}, r"update\.loss: unknown name 'clop'.* clip, cispo, gspo"),
            ({"loss": "no_such_module:f"}, r"update\.loss: cannot import"),
            ({"loss": "cispo", "loss_options": {"low": 1.0}}, r"update\.loss: 'cispo' has no option 'low'"),
        ],
    )
    def test_a_mistake_is_named(self, overrides: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            objective(UpdateConfig(**overrides))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("clip_low", 1.5),
        ("clip_high", 0.0),
        ("dual_clip", 1.0),
        ("kl_weight", -1.0),
        ("importance_cap", 0.0),
        ("importance_mask", [2.0, 0.5]),
        ("importance_mask", [-1.0, 2.0]),
        ("betas", [0.9, 1.0]),
        ("max_grad_norm", 0.0),
        ("lr", 0.0),
        ("microbatch_tokens", 0),
    ],
)
def test_bad_values_name_their_key(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"update\.{key}: .*, got"):
        load_config("attnrl_1p5b", {f"update.{key}": value})


def test_truncated_and_masked_weights_exclude_each_other() -> None:
    both = {"update.importance_cap": 2.0, "update.importance_mask": [0.5, 2.0]}
    with pytest.raises(ConfigError, match="importance_cap and importance_mask"):
        load_config("attnrl_1p5b", both)


def test_losses_say_what_their_mean_runs_over() -> None:
    over_samples = {name for name, loss in LOSSES.items() if getattr(loss, "mean_over_samples", False)}
    assert over_samples == {"gspo"}
    assert mean_over_samples(lambda: None).mean_over_samples  # type: ignore[attr-defined]
