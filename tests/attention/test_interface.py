"""One door: the innermost plan counts, whatever thread asks, and nothing is left behind."""

import copy
import threading
from typing import Any

import pytest
import torch
from fci_oracle import tiny

from attnrl.attention import interface
from attnrl.attention.interface import Layer, attending
from attnrl.attention.paths import packed_attention, path_attention
from attnrl.attention.trie import apart
from attnrl.errors import ConfigError

IDS = torch.arange(3, 15)[None]


class Values:
    """Every token sees itself alone, times `factor`."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.layers: list[Layer] = []

    def attend(self, layer: Layer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.layers.append(layer)
        return self.factor * v.repeat_interleave(q.shape[1] // v.shape[1], dim=1).transpose(1, 2)


def hidden(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.model(input_ids=IDS, use_cache=False).last_hidden_state


def test_the_innermost_plan_counts_and_the_outer_one_comes_back() -> None:
    model = tiny("qwen2")
    apart_ = {}
    for factor in (1.0, 2.0):
        with attending(model, Values(factor)):
            apart_[factor] = hidden(model)
    outer, inner = Values(1.0), Values(2.0)
    with attending(model, None):
        with pytest.raises(ConfigError, match="outside of `attending`"):
            hidden(model)
        with attending(model, outer):
            first = hidden(model)
            with attending(model, inner):
                second = hidden(model)
            third = hidden(model)
        assert model.config._attn_implementation == interface.NAME
    assert torch.equal(first, apart_[1.0])
    assert torch.equal(second, apart_[2.0])
    assert torch.equal(third, first)
    assert not torch.equal(first, second)
    assert [layer.index for layer in outer.layers] == [0, 1, 0, 1]
    assert [layer.index for layer in inner.layers] == [0, 1]
    assert model.config._attn_implementation == "eager"
    assert not interface._ACTIVE


def test_each_config_of_a_model_is_opened_and_closed() -> None:
    """Layers with configs of their own, as sub-models of a composite one have; and another model that shares one."""
    model = tiny("llama")
    other = tiny("llama")
    model.model.layers[1] = copy.deepcopy(model.model.layers[1])
    other.model.layers[0] = model.model.layers[1]  # the same module, so the same config
    one, two = Values(1.0), Values(2.0)
    with attending(model, one):
        with attending(other, two):
            hidden(other)
        hidden(model)
    assert [len(plan.layers) for plan in (one, two)] == [2, 2]
    for config in (model.config, other.config, model.model.layers[1].self_attn.config):
        assert config._attn_implementation == "eager"
    assert not interface._ACTIVE


def test_backward_on_another_thread_finds_the_plan() -> None:
    """On CUDA, gradient checkpointing recomputes layers on autograd's own thread."""
    model = tiny("qwen2").train()
    weights = list(model.model.layers[0].parameters())
    lengths = [5, 7]
    with packed_attention(model, lengths):
        loss = model(input_ids=IDS, position_ids=torch.tensor([[*range(5), *range(7)]]), use_cache=False).logits.sum()
        want = torch.autograd.grad(loss, weights)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    got: list[torch.Tensor] = []
    with path_attention(model, apart(lengths)) as plan:
        loss = model(input_ids=IDS, position_ids=torch.tensor([[*range(5), *range(7)]]), use_cache=False).logits.sum()
        thread = threading.Thread(target=lambda: got.extend(torch.autograd.grad(loss, weights)))
        thread.start()
        thread.join()
    assert plan.calls == 4, "each layer attends again in the backward pass"
    assert len(got) == len(want) > 0
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
