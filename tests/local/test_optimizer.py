"""AdamW over float32 masters: steps worked out by hand, and the same with its state elsewhere or in bytes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from attnrl.errors import ConfigError
from attnrl.local import streamed
from attnrl.local.optimizer import STATES, MasterAdamW
from attnrl.local.streamed import BLOCK, first_levels, quantised, second_levels

KINDS = list(STATES)


def parameters(dtype: torch.dtype = torch.float32) -> tuple[nn.Parameter, nn.Parameter]:
    """A matrix and a vector."""
    return nn.Parameter(torch.full((2, 2), 4.0, dtype=dtype)), nn.Parameter(torch.full((2,), 4.0, dtype=dtype))


def backward(*weights: nn.Parameter, slope: float) -> None:
    sum((slope * w.float()).sum() for w in weights).backward()  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_step_is_the_rate_and_only_matrices_decay(kind: str) -> None:
    """Adam's first step is lr times the sign; decay takes lr * 0.5 * 4 = 0.2 off the matrix first."""
    matrix, vector = parameters()
    optimizer = MasterAdamW([matrix, vector], kind=kind, weight_decay=0.5, clip_norm=None)
    backward(matrix, vector, slope=-3.0)
    optimizer.step(0.1, optimizer.gradient_norm())
    torch.testing.assert_close(matrix.data, torch.full((2, 2), 4.0 - 0.2 + 0.1))
    torch.testing.assert_close(vector.data, torch.full((2,), 4.0 + 0.1))


def test_gradients_are_scaled_down_to_the_norm_and_never_up() -> None:
    """Slope 3 on six entries: norm 3 sqrt 6. Clipped to 1, Adam's first moment is 0.1 of 1 / sqrt 6 each."""
    for clip, expected in ((1.0, 1 / 6**0.5), (100.0, 3.0), (None, 3.0)):
        matrix, vector = parameters()
        optimizer = MasterAdamW([matrix, vector], clip_norm=clip)
        backward(matrix, vector, slope=3.0)
        norm = optimizer.gradient_norm()
        assert norm.item() == pytest.approx(3 * 6**0.5)
        optimizer.step(0.1, norm)
        assert optimizer.state.adam.state[vector]["exp_avg"].tolist() == pytest.approx([0.1 * expected] * 2, rel=1e-4)


