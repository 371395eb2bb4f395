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
    broken = False

    def capture_begin(self, *pool: Any) -> None:
        Recorded.begun.append(pool)

    def capture_end(self) -> None:
        if Recorded.broken:
            Recorded.broken = False
            raise RuntimeError("capture invalidated")

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
def test_a_capture_without_memory_is_tried_once_more(device, failures: int) -> None:
    state, left = torch.zeros(1), [failures]

    def body(key: str) -> None:
        state.add_(1)
        if len(Recorded.begun) > failures - left[0] and left[0]:
            left[0] -= 1
            raise torch.cuda.OutOfMemoryError("no memory")

    graphs = stepped(device, body, state, "no memory" if failures == 2 else "")
    assert len(Recorded.begun) == 2
    assert graphs.enabled is (failures == 1)


def test_what_a_graph_cannot_hold_is_said_and_runs_eager(device) -> None:
    state = torch.zeros(1)

    def body(key: str) -> None:
        state.add_(1)
        if len(Recorded.begun) == 1 and not Recorded.broken:
            Recorded.begun.append(("broken",))
            Recorded.broken = True
            raise RuntimeError("a number was asked of the device")

    graphs = stepped(device, body, state, "a number was asked of the device")
    assert not graphs.enabled


def stepped(device: torch.device, body: Callable[[str], None], state: torch.Tensor, warning: str) -> Graphs:
    """Graphs after two steps, each of which has changed the state once."""
    graphs = Graphs(torch.nn.Linear(1, 1), device, enabled=True)
    Recorded.body = lambda: state.add_(1)
    with pytest.warns(UserWarning, match=f"eager.*{warning}") if warning else nullcontext():
        graphs.step("a", body, [state])
    assert state.item() == 1
    graphs.step("a", body, [state])
    assert state.item() == 2
    return graphs
