"""Servers on GPUs of their own, over real processes on the CPU: two ranks, one server, weights through a file."""

from __future__ import annotations

import importlib.util
import os
import signal
import threading

import numpy as np
import pytest

if importlib.util.find_spec("verl") is None:
    pytest.skip("needs verl: make test-verl", allow_module_level=True)

import psutil
import ray
from test_engine import SCORING, config_of, requests, samples_of, scored
from transformers import AutoTokenizer

from attnrl.config import Config
from attnrl.errors import ConfigError, MissingExtraError, TrainingError
from attnrl.ranks.session import family
from attnrl.types import Rollout, Sampling, Scores
from attnrl.verl_engine import build, settings
from processes import LIMIT, wait_until
from tiny_llama import make_model


def apart(config: Config, gpus: int, *overrides: str) -> Config:
    verl = config.engine.verl.model_copy(
        update={"server_gpus": gpus, "overrides": (*config.engine.verl.overrides, *overrides)}
    )
    return config.model_copy(update={"engine": config.engine.model_copy(update={"verl": verl})})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(model):
    built = build(apart(config_of(model), 1), model=str(model), tokenizer=AutoTokenizer.from_pretrained(model))
    yield built
    built.close()


def test_what_servers_cannot_do_is_said_before_anything_starts(model):
    many = "actor_rollout_ref.rollout.tensor_model_parallel_size=2"
    with pytest.raises(ConfigError, match=r"server_gpus = 3 is no multiple of the 2 GPUs of a server"):
        build.check(apart(config_of(model), 3, many), model=str(model))
    nccl = apart(config_of(model), 1, "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl")
    if importlib.util.find_spec("cupy") is None:
        with pytest.raises(MissingExtraError, match="NCCL through cupy: pip install"):
            build.check(nccl, model=str(model))
    build.check(apart(config_of(model), 0, many), model=str(model))
    set_by_us = settings.overrides(nccl, model="M", learn=True)
    assert "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl" in set_by_us
    assert "actor_rollout_ref.rollout.n_gpus_per_node=1" in set_by_us


def gap(drawn: list[Rollout], scores: list[Scores]) -> float:
    return max(float(np.abs(s.logprobs - d.logprobs).max()) for s, d in zip(scores, drawn, strict=True))


def test_what_was_begun_is_of_the_policy_that_was_there(engine):
    """Begun before an update and waited for after it: the rollouts are those of the policy before, with its log-probs;
    the next ones are those of the policy after.
    """
    first, second = requests(seed=1), requests(seed=2)
    before = engine.version
    drawn = engine.generate(first, Sampling())
    again, ahead = engine.begin(first, Sampling()), engine.begin(second, Sampling())
    scores = engine.score(scored(first, drawn), SCORING)  # ranks score while servers draw
    assert gap(drawn, scores) <= 1e-6
    assert [r.ids.tolist() for r in again()] == [r.ids.tolist() for r in drawn]
    engine.update(samples_of(first, drawn))
    trunks = ahead()
    assert {r.version for r in [*drawn, *trunks]} == {before}
    assert engine.version == before + 1
    assert gap(trunks, engine.score(scored(second, trunks), SCORING)) > 1e-3  # by the policy after the update
    new = engine.generate(second, Sampling())
    assert {r.version for r in new} == {before + 1}
    assert gap(new, engine.score(scored(second, new), SCORING)) <= 1e-6
    found = engine.metrics()
    assert found["sync/count"] == 2
    assert 0 < found["sync/logprob_gap"] < 1e-6


def test_servers_draw_while_every_rank_is_busy(engine, tmp_path):
    """Ranks wait for a file that is written once the rollouts are here: in turn, the two would wait for each other."""
    from verl_cpu_engine import stand_until

    wait = engine.begin(requests(seed=3), Sampling())
    (drawing,) = engine.servers.begun
    mark = tmp_path / "drawn"

    def tell() -> None:
        if wait_until(drawing.done):
            mark.touch()

    threading.Thread(target=tell, daemon=True).start()
    assert engine._call(stand_until, str(mark), LIMIT) == [True, True]
    assert len(wait()) == 15


def test_a_checkpoint_brings_back_the_weights_on_the_servers_too(engine, tmp_path):
    """Of the same version as the servers hold, but other ones: they must be synced again."""
    asked = requests(seed=7)
    engine.save(tmp_path)
    version, drawn = engine.version, engine.generate(asked, Sampling())
    samples = samples_of(asked, drawn)
    engine.update(samples)
    engine.load(tmp_path)
    engine.update(samples[:4])
    other = engine.generate(asked, Sampling())
    engine.load(tmp_path)
    engine.update(samples)
    assert engine.version == version + 1 == other[0].version
    new = engine.generate(asked, Sampling())
    assert gap(new, engine.score(scored(asked, new), SCORING)) <= 1e-6
    assert [r.logprobs.tolist() for r in new] != [r.logprobs.tolist() for r in other]


def test_weights_do_not_change_under_what_was_begun(engine):
    wait = engine.begin(requests(seed=9), Sampling())
    with pytest.raises(TrainingError, match="weights would change under rollouts that were begun"):
        engine.servers.sync(engine.version + 1)
    assert {r.version for r in wait()} == {engine.version}


def test_a_server_that_dies_while_ranks_update_ends_the_engine_with_its_cause(engine):
    """It is stopped before it is asked, so that no answer can come; the update is made, the wait is not forever."""
    processes = family(psutil.Process().children())
    asked = requests(seed=11)
    samples = samples_of(asked, engine.generate(asked, Sampling()))
    server = ray.get(engine.servers.handles[0].__ray_call__.remote(lambda _: os.getpid()))
    os.kill(server, signal.SIGSTOP)
    wait, before = engine.begin(asked, Sampling()), engine.version
    engine.update(samples)
    assert engine.version == before + 1
    os.kill(server, signal.SIGKILL)
    with pytest.raises(TrainingError, match=r"generate on the cluster failed: .*Actor"):
        wait()
    assert engine.closed
    assert len(processes) > 5
    assert wait_until(lambda: not family(processes) - family(psutil.Process().children()))
