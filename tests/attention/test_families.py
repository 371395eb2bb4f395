"""Families of models against their own forward, as docs/models.md says; and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from attnrl.attention.decoder import attending_layers, lone_from, remembers
from attnrl.attention.interface import Layer, attending
from attnrl.attention.paths import PathAttention, can_share, packed_attention
from attnrl.attention.trie import apart
from attnrl.errors import ConfigError
from attnrl.local.fused import decoder_layers
from attnrl.local.memory import Memory
from attnrl.local.sampler import Sampler
from attnrl.scoring import fci

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from families import BASE, FAMILIES, GAPS, REMEMBERING, measure, table, tiny  # noqa: E402

ROUNDING = {"fci": 1e-5, "gradient": 1e-5, "draw": 1e-4}


def said(line: str) -> list[str]:
    """A line of the table with its numbers left out."""
    return ["yes" if "e-" in cell else cell.strip() for cell in line.split("|")]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_does_what_its_line_says(family: str) -> None:
    row = measure(family)
    line = table([row]).splitlines()[-1]
    page = (ROOT / "docs/models.md").read_text(encoding="utf-8").splitlines()
    assert said(line) in [said(other) for other in page if other.startswith(f"| {family} |")]
    gaps = {name: row[name] for name in GAPS if not isinstance(row[name], str)}
    assert all(gap < ROUNDING[name] for name, gap in gaps.items()), gaps


@pytest.mark.parametrize("family", REMEMBERING)
def test_no_pack_no_shared_prefix_no_fused_forward(family: str) -> None:
    model = tiny(family)
    assert (remembers(model), lone_from(model), can_share(model)) == (True, 0, False)
    assert decoder_layers(model.base_model) is None
    with pytest.raises(ConfigError, match="6 tokens cannot share a pack: this model's layers carry a state"):
        packed_attention(model, [5, 6]).__enter__()


@pytest.mark.parametrize("family", [f for f in REMEMBERING if not f.startswith("zamba")])  # theirs have no number
def test_the_layers_that_attend_are_known(family: str) -> None:
    model, seen = tiny(family), []

    class Watched(PathAttention):
        def attend(self, layer: Layer, *args: Any) -> Any:
            seen.append(layer.index)
            return super().attend(layer, *args)

    with attending(model, Watched(apart([5]))):
        model(input_ids=torch.arange(5)[None], use_cache=False)
    assert seen == attending_layers(model.config)


@pytest.mark.parametrize("family", ["minimax", "recurrent_gemma"])
def test_states_that_lie_elsewhere_are_refused(family: str) -> None:
    with pytest.raises(ConfigError, match=r"does not find what .* remembers: score it from Python"):
        Sampler(tiny(family), stop_ids=[2])


def test_states_in_another_order_than_the_rows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    move = Memory.move
    monkeypatch.setattr(Memory, "move", lambda memory, old, new: move(memory, old[:0], new[:0]))
    with pytest.raises(ConfigError, match="log-probs of drawn tokens are wrong by"):
        Sampler(tiny("lfm2"), stop_ids=[2])


@pytest.mark.parametrize("family", ["mamba", "gptj"])
def test_attention_that_nobody_sees_is_refused(family: str) -> None:
    with pytest.raises(ConfigError, match="does not use transformers' attention interface"):
        fci(tiny(family), [5, 6, 7], [(1, 2), (2, 3)], delta=1)


def test_attention_of_another_kind_is_refused() -> None:
    """A model whose own attention does what it does not tell, here a scale."""
    model = tiny("lfm2")
    attention = model.model.layers[1].self_attn
    told = attention.forward

    def forward(*args: Any, **given: Any) -> Any:
        attention.scaling = 0.35 if model.config._attn_implementation == "eager" else 0.9
        return told(*args, **given)

    attention.forward = forward
    with pytest.raises(ConfigError, match="log-probs differ by"):
        fci(model, [5, 6, 7], [(1, 2), (2, 3)], delta=1)


def test_a_body_without_a_head_is_tried_too() -> None:
    model, steps = tiny("lfm2"), [(1, 4), (4, 8), (8, 12)]
    ids = list(range(3, 15))
    assert fci(model.base_model, ids, steps, delta=1).tolist() == fci(model, ids, steps, delta=1).tolist()


@pytest.mark.parametrize("family", ["mpt", "phimoe"])
def test_a_refusal_says_why(family: str) -> None:
    """One whose forward breaks under our attention, and one whose window stands in its mask alone."""
    of = {"mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2}, "phimoe": {"sliding_window": 11, "num_local_experts": 2}}
    reason = {"mpt": "does not run with attnrl's attention", "phimoe": "hides its sliding window in the mask"}
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**BASE, **of[family]})
    with pytest.raises(ConfigError, match=reason[family]):
        fci(AutoModelForCausalLM.from_config(config), [5, 6, 7], [(1, 2), (2, 3)], delta=1)