def test_betas_weigh_the_averages() -> None:
    matrix, vector = parameters()
    optimizer = MasterAdamW([matrix, vector], betas=(0.5, 0.75), clip_norm=None)
    backward(matrix, vector, slope=2.0)
    optimizer.step(0.1, optimizer.gradient_norm())
    state = optimizer.state.adam.state[vector]
    assert (state["exp_avg"].tolist(), state["exp_avg_sq"].tolist()) == ([1.0, 1.0], [1.0, 1.0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_clears_the_gradients_and_microbatches_add_up(kind: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        matrix, vector = parameters(dtype)
        optimizer = MasterAdamW([matrix, vector], kind=kind, clip_norm=None)
        assert optimizer.coming_bytes() == 6 * 4
        backward(matrix, vector, slope=1.0)
        assert optimizer.coming_bytes() == 0
        backward(matrix, vector, slope=1 / 512)  # lost in bfloat16, kept in the master's gradient
        assert optimizer.gradient_norm().item() == pytest.approx((1 + 1 / 512) * 6**0.5, rel=1e-6)
        optimizer.step(0.1, optimizer.gradient_norm())
        assert all(holder.grad is None for holder in optimizer.state.holders)
        assert matrix.grad is None


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_parameters_are_left_alone(kind: str) -> None:
    matrix, vector = parameters()
    matrix.requires_grad_(False)
    optimizer = MasterAdamW([matrix, vector], kind=kind, weight_decay=0.5)
    backward(vector, slope=1.0)
    optimizer.step(0.1, optimizer.gradient_norm())
    assert matrix.tolist() == [[4.0, 4.0], [4.0, 4.0]]
    assert len(optimizer.masters) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_optimizer_goes_on_exactly(dtype: torch.dtype, kind: str) -> None:
    """Also what bfloat16 cannot show: the masters are part of the state."""
    first = parameters(dtype)
    optimizer = MasterAdamW(first, kind=kind)
    for slope in (1.0, -0.3):
        backward(*first, slope=slope)
        optimizer.step(1e-4, optimizer.gradient_norm())
    second = tuple(nn.Parameter(p.detach().clone()) for p in first)
    restored = MasterAdamW(second, kind=kind)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for slope in (0.7, 0.2):
        for weights, adam in ((first, optimizer), (second, restored)):
            backward(*weights, slope=slope)
            adam.step(1e-4, adam.gradient_norm())
    for a, b in zip(optimizer.masters, restored.masters, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
        assert a.dtype == dtype


Found = tuple[list[torch.Tensor], list[torch.Tensor], float]


def learned(kind: str, *, dtype: torch.dtype = torch.float32, steps: int = 300, staged: bool = False) -> Found:
    """Masters before and after, and the mean loss of the last 50 steps: a small net learns which of ten directions of
    its input is the largest, each step on 64 new inputs. The third layer has no gradient."""
    torch.manual_seed(0)
    parts = [nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 10)]
    net, idle = nn.Sequential(*parts).to(dtype), nn.Linear(3, 3).to(dtype)
    chance = torch.Generator().manual_seed(1)
    directions = torch.randn(64, 10, generator=chance)
    optimizer = MasterAdamW([*idle.parameters(), *net.parameters()], kind=kind)
    if staged:  # as for a model on a GPU
        state: Any = optimizer.state
        state.fused = True
        state.down_N, state.up_N = torch.empty(streamed.SLICE), torch.empty(streamed.SLICE, dtype=dtype)
    before = [m.detach().clone() for m in optimizer.masters]
    losses = []
    for _ in range(steps):
        x = torch.randn(64, 64, generator=chance)
        loss = nn.functional.cross_entropy(net(x.to(dtype)).float(), (x @ directions).argmax(-1))
        loss.backward()
        optimizer.step(3e-3, optimizer.gradient_norm())
        losses.append(loss.item())
    assert all(torch.equal(p.data, m.to(dtype)) for p, m in zip(optimizer.parameters, optimizer.masters, strict=True))
    return before, [m.detach().clone() for m in optimizer.masters], sum(losses[-50:]) / 50


def apart(first: Found, second: Found) -> float:
    """Distance of two results, in units of the way from the start to the first."""
    start, a, b = (torch.cat([w.flatten() for w in ws]) for ws in (first[0], first[1], second[1]))
    return float((a - b).norm() / (a - start).norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offloaded_steps_are_the_plain_ones_to_the_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = learned("adamw", dtype=dtype, steps=30)
    monkeypatch.setattr(streamed, "SLICE", 1000)  # the matrices in several slices, the last of them shorter
    found = learned("adamw_offloaded", dtype=dtype, steps=30)
    assert all(torch.equal(a, b) for a, b in zip(plain[1], found[1], strict=True))
    assert apart(plain, (plain[0], plain[0], 0.0)) == 1.0  # weights moved


def test_steps_for_a_model_on_a_gpu_differ_by_rounding_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's fused kernel, and gradients and weights that go through buffers of a slice."""
    monkeypatch.setattr(streamed, "SLICE", 1000)
    assert 0 < apart(learned("adamw", steps=30), learned("adamw_offloaded", steps=30, staged=True)) < 1e-5


def test_eight_bits_follow_float32_over_hundreds_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """After 300 steps within 6 % of the way that the weights have come, and the same loss within 2 %."""
    plain, bytes_ = learned("adamw"), learned("adamw_8bit")
    assert plain[2] < 0.4  # 2.3 at the start
    assert 0 < apart(plain, bytes_) < 0.06
    assert bytes_[2] == pytest.approx(plain[2], rel=0.02)
    monkeypatch.setattr(streamed, "SLICE", 2 * BLOCK)
    assert apart(bytes_, learned("adamw_8bit")) == 0  # slices change nothing


def test_levels_are_in_equal_ratios_and_each_is_kept_as_it_is() -> None:
    first, second = first_levels(), second_levels()
    assert (len(first), len(second)) == (255, 256)
    assert (first[0], first[127], first[254], second[255]) == (-1, 0, 1, 1)
    assert (first[128], second[0]) == (2.0**-12, 2.0**-24)
    torch.testing.assert_close(first[129:] / first[128:-1], torch.full((126,), 2 ** (12 / 126)))
    torch.testing.assert_close(second[1:] / second[:-1], torch.full((255,), 2 ** (24 / 255)))
    for levels in (first, second):
        codes_B, scales_B = quantised(levels * 0.25, levels)
        assert scales_B.tolist() == [[0.25]]
        assert codes_B[0, : len(levels)].tolist() == list(range(len(levels)))


def test_what_is_lost_to_a_byte() -> None:
    """Half a ratio between levels at most; blocks have scales of their own; beside others no second moment becomes 0,
    first moments do where they are less than half the lowest level."""
    torch.manual_seed(0)
    values = torch.exp2(torch.empty(2 * BLOCK).uniform_(-10, 0)) * torch.tensor([1.0, -1e-12]).repeat_interleave(BLOCK)
    codes_B, scales_B = quantised(values, first_levels())
    back = (first_levels()[codes_B.int()] * scales_B).view(-1)
    assert float((back / values - 1).abs().max()) < (2 ** (12 / 126) - 1) / 2 * 1.001
    tiny = torch.tensor([1.0, 2.0**-13 * 0.99, 1e-30, 0.0])
    assert quantised(tiny, first_levels())[0][0, :4].tolist() == [254, 127, 127, 127]
    assert quantised(tiny, second_levels())[0][0, :4].tolist() == [255, 117, 0, 0]  # (24 - 13.01) / 24 of 255
    empty = quantised(torch.zeros(3), second_levels())
    assert (second_levels()[empty[0].int()] * empty[1]).abs().max() == 0


def test_bytes_of_the_state_are_what_is_said() -> None:
    """A weight: 8 bytes of moments in float32; in 8 bits 2, and 8 more a block of 256. Masters are 4 where they are."""
    sizes = {}
    for kind in KINDS:
        weight = nn.Parameter(torch.randn(64, 1024, dtype=torch.bfloat16))
        optimizer = MasterAdamW([weight], kind=kind)
        backward(weight, slope=1.0)
        optimizer.step(1e-3, optimizer.gradient_norm())
        state = optimizer.state_dict()
        moments = (
            state["moments"]
            if "moments" in state
            else [state["adam"]["state"][0][k] for k in ("exp_avg", "exp_avg_sq")]
        )
        sizes[kind] = [sum(t.nbytes for t in moments), sum(m.nbytes for m in state["masters"])]
    weights = 64 * 1024
    plain = [8 * weights, 4 * weights]
    assert sizes == {
        "adamw": plain,
        "adamw_offloaded": plain,
        "adamw_8bit": [2 * weights + 8 * weights // 256, 4 * weights],
    }


@pytest.mark.parametrize(("old", "new"), [("adamw", "adamw_8bit"), ("adamw_8bit", "adamw_offloaded")])
def test_a_state_of_another_kind_is_refused_with_both(old: str, new: str) -> None:
    state = MasterAdamW(parameters(), kind=old).state_dict()
    with pytest.raises(ConfigError, match=rf"update\.optimizer: the checkpoint is of '{old}', is now '{new}'"):
        MasterAdamW(parameters(), kind=new).load_state_dict(state)


def test_a_state_from_before_kinds_had_names_is_the_plain_one() -> None:
    state = MasterAdamW(parameters()).state_dict()
    del state["kind"]
    MasterAdamW(parameters()).load_state_dict(state)
    with pytest.raises(ConfigError, match="is of 'adamw', is now 'adamw_offloaded'"):
        MasterAdamW(parameters(), kind="adamw_offloaded").load_state_dict(state)
