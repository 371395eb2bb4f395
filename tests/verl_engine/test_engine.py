"""The engine over real Ray processes, FSDP2 ranks on gloo and vLLM servers, all on the CPU: one engine for all tests.

Two ranks, gradient checkpointing on, and a token budget so small that ranks get uneven packs. The last test but one
ends it, the last has one of its own.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

if importlib.util.find_spec("verl") is None:
    pytest.skip("needs verl: make test-verl", allow_module_level=True)

import psutil
import ray
import tiny
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoModelForCausalLM, AutoTokenizer

from attnrl.config import Config, load_config
from attnrl.errors import ConfigError, DataError, MissingFileError, TrainingError
from attnrl.local.learner import Learner
from attnrl.ranks import verbs
from attnrl.ranks.machines import seeing
from attnrl.ranks.session import family
from attnrl.ranks.watch import Watch
from attnrl.types import Request, Rollout, Sample, Sampling, ScoreRequest, Scoring, Step, as_floats, as_ids
from attnrl.verl_engine import build
from processes import wait_until
from tiny_llama import make_model

RANKS = 2
SCORING = Scoring(delta=1)


def config_of(model: Path) -> Config:
    changed = {
        "model.path": str(model),
        "engine.name": "verl",
        "engine.verl.gpus_per_node": RANKS,
        "engine.verl.overrides": tiny.overrides(),
        "engine.verl.phase_limit_s": 900,  # the start, where other programs have the cores
        "data.max_prompt_tokens": 400,
        "sampling.max_response_tokens": 64,
        "update.minibatches": 3,
        "update.microbatch_tokens": 100,
        "update.logit_chunk_tokens": 16,  # the head runs again in backward
        "update.lr": 1e-3,
        "update.kl_weight": 0.01,
        "update.gradient_checkpointing": "all",
        "evaluation.every": 0,
    }
    return load_config("attnrl_1p5b", changed)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(model):
    built = build(config_of(model), model=str(model), tokenizer=AutoTokenizer.from_pretrained(model))
    yield built
    built.close()


def prompts(n: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [as_ids([2, *rng.integers(4, 99, 5 + i % 7)]) for i in range(n)]


def requests(n: int = 5, each: int = 3, seed: int = 0) -> list[Request]:
    rng = np.random.default_rng(seed)
    return [
        Request(p, 40, int(rng.integers(2**62)), f"{i}/{k}")
        for i, p in enumerate(prompts(n, seed))
        for k in range(each)
    ]


def cut(ids: np.ndarray) -> tuple[Step, ...]:
    return tuple(Step(i, min(i + 4, len(ids))) for i in range(0, len(ids), 4))


def scored(asked: list[Request], drawn: list[Rollout]) -> list[ScoreRequest]:
    return [ScoreRequest(r.context, d.ids, cut(d.ids)) for r, d in zip(asked, drawn, strict=True)]


def samples_of(asked: list[Request], drawn: list[Rollout]) -> list[Sample]:
    """Uneven in length and sign; two of each prompt share half of their response."""
    rng = np.random.default_rng(1)
    found = []
    for i, (r, d) in enumerate(zip(asked, drawn, strict=True)):
        advantages = as_floats(np.repeat(rng.normal(size=1 + len(d.ids) // 4), 4)[: len(d.ids)])
        found.append(Sample(r.context, d.ids, advantages, d.logprobs, r.tree.split("/")[0]))
        half = len(d.ids) // 2
        if i % 3 == 0 and half:
            found.append(Sample(r.context, d.ids[:half], -advantages[:half], d.logprobs[:half], found[-1].uid))
    return found


def weights(folder: Path) -> dict[str, np.ndarray]:
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {name: tensor.detach().numpy() for name, tensor in loaded.state_dict().items()}


def dense_fci(model, request: ScoreRequest, delta: int) -> np.ndarray:
    """Eq. 5-6 from eager attention matrices in float64."""
    ids = torch.from_numpy(np.concatenate([request.prompt, request.response]).astype(np.int64))[None]
    attention = torch.stack(model(input_ids=ids, output_attentions=True).attentions)[:, 0].double()  # [L, H, T, T]
    at, found = len(request.prompt), []
    spans = [(at + s.start, at + s.stop) for s in request.steps]
    for k, (a, b) in enumerate(spans):
        later = [attention[:, :, c:d, a:b].mean((2, 3)) for c, d in spans[k + delta :]]
        found.append(float(torch.stack(later).sum(0).max()) if later else 0.0)
    return np.array(found)


def load_whole(shards: Path) -> dict:
    """A sharded checkpoint in one piece, by torch's own converter."""
    dcp_to_torch_save(shards, shards.with_suffix(".pt"))
    return torch.load(shards.with_suffix(".pt"), weights_only=False)


def saved(engine, folder: Path) -> Path:
    folder.mkdir()
    engine.save(folder)
    return folder


