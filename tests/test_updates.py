"""Methods of one comparison make equally many updates, whatever becomes of their batches."""

from __future__ import annotations

import numpy as np
import pytest

from attnrl.algo.minibatches import plan_minibatches
from attnrl.config import load_config, presets
from attnrl.iteration import first_state
from attnrl.schedules import SCHEDULES
from fakes import FakeBackend, fake_parts

ITERATIONS = 30
SMALL = {"algo.prompts": 3, "algo.max_prompts": 9, "sampling.max_response_tokens": 64}


def updates(preset: str) -> tuple[list[int], list[int]]:
    """Updates of each iteration as the learner would make them, and the samples they were made from."""
    config = load_config(preset, SMALL)
    backend = FakeBackend()
    parts = fake_parts(config, backend)
    state = first_state(parts, 0)
    for _ in range(ITERATIONS):
        state = SCHEDULES[config.algo.schedule](state, parts).state
    update, rng = config.update, np.random.default_rng(0)
    plans = [
        plan_minibatches(
            [s.uid for s in samples], minibatches=update.minibatches, samples=update.minibatch_samples, rng=rng
        )
        for samples in backend.trained
    ]
    return [len(plan) for plan in plans], [len(samples) for samples in backend.trained]


LADDER = [
    "grpo_1p5b",
    "treerl_1p5b",
    "treerl_1p5b_off_policy",
    "ablation_atb_1p5b",
    "ablation_no_filter_1p5b",
    "ablation_no_expansion_1p5b",
    "attnrl_1p5b",
]


@pytest.mark.parametrize("preset", LADDER)
def test_two_updates_an_iteration_on_every_step_of_the_ladder(preset: str) -> None:
    assert updates(preset)[0] == [2] * ITERATIONS


def test_two_updates_also_where_the_batch_grows() -> None:
    made, samples = updates("attnrl_1p5b")
    assert made == [2] * ITERATIONS
    assert max(samples) > 1.5 * min(samples)


def test_every_preset_but_the_released_one_says_two() -> None:
    found = {name: load_config(name).update.minibatches for name in presets()}
    assert found.pop("attnrl_1p5b_released") is None
    assert set(found.values()) == {2}


def test_the_released_code_makes_updates_of_so_many_samples() -> None:
    made, samples = updates("attnrl_1p5b_released")
    assert made == [-(-count // 192) for count in samples]
