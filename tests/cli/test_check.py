"""`attnrl check`: what is well is said to be, and each planted fault is found."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import MambaConfig

import attnrl
from attnrl.cli import run
from attnrl.config import ModelConfig, load_config
from attnrl.errors import ConfigError, MissingExtraError, MissingFileError, TrainingError
from attnrl.launch.checking import Findings, forecast_memory, look_at_prompt
from attnrl.launch.forecast import GB, Shape, activations, cache_bytes, host_memory, memory, shape_of, work
from attnrl.launch.models import load_tokenizer, model_path
from attnrl.local.backend import LocalBackend
from attnrl.local.models import load_weights
from attnrl.types import Prompt, as_ids

SMALL = {"data.train_tasks": 40, "algo.group": 2}

ENGINES = '''
import torch
from dataclasses import replace

from attnrl.local.backend import LocalBackend, build


def off(config, *, model, tokenizer, learn=True, by):
    """Draws with log-probs that are not those of the distribution drawn from."""
    engine = build(config, model=model, tokenizer=tokenizer, learn=learn)
    draw = engine.generate
    engine.generate = lambda *args: [replace(r, logprobs=r.logprobs - by) for r in draw(*args)]
    return engine


def moving(config, *, model, tokenizer, learn=True, by):
    """Moves weights in an update whatever the learning rate."""
    engine = build(config, model=model, tokenizer=tokenizer, learn=learn)
    update = engine.update

    def move(samples):
        metrics = update(samples)
        with torch.no_grad():
            for weight in engine.model.parameters():
                weight.mul_(1 + by)
        return metrics

    engine.update = move
    return engine


def wordy(config, *, model, tokenizer, learn=True):
    """Says of itself what is no number."""
    engine = build(config, model=model, tokenizer=tokenizer, learn=learn)
    engine.metrics = lambda: {"mine/state": "well"}
    return engine


def everything_is_right(attempts):
    return [1.0] * len(attempts)


def broken(attempts):
    raise KeyError("no column of that name")
'''


def levels(found: list) -> dict[str, str]:
    return {finding.about: finding.level for finding in found}


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "faulty.py").write_text(ENGINES, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("faulty", None)


def test_the_demo_is_well(tmp_path):
    env = {**os.environ, "PYTHONPATH": str(Path(attnrl.__file__).parents[1])}
    command = [sys.executable, "-m", "attnrl", "check", "demo", "--data.train-tasks", "40", "--prompts", "3"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    said = {line.split()[1]: line.split()[0] for line in done.stdout.splitlines() if line[:1] != " "}
    assert set(said) == {
        "config", "data", "held", "prompt", "reward", "memory", "responses", "parts", "agreement", "update",
        "time",
    }  # fmt: skip
    assert "wrong" not in said.values()
    assert "5 rows: 5 golds right, 5 times nonsense wrong" in done.stdout
    assert "All counts are modulo 11." in done.stdout  # the prompt as it is
    assert "12 responses" in done.stdout
    assert "held out  tasks 256 problems x 2; responses of up to 200 tokens, temperature 1, top-p 1\n" in done.stdout
    assert re.search(
        r"\n +and 3 evaluations of 512 responses: \d+m\d+s if they are as long \(\d+ tokens, ", done.stdout
    )
    assert "1,124,736 weights" in done.stdout
    assert list(tmp_path.iterdir()) == []  # nothing is written


def test_a_sampler_whose_logprobs_are_not_the_learners_is_found(own, capsys):
    flags = ["--engine.name", "faulty:off", "--engine.options", "{by = 0.5}", "--prompts", "1", "--responses", "2"]
    assert run(["check", "demo", "--data.train-tasks", "40", *flags]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("wrong")]
    assert len(lines) == 1
    assert "sampler and learner differ by 5.0e-01 nats" in lines[0]


@pytest.mark.parametrize(("by", "level"), [(1e-6, "look"), (1e-2, "wrong")])
def test_an_update_that_moves_the_policy_at_no_learning_rate_is_found(own, by, level):
    options = {**SMALL, "engine.name": "faulty:moving", "engine.options": {"by": by}}
    found = attnrl.check("demo", overrides=options, prompts=1, responses=2, say=lambda text: None)
    assert levels(found)["update"] == level
    assert levels(found)["agreement"] == "ok"


def test_a_gold_that_earns_less_than_nonsense_is_found():
    said: list[str] = []
    overrides = {**SMALL, "reward": [{"name": "math", "weight": -1.0}]}
    found = attnrl.check("demo", overrides=overrides, prompts=1, responses=2, say=said.append)
    assert levels(found)["reward"] == "wrong"
    assert "its gold earns -1, nonsense 0" in "\n".join(said)


@pytest.mark.parametrize(
    ("key", "instead"),
    [("data.decontaminate", "--data.decontaminate none"), ("evaluation.benchmarks", "--evaluation.every 0 needs none")],
)
def test_a_benchmark_that_is_not_there_is_said_with_its_key_and_the_rest_is_looked_at(tmp_path, key, instead):
    where = {key: ["aime24"], "data.directory": str(tmp_path)}
    rows = attnrl.check("demo", overrides={**SMALL, **where}, say=lambda text: None)
    [wrong] = [row for row in rows if row.level == "wrong"]
    assert wrong.about == "data"
    assert wrong.said.startswith(f"{key}: benchmark aime24: neither ")
    assert wrong.said.endswith(instead)
    assert {"prompt", "reward", "memory", "parts", "agreement"} <= {row.about for row in rows}
    with pytest.raises(MissingFileError, match=f"^{key}: benchmark aime24"):
        attnrl.train("demo", tmp_path / "run", overrides={**SMALL, **where}, say=lambda text: None)


def test_metrics_of_an_engine_that_are_no_numbers_are_found(own):
    overrides = {**SMALL, "engine.name": "faulty:wordy"}
    with pytest.raises(TrainingError, match=r"metrics of the engine LocalBackend must return .*mine/state"):
        attnrl.check("demo", overrides=overrides, prompts=1, responses=1, say=lambda text: None)


def test_rewards_that_take_nonsense_or_raise_are_found(own):
    for name, words in (("everything_is_right", "nonsense is right"), ("broken", "no column of that name")):
        said: list[str] = []
        overrides = {**SMALL, "reward": f"faulty:{name}", "verify.max_error_share": 1.0}
        found = attnrl.check("demo", overrides=overrides, prompts=1, responses=2, say=said.append)
        assert levels(found)["reward"] != "ok"
        assert any(words in line for line in said)
        assert any(finding.level == "wrong" for finding in found)


@pytest.mark.parametrize("section", ["sampling", "evaluation"])
def test_a_response_limit_beyond_the_models_positions_is_said_before_work_starts(own, section):
    overrides = {**SMALL, f"{section}.max_response_tokens": 4090}
    words = rf"{section}\.max_response_tokens = 4090 after .* of up to \d+ tokens .* 4096 positions .* lower it to \d+"
    with pytest.raises(ConfigError, match=words):
        attnrl.check("demo", overrides=overrides, say=lambda text: None)
    with pytest.raises(ConfigError, match=words):
        attnrl.train("demo", own / "run", overrides=overrides)
    assert not (own / "run").exists()


def test_an_evaluation_much_longer_than_training_is_worth_a_look(own):
    overrides = {**SMALL, "sampling.max_response_tokens": 20}
    found = attnrl.check("demo", overrides=overrides, prompts=1, responses=1, say=lambda text: None)
    assert "in training 20: see evaluation.max_response_tokens" in next(f.said for f in found if f.about == "held out")


def test_a_prompt_without_its_problem_is_wrong():
    tokenizer = load_tokenizer(model_path("demo"))
    said: list[str] = []
    found = Findings(said.append)
    look_at_prompt(Prompt("a", as_ids([tokenizer.eos_token_id]), ("1",), problem="What is 1 + 1?"), tokenizer, found)
    assert levels(found.rows)["prompt"] == "wrong"
    assert "most of the problem is not in it" in said[0]


def test_a_model_without_attention_is_refused_by_its_shape():
    with pytest.raises(ConfigError, match="MambaConfig names no attention heads"):
        shape_of(MambaConfig(), ModelConfig())


def test_a_gold_that_its_own_reward_refuses_is_named_by_row(own, capsys):
    rows = [{"problem": "All counts are modulo 11.\n- mugs = 3\nHow many mugs are there?", "answer": "3"}]
    rows.append({**rows[0], "problem": rows[0]["problem"].replace("3", "4"), "answer": "3} or not"})
    (own / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(["check", "demo", "--data.train", "rows.jsonl", "--prompts", "1", "--responses", "1"]) == 1
    said = capsys.readouterr().out
    (line,) = [line for line in said.splitlines() if "is not right when boxed" in line]
    assert "rows.jsonl:2" in line
    assert "fewer than a batch takes (algo.prompts = 16)" in said


def test_responses_that_are_cut_off_are_said_to_teach_nothing(own):
    said: list[str] = []
    overrides = {**SMALL, "sampling.max_response_tokens": 8}
    found = attnrl.check("demo", overrides=overrides, prompts=1, responses=2, say=said.append)
    assert levels(found)["responses"] == "look"
    text = "\n".join(said)
    for words in ("most were cut off", "all are wrong", "FCI of every step is 0 in most"):
        assert words in text


PARTS = """
from attnrl.schedules import on_policy, one_step_off_policy

