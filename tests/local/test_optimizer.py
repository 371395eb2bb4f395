"""AdamW over float32 masters: steps worked out by hand."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from attnrl.local.optimizer import MasterAdamW


def parameters(dtype: torch.dtype = torch.float32) -> tuple[nn.Parameter, nn.Parameter]:
    """A matrix and a vector."""
    return nn.Parameter(torch.full((2, 2), 4.0, dtype=dtype)), nn.Parameter(torch.full((2,), 4.0, dtype=dtype))


def backward(*weights: nn.Parameter, slope: float) -> None:
    sum((slope * w.float()).sum() for w in weights).backward()  # type: ignore[union-attr]


def test_the_first_step_is_the_rate_and_only_matrices_decay() -> None:
    """Adam's first step is lr times the sign; decay takes lr * 0.5 * 4 = 0.2 off the matrix first."""
    matrix, vector = parameters()
    optimizer = MasterAdamW([matrix, vector], weight_decay=0.5, clip_norm=None)
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
        assert optimizer.adam.state[vector]["exp_avg"].tolist() == pytest.approx([0.1 * expected] * 2, rel=1e-4)


def test_betas_weigh_the_averages() -> None:
    matrix, vector = parameters()
    optimizer = MasterAdamW([matrix, vector], betas=(0.5, 0.75), clip_norm=None)
    backward(matrix, vector, slope=2.0)
    optimizer.step(0.1, optimizer.gradient_norm())
    state = optimizer.adam.state[vector]
    assert (state["exp_avg"].tolist(), state["exp_avg_sq"].tolist()) == ([1.0, 1.0], [1.0, 1.0])


def test_a_step_clears_the_gradients_and_microbatches_add_up() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        matrix, vector = parameters(dtype)
        optimizer = MasterAdamW([matrix, vector], clip_norm=None)
        backward(matrix, vector, slope=1.0)
        backward(matrix, vector, slope=1 / 512)  # lost in bfloat16, kept in the master's gradient
        assert optimizer.gradient_norm().item() == pytest.approx((1 + 1 / 512) * 6**0.5, rel=1e-6)
        optimizer.step(0.1, optimizer.gradient_norm())
        assert all(m.grad is None for m in optimizer.masters)
        assert matrix.grad is None


def test_frozen_parameters_are_left_alone() -> None:
    matrix, vector = parameters()
    matrix.requires_grad_(False)
    optimizer = MasterAdamW([matrix, vector], weight_decay=0.5)
    backward(vector, slope=1.0)
    optimizer.step(0.1, optimizer.gradient_norm())
    assert matrix.tolist() == [[4.0, 4.0], [4.0, 4.0]]
    assert len(optimizer.masters) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_optimizer_goes_on_exactly(dtype: torch.dtype) -> None:
    """Also what bfloat16 cannot show: the masters are part of the state."""
    first = parameters(dtype)
    optimizer = MasterAdamW(first)
    for slope in (1.0, -0.3):
        backward(*first, slope=slope)
        optimizer.step(1e-4, optimizer.gradient_norm())
    second = tuple(nn.Parameter(p.detach().clone()) for p in first)
    restored = MasterAdamW(second)
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
