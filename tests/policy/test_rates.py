"""Learning rates of single updates, worked out by hand."""

from __future__ import annotations

import pytest

from attnrl.config import UpdateConfig, load_config
from attnrl.errors import ConfigError
from attnrl.policy.rates import learning_rate


def rates(count: int, **keys: object) -> list[float]:
    options = UpdateConfig(lr=8.0, **keys)  # type: ignore[arg-type]
    return [learning_rate(options, n) for n in range(count)]


def test_constant_after_a_linear_rise() -> None:
    assert rates(3) == [8.0, 8.0, 8.0]
    assert rates(6, lr_warmup_updates=4) == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]


def test_linear_reaches_zero_after_the_last_update() -> None:
    assert rates(6, lr_schedule="linear", lr_decay_updates=4) == [8.0, 6.0, 4.0, 2.0, 0.0, 0.0]
    warm = rates(8, lr_schedule="linear", lr_warmup_updates=2, lr_decay_updates=6)
    assert warm == [4.0, 8.0, 8.0, 6.0, 4.0, 2.0, 0.0, 0.0]


def test_cosine_by_hand() -> None:
    """8 (1 + cos(pi n / 4)) / 2: cos is 1, 1/sqrt 2, 0, -1/sqrt 2, -1."""
    found = rates(6, lr_schedule="cosine", lr_decay_updates=4)
    assert found == pytest.approx([8.0, 4 + 8**0.5, 4.0, 4 - 8**0.5, 0.0, 0.0], abs=1e-12)
    warm = rates(4, lr_schedule="cosine", lr_warmup_updates=1, lr_decay_updates=3)
    assert warm == pytest.approx([8.0, 8.0, 4.0, 0.0], abs=1e-12)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"lr_schedule": "linear"}, "needs lr_decay_updates"),
        ({"lr_decay_updates": 9}, 'lr_decay_updates is set but lr_schedule is "constant"'),
        ({"lr_schedule": "cosine", "lr_decay_updates": 5, "lr_warmup_updates": 5}, "greater than lr_warmup_updates"),
        ({"lr_schedule": "steps"}, r"update\.lr_schedule: .*'constant', 'linear' or 'cosine'"),
    ],
)
def test_schedules_that_cannot_be_are_named(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("attnrl_1p5b", {f"update.{key}": value for key, value in keys.items()})