def test_sampler_and_learner_agree_after_every_sync(engine):
    asked = requests()
    for _ in range(3):
        drawn = engine.generate(asked, Sampling())
        scores = engine.score(scored(asked, drawn), SCORING)
        assert all(d.version == engine.version for d in drawn)
        assert max(np.abs(s.logprobs - d.logprobs).max() for s, d in zip(scores, drawn, strict=True)) <= 1e-6
        before = engine.version
        found = engine.update(samples_of(asked, drawn))
        assert engine.version == before + 1
        assert found["policy/updates"] == 3
        assert found["train/forward_tokens"] < found["train/path_tokens"]  # prefixes are shared
    metrics = engine.metrics()
    assert metrics["sync/count"] == 3
    assert 0 < metrics["sync/logprob_gap"] < 1e-6
    assert metrics["score/tokens"] > 3 * sum(len(r.context) for r in asked)


def test_fci_equals_dense_attention(engine, tmp_path):
    asked = requests(seed=3)
    drawn = engine.generate(asked, Sampling())
    wanted = scored(asked, drawn)
    found = engine.score(wanted, SCORING)
    folder = saved(engine, tmp_path / "checkpoint")
    dense = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        gaps = [np.abs(dense_fci(dense, r, 1) - f.fci).max() for r, f in zip(wanted, found, strict=True)]
    assert max(gaps) <= 1e-6
    assert max(f.fci.max() for f in found) > 0.1


def test_an_update_is_the_local_learners(engine, model, tmp_path):
    asked = requests(seed=5)
    engine.update(samples_of(asked, engine.generate(asked, Sampling())))  # so that the optimizer has moments
    folder = saved(engine, tmp_path / "checkpoint")
    samples = samples_of(asked, engine.generate(asked, Sampling()))
    config = config_of(model).update
    local = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).requires_grad_(False)
    learner = Learner(local, reference, options=config)
    learner.counters = replace(engine.counters)
    state = load_whole(folder / "actor")["optimizer"]["state"]
    for name, parameter in local.named_parameters():
        learner.optimizer.state.adam.state[parameter] = {k: v.clone() for k, v in state[name].items()}
    before = weights(folder / "model")
    want = learner.update(samples, version=engine.version)
    got = engine.update(samples)
    for name in ("policy/loss", "policy/kl", "policy/grad_norm", "policy/entropy", "policy/behaviour_kl"):
        assert got[name] == pytest.approx(want[name], rel=1e-5, abs=1e-7)
    for name in ("policy/updates", "train/samples", "train/tokens", "train/path_tokens", "policy/lr"):
        assert got[name] == want[name]
    after = weights(saved(engine, tmp_path / "after") / "model")
    expected = {name: tensor.detach().numpy() for name, tensor in local.state_dict().items()}
    assert max(np.abs(after[name] - before[name]).max() for name in before) > 1e-3
    assert max(np.abs(after[name] - expected[name]).max() for name in before) <= 1e-6


def test_a_checkpoint_brings_back_weights_optimizer_and_counters(engine, tmp_path):
    asked = requests(seed=7)
    drawn = engine.generate(asked, Sampling())
    samples = samples_of(asked, drawn)
    folder = saved(engine, tmp_path / "checkpoint")
    version, counters = engine.version, replace(engine.counters)
    first = engine.update(samples)
    engine.load(folder)
    assert (engine.version, engine.counters) == (version, counters)
    assert [d.ids.tolist() for d in engine.generate(asked, Sampling())] == [d.ids.tolist() for d in drawn]
    assert engine.update(samples) == first
    with pytest.raises(MissingFileError, match=r"no checkpoint of engine verl: verl\.json is missing"):
        engine.load(tmp_path)


def test_a_machine_that_does_not_see_the_run_directory_is_named(engine, tmp_path):
    look = partial(engine._call, verbs.look)
    assert seeing(look, [tmp_path], tmp_path) == {socket.gethostname()}
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match=r"machine \S+ does not see \S+nowhere.*file system"):
        seeing(look, [tmp_path / "nowhere"], tmp_path)


def test_one_request_and_one_sample_on_two_ranks(engine):
    asked = requests(1, 1, seed=9)
    drawn = engine.generate(asked, Sampling())
    alone = engine.score(scored(asked, drawn), SCORING)[0]
    among = engine.score(scored(asked, drawn) * 3, SCORING)[2]
    np.testing.assert_allclose(alone.fci, among.fci, atol=1e-6)
    assert engine.update(samples_of(asked, drawn)[:1])["train/samples"] == 1


def test_draws_do_not_depend_on_routing_and_branches_are_cached(engine):
    rng = np.random.default_rng(0)
    trunks = [as_ids([2, *rng.integers(4, 99, 300)]) for _ in range(4)]  # vLLM on CPU caches blocks of 128 tokens
    asked = [Request(t, 8, k, f"{i}/0") for i, t in enumerate(trunks) for k in range(4)]
    engine.metrics()
    together = engine.generate(asked, Sampling())
    assert engine.metrics()["generate/shared_context"] > 0.2
    apart = engine.generate(
        [Request(r.context, r.max_tokens, r.seed, f"other{i}") for i, r in enumerate(asked)], Sampling()
    )
    assert [a.ids.tolist() for a in together] == [b.ids.tolist() for b in apart]


