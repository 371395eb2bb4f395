"""Captured steps: one capture a key, a second try where the first fails, eager steps where both do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from attnrl.local.graphs import Graphs


class Recorded:
    """Stands in for a CUDA graph: what the step did to the state while it was captured is what a replay does."""

    body: Callable[[], None]
    begun: ClassVar[list[tuple[Any, ...]]] = []

    def capture_begin(self, *pool: Any) -> None:
        Recorded.begun.append(pool)

    def capture_end(self) -> None: ...

    def pool(self) -> str:
        return "memory"

    def replay(self) -> None:
        Recorded.body()


@pytest.fixture
def device(monkeypatch) -> torch.device:
    """A CPU that has streams."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, stand_in in {
        "CUDAGraph": Recorded,
        "Stream": lambda device: stream,
        "current_stream": lambda device: stream,
        "stream": lambda side: nullcontext(),
        "synchronize": lambda device: None,
        "empty_cache": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    Recorded.begun.clear()
    return torch.device("cpu")


def test_a_step_is_captured_once_a_key_and_changes_the_state_once(device) -> None:
    graphs = Graphs(torch.nn.Linear(1, 1), device, enabled=True)
    state = torch.zeros(1)
    ran = []

    def body(key: str) -> None:
        ran.append(key)
        state.add_(1)

    Recorded.body = lambda: state.add_(1)
    for expected, key in enumerate(("a", "a", "b", "a"), start=1):
        graphs.step(key, body, [state])
        assert state.item() == expected
    assert ran == ["a", "a", "b", "b"]  # a warm-up and a capture each
    assert Recorded.begun == [(), ("memory",)]  # the second shares the first one's memory
    assert graphs.take_captured() == 2
    assert graphs.take_captured() == 0


@pytest.mark.parametrize("failures", [1, 2])
def test_a_capture_that_fails_is_tried_once_more(device, failures: int) -> None:
    graphs = Graphs(torch.nn.Linear(1, 1), device, enabled=True)
    state = torch.zeros(1)
    left = [failures]

    def body(key: str) -> None:
        state.add_(1)
        if len(Recorded.begun) > failures - left[0] and left[0]:
            left[0] -= 1
            raise RuntimeError("out of memory")

    Recorded.body = lambda: state.add_(1)
    with pytest.warns(UserWarning, match="runs eager, without CUDA graphs") if failures == 2 else nullcontext():
        graphs.step("a", body, [state])
    assert state.item() == 1
    assert graphs.enabled is (failures == 1)
    graphs.step("a", body, [state])
    assert state.item() == 2