seen = []


def backwards(prompt, trunk, rng):
    return (9, 3)


def lost(groups, memory):
    return {"mask": [True] * len(groups)}


def half(accuracy, trees):
    return trees / 2


def divides(accuracy, trees):
    return round(1 / accuracy)


def nameless(forest, rng):
    return [leaf.answer for leaf in forest.leaves]


def short(samples, scores):
    return [s.entropy[1:] for s in scores]


def stands_still(state, parts):
    return state


def in_turn(state, parts):
    return (one_step_off_policy if state.iteration % 2 else on_policy)(state, parts)


def guards(state, parts):
    outcome = on_policy(state, parts)
    assert not outcome.samples or outcome.metrics["policy/kl"] < 9
    return outcome


def listens(state, parts):
    outcome = on_policy(state, parts)
    seen.append([v.reward for f in outcome.forests for t in f.trees for v in (t.trunk.verdict, *(
        b.verdict for b in t.branches))])
    return outcome
"""


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("rule", "backwards", r"algo\.rule: the rule backwards must return branch points p in order"),
        ("filter", "lost", r"algo\.filter: the filter lost must return an attnrl\.types\.Kept"),
        ("budget", "half", r"algo\.budget: the budget half must return a number of trees.* not 3\.0"),
        ("credit", "short", r"algo\.credit: the credit short returned weights \(1 of \d+\) that are of shape"),
        ("schedule", "stands_still", r"algo\.schedule: the schedule stands_still must return .*Outcome"),
        ("schedule", "in_turn", r"trunks of prompt .* wait that policy 1 drew, where the policy is 3"),
    ],
)
def test_a_part_that_breaks_its_promise_is_found_and_named(own, kind, name, words):
    (own / "faulty.py").write_text(PARTS, encoding="utf-8")
    said: list[str] = []
    overrides = {**SMALL, "algo.group": 6, f"algo.{kind}": f"faulty:{name}"}
    if kind == "rule":
        overrides |= {"algo.adaptive_batch": False, "algo.filter": "all"}
    with pytest.raises(TrainingError, match=words):
        attnrl.check("demo", overrides=overrides, prompts=1, responses=2, say=said.append)
    assert said[-1].split()[1] == "responses"  # nothing but these was drawn for it


def test_a_part_that_raises_keeps_its_own_error_with_a_note_of_the_part(own):
    (own / "faulty.py").write_text(PARTS, encoding="utf-8")
    for kind, name, error in (("estimator", "nameless", AttributeError), ("budget", "divides", ZeroDivisionError)):
        overrides = {**SMALL, "algo.filter": "all", f"algo.{kind}": f"faulty:{name}"}
        with pytest.raises(error) as raised:
            attnrl.check("demo", overrides=overrides, prompts=1, responses=1, say=lambda text: None)
        assert raised.value.__notes__ == [f"algo.{kind}: raised by the {kind} {name}"]


def test_parts_are_tried_where_half_all_and_none_are_right_without_another_draw(own, monkeypatch):
    (own / "faulty.py").write_text(PARTS, encoding="utf-8")
    drawn: list[int] = []
    generate = LocalBackend.generate
    monkeypatch.setattr(
        LocalBackend,
        "generate",
        lambda self, requests, how: drawn.append(len(requests)) or generate(self, requests, how),
    )
    overrides = {**SMALL, "algo.schedule": "faulty:listens", "algo.filter": "all", "algo.adaptive_batch": False}
    found = attnrl.check("demo", overrides=overrides, prompts=1, responses=2, say=lambda text: None)
    assert drawn == [2, 2]  # one token each to compile, then the responses
    assert [set(values) for values in sys.modules["faulty"].seen] == [*[{0.0, 1.0}] * 4, {1.0}, {0.0}, {0.0, 1.0}]
    (parts,) = [finding for finding in found if finding.about == "parts"]
    assert parts.level == "ok"
    assert "7 iterations by faulty:listens over these responses" in parts.said
    assert "7 prompts kept and 0 dropped" in parts.said


def test_a_schedule_may_read_what_an_update_says(own):
    (own / "faulty.py").write_text(PARTS, encoding="utf-8")
    overrides = {**SMALL, "algo.schedule": "faulty:guards"}
    found = attnrl.check("demo", overrides=overrides, prompts=1, responses=2, say=lambda text: None)
    assert levels(found)["parts"] == "ok"


def test_parts_that_leave_nothing_to_learn_from_are_worth_a_look(own):
    overrides = {**SMALL, "algo.group": 1, "algo.filter": "has_spread"}
    found = attnrl.check("demo_grpo", overrides=overrides, prompts=1, responses=1, say=lambda text: None)
    assert levels(found)["parts"] == "look"
    (parts,) = [finding for finding in found if finding.about == "parts"]
    assert "0 prompts kept and 7 dropped, 0 branch points, 0 samples with signal" in parts.said


SHAPE = Shape(1000, 1000, layers=2, attending=2, width=8, heads=4, kv_heads=2, head_size=2, inner=16, vocabulary=10)
TINY = {
    "data.max_prompt_tokens": 4,
    "sampling.max_response_tokens": 16,
    "update.microbatch_tokens": 32,
    "update.logit_chunk_tokens": 5,
    "update.gradient_checkpointing": "none",
}


def test_memory_by_hand():
    config = load_config("", TINY)
    items = memory(SHAPE, config, weight_bytes=2, cached_rows=3)
    assert items["weights"] == items["reference"] == 2000
    assert (items["float32 masters"], items["Adam"], items["gradients"]) == (4000, 8000, 4000)
    # keys and values: 2 x 2 layers x 2 heads x 2 wide x 2 bytes = 32 a token; 3 rows of 4 + 16 tokens
    assert cache_bytes(SHAPE, 2) == 32
    assert items["cache"] == 3 * 20 * 32
    # a layer and token: 2 x (4 x 16 + 2 x (4 + 2) x 2) = 176, norms 2 x 8 x 8 = 128; logits 3 x 4 bytes x 5 x 10
    assert items["activations"] == 32 * 2 * (176 + 128) + 600
    checkpointed = load_config("", {**TINY, "update.gradient_checkpointing": "all"})
    # of each layer the input, 2 x 8, and what attention gave, 2 x 4 x 2; one at work with three gradients of 16
    assert activations(SHAPE, checkpointed, weight_bytes=2) == 32 * (2 * (16 + 16) + 304 + 2 * 3 * 16) + 600
    # the first of two: those 32, then the larger of the other layer, 304, and of itself at work, 304 + 96
    half = load_config("", {**TINY, "update.gradient_checkpointing": 1})
    assert activations(SHAPE, half, weight_bytes=2) == 32 * (32 + 400) + 600
    # a response longer than the microbatch is a microbatch of its own
    longer = load_config("", {**TINY, "sampling.max_response_tokens": 60})
    assert activations(SHAPE, longer, weight_bytes=2) == 64 * 2 * 304 + 600
    # moments of 8 bits: 2 bytes a weight and 8 a block of 256; offloaded: 4 + 8 bytes on the host, no master here
    eight = memory(SHAPE, load_config("", {"update.optimizer": "adamw_8bit"}), weight_bytes=2)
    assert (eight["float32 masters"], eight["Adam"], eight["gradients"]) == (4000, 2031.25, 4000)
    away = load_config("", {"update.optimizer": "adamw_offloaded"})
    left = memory(SHAPE, away, weight_bytes=2)
    assert (left["float32 masters"], left["Adam"], left["gradients"]) == (0, 0, 4000)
    assert (host_memory(SHAPE, away), host_memory(SHAPE, config)) == (12_000, 0)
    plain = memory(SHAPE, load_config("", {"update.kl_weight": 0.0}), weight_bytes=4)
    assert plain["float32 masters"] == plain["reference"] == plain["cache"] == 0


def test_tokens_of_an_iteration_by_hand():
    config = load_config("", {"algo.prompts": 10, "algo.group": 6, "algo.width": 2})
    ahead = work(config, prompt=100, length=1000, trees=4, points=2)
    assert ahead.generated == 10 * 6 * 1000 + 10 * 4 * 2 * 2 * 500
    assert ahead.scored == 60 * 1100
    assert ahead.trained == 10 * (6 + 16) * 1100


def test_weights_are_counted_without_loading_them():
    path = model_path("demo")
    loaded = load_weights(path, device="cpu", dtype="float32")
    shape = shape_of(path, ModelConfig(path="demo"))
    assert shape.weights == shape.trained == sum(p.numel() for p in loaded.parameters())
    # by hand: 32 wide heads, one of keys and values, in a model of width 160
    assert (shape.width, shape.heads, shape.kv_heads, shape.head_size) == (160, 5, 1, 32)


def test_trained_weights_of_adapters_are_counted_as_peft_makes_them():
    pytest.importorskip("peft")
    from attnrl.local.models import add_lora

    options = ModelConfig(path="demo", lora_rank=4)
    path = model_path("demo")
    adapted = add_lora(load_weights(path, device="cpu", dtype="float32"), options, seed=0)
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert shape_of(path, options).trained == trained > 0


@pytest.mark.parametrize(("checkpointing", "measured_gb"), [("all", 37), ("none", 78)])
def test_the_forecast_is_near_what_was_measured_at_1p5b(checkpointing, measured_gb):
    """One H200, commit d9ecc0b, reference on, microbatch 16,384, responses of 2,048 tokens: 37 and 78 GB."""
    from transformers import Qwen2Config

    config = Qwen2Config(
        hidden_size=1536, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2,
        intermediate_size=8960, vocab_size=151936, tie_word_embeddings=True,
    )  # fmt: skip
    settings = {"sampling.max_response_tokens": 2048, "update.gradient_checkpointing": checkpointing}
    shape = shape_of(config, ModelConfig())
    assert shape.weights == 1_543_714_304
    total = sum(memory(shape, load_config("", settings), weight_bytes=torch.bfloat16.itemsize).values())
    assert total / GB == pytest.approx(measured_gb, rel=0.05)


def test_the_documented_setting_of_7b_fits_one_gpu_of_141_gb():
    """By the arithmetic, at the paper's response limit of 8,192 tokens; the paper's own setting does not."""
    from transformers import Qwen2Config

    config = Qwen2Config(
        hidden_size=3584, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
        intermediate_size=18944, vocab_size=152064, tie_word_embeddings=False,
    )  # fmt: skip
    shape, total = shape_of(config, ModelConfig()), {}
    for preset in ("attnrl_7b", "attnrl_7b_one_gpu"):
        made = load_config(preset)
        assert made.sampling.max_response_tokens == 8192
        items = memory(shape, made, weight_bytes=2, cached_rows=64)
        cache = items.pop("cache") / GB
        total[preset] = sum(items.values()) / GB
    assert total["attnrl_7b"] > 141
    rows = 64 * (141 - total["attnrl_7b_one_gpu"]) / 2 / cache  # the sampler takes half of what is left
    assert rows > 60
    assert host_memory(shape, load_config("attnrl_7b_one_gpu")) / GB == pytest.approx(91.4, abs=0.1)


def test_an_offloaded_optimizer_on_a_cpu_takes_the_memory_that_is_forecast():
    """1,124,736 weights: 12 bytes each for masters and moments, 4 for gradients; the CPU is the host."""
    findings = Findings(say=lambda text: None)
    forecast_memory(load_config("demo", {"update.optimizer": "adamw_offloaded"}), str(model_path("demo")), findings)
    (finding,) = findings.rows
    assert finding.level == "ok"
    assert "offloaded 0.01" in finding.said
    assert "Adam" not in finding.said


def test_an_engine_that_is_not_installed_is_said_before_data_is_read():
    if importlib.util.find_spec("verl") is not None:
        pytest.skip("verl is installed")
    said: list[str] = []
    with pytest.raises(MissingExtraError, match="needs verl, Ray and vLLM"):
        attnrl.check("demo", overrides={**SMALL, "engine.name": "verl"}, say=said.append)
    assert said == []