def test_bad_input_is_named_before_anything_runs(engine):
    with pytest.raises(ConfigError, match="exceed the servers' 464"):
        engine.generate([Request(as_ids([5] * 430), 40, 0, "a/0")], Sampling())
    with pytest.raises(DataError, match="outside the model's vocabulary of 256"):
        engine.generate([Request(as_ids([5, 999]), 4, 0, "a/0")], Sampling())
    with pytest.raises(DataError, match=r"step \(0, 9\)"):
        engine.score([ScoreRequest(as_ids([5]), as_ids([6]), (Step(0, 9),))], SCORING)
    with pytest.raises(DataError, match="response of sample 0: token id 999 is outside the model's vocabulary"):
        engine.update([Sample(as_ids([5]), as_ids([999]), as_floats([1]), as_floats([-1]), "q")])
    assert len(engine.generate(requests(1, 1), Sampling())) == 1


def test_servers_that_keep_old_weights_are_found(engine):
    """The learner moves on while the servers are not told: their log-probs are no longer its own."""
    asked = requests(seed=11)
    drawn = engine.generate(asked, Sampling())
    probes, wanted = engine.arrival.drawn, engine.arrival.asked()
    assert len(probes) == RANKS
    engine.arrival.drawn = []
    engine.update(samples_of(asked, drawn))
    scores = engine.score(wanted, Scoring(fci=False))
    engine.arrival.drawn = probes
    with pytest.raises(TrainingError, match="weights did not arrive whole"):
        engine.arrival.arrived(scores)
    assert engine.generate(asked, Sampling())[0].version == engine.version  # a real sync, and all is well
    engine.score(scored(asked, engine.generate(asked, Sampling())), SCORING)


def test_ranks_past_the_limit_print_where_they_stand(engine):
    from verl_cpu_engine import stand_still

    logs = Path(ray._private.worker.global_worker.node.get_logs_dir_path())
    limit, engine.watch.limit_s = engine.watch.limit_s, 1.0
    try:
        with engine._phase("score"):
            assert engine._call(stand_still, 3.0) == [3.0] * RANKS  # within the grace: it ends well
    finally:
        engine.watch.limit_s = limit
    said = [text for file in logs.glob("worker-*.err") if "Timeout (" in (text := file.read_text(errors="replace"))]
    assert len(said) == RANKS
    assert all("in stand_still" in text for text in said)


def test_a_phase_past_its_limit_ends_while_the_driver_waits_for_ranks(engine):
    """ray.get drops most errors of a signal's handler: what comes through must be the limit's."""
    from verl_cpu_engine import stand_still

    watch = Watch(1.0, lambda line: None, key="limit_s", grace_s=1.0)
    with pytest.raises(TrainingError, match=r"score took longer than limit_s \(1 s\)"), watch.phase("score"):
        engine._call(stand_still, 20.0)
    assert len(engine.generate(requests(1, 1), Sampling())) == 1  # ranks and driver still understand each other


def test_an_error_on_one_rank_ends_the_engine_with_its_cause(engine):
    """Rank 0 waits in a collective for rank 1, which has failed: nothing may hang, nothing may stay behind."""
    processes = family(psutil.Process().children())
    good = ScoreRequest(as_ids([5]), as_ids([6]), (Step(0, 1),))
    bad = ScoreRequest(as_ids([5]), as_ids([999]), (Step(0, 1),))
    start = time.monotonic()
    with pytest.raises(TrainingError, match="DataError: response of request 0: token id 999"), engine._phase("score"):
        engine._call(verbs.score, [[good], [bad]], SCORING, 100)
    assert time.monotonic() - start < 120
    assert engine.closed
    assert len(processes) > 5
    assert not family(processes) - family(psutil.Process().children())


def test_a_rank_that_is_gone_when_metrics_are_asked_ends_the_engine_with_its_cause(model):
    """No phase runs when it is killed: the next question is for metrics, and its error is that of any other phase."""
    config = config_of(model)
    one = config.engine.verl.model_copy(update={"gpus_per_node": 1})
    config = config.model_copy(update={"engine": config.engine.model_copy(update={"verl": one})})
    built = build(config, model=str(model), tokenizer=AutoTokenizer.from_pretrained(model))
    try:
        assert built.metrics()["engine/start_seconds"] > 0
        processes = family(psutil.Process().children())
        rank = psutil.Process(ray.get(built.workers.workers[0].__ray_call__.remote(lambda _: os.getpid())))
        assert rank in processes
        rank.kill()
        assert wait_until(lambda: rank not in family([rank]))
        with pytest.raises(TrainingError, match="metrics on the cluster failed: ActorDiedError: "):
            built.metrics()
        assert built.closed
        assert built.metrics()["sync/count"] == 0  # what the driver itself knows
        assert wait_until(lambda: not family(processes) - family(psutil.Process().children()))
    finally:
        built.close()
