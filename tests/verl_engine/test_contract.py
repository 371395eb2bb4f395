"""What is wrong with an installation or a config is said before anything starts."""

import importlib.util

import pytest

from attnrl.config import load_config
from attnrl.errors import ConfigError, MissingExtraError
from attnrl.verl_engine import settings
from attnrl.verl_engine.contract import CONTRACT, check_verl

INSTALLED = importlib.util.find_spec("verl") is not None


class Llama:
    max_position_embeddings = 4096


@pytest.mark.skipif(INSTALLED, reason="verl is installed")
def test_without_verl_the_extra_is_named():
    with pytest.raises(MissingExtraError, match=r"attnrl\[verl,vllm\]"):
        check_verl()


@pytest.mark.skipif(not INSTALLED, reason="needs verl: make test-verl")
def test_the_installed_verl_fits_and_the_first_method_that_does_not_is_named():
    check_verl()
    renamed = ("verl.checkpoint_engine:CheckpointEngineManager.update_weights", ("global_steps", "colour"))
    with pytest.raises(ConfigError, match=r"CheckpointEngineManager\.update_weights takes no 'colour'"):
        check_verl((*CONTRACT[:3], renamed, *CONTRACT[3:]))
    with pytest.raises(ConfigError, match=r"has no usable verl\.nowhere:Thing"):
        check_verl((("verl.nowhere:Thing", ()),))


def test_lengths_are_checked_against_the_model():
    keys = {"data.max_prompt_tokens": 1000, "evaluation.every": 0}
    settings.check(load_config("", {**keys, "sampling.max_response_tokens": 3096}), Llama(), learn=True)
    config = load_config("", {**keys, "sampling.max_response_tokens": 3097})
    with pytest.raises(ConfigError, match="are 4097 tokens together, but the model reads 4096"):
        settings.check(config, Llama(), learn=True)


def test_evaluation_counts_for_the_longest_sequence():
    keys = {"data.max_prompt_tokens": 100, "sampling.max_response_tokens": 200, "evaluation.max_response_tokens": 300}
    keys |= {"evaluation.max_prompt_tokens": 150}
    assert settings.max_tokens(load_config("", {**keys, "evaluation.every": 0}), learn=True) == 300
    assert settings.max_tokens(load_config("", {**keys, "evaluation.every": 5}), learn=True) == 450
    assert settings.max_tokens(load_config("", keys), learn=False) == 450


def test_what_the_engine_does_not_do_is_refused():
    with pytest.raises(ConfigError, match="lora_rank"):
        settings.check(load_config("", {"model.lora_rank": 8}), Llama(), learn=True)
    with pytest.raises(ConfigError, match=r'optimizer = "adamw_8bit" is of engine local.*optimizer_offload=True'):
        settings.check(load_config("", {"update.optimizer": "adamw_8bit"}), Llama(), learn=True)
    for layers in (3, "auto"):
        with pytest.raises(ConfigError, match=f"gradient_checkpointing = {layers!r} is of engine local"):
            settings.check(load_config("", {"update.gradient_checkpointing": layers}), Llama(), learn=True)
    with pytest.raises(ConfigError, match="'verbose' is not of the form key=value"):
        settings.check(
            load_config("", {"engine.verl.overrides": ["verbose"], "sampling.max_response_tokens": 100}),
            Llama(),
            learn=True,
        )


def test_overrides_say_what_the_config_says_and_the_users_come_last():
    changed = {
        "engine.verl.nodes": 2,
        "engine.verl.gpus_per_node": 4,
        "engine.verl.overrides": ["actor_rollout_ref.rollout.gpu_memory_utilization=0.7"],
        "update.lr": 3e-6,
        "update.max_grad_norm": 0.5,
        "evaluation.every": 0,
    }
    found = settings.overrides(load_config("attnrl_1p5b", changed), model="M", learn=True)
    assert found[-1] == "actor_rollout_ref.rollout.gpu_memory_utilization=0.7"
    for line in (
        "trainer.nnodes=2",
        "trainer.n_gpus_per_node=4",
        "actor_rollout_ref.model.path=M",
        "actor_rollout_ref.actor.optim.lr=3e-06",
        "actor_rollout_ref.actor.optim.clip_grad=0.5",
        "actor_rollout_ref.rollout.max_model_len=9216",
        "actor_rollout_ref.rollout.dtype=bfloat16",
    ):
        assert line in found


@pytest.mark.parametrize(
    ("changed", "dtype", "precision"),
    [
        ({}, "bfloat16", "bf16"),
        ({"model.dtype": "float32"}, "float32", "fp32"),
        ({"engine.verl.overrides": ["trainer.device=cpu"]}, "float32", "fp32"),
    ],
)
def test_auto_is_half_precision_where_there_are_gpus(changed, dtype, precision):
    config = load_config("attnrl_1p5b", changed)
    assert settings.dtype_of(config) == dtype
    found = settings.overrides(config, model="M", learn=True)
    assert f"actor_rollout_ref.rollout.dtype={dtype}" in found
    for part in ("actor", "ref"):
        assert f"+actor_rollout_ref.{part}.fsdp_config.mixed_precision.param_dtype={precision}" in found
    assert "actor_rollout_ref.actor.fsdp_config.model_dtype=fp32" in found


@pytest.mark.skipif(not INSTALLED, reason="needs verl: make test-verl")
def test_verl_reads_the_overrides_and_a_wrong_one_is_named():
    config = load_config("attnrl_1p5b", {"engine.verl.gpus_per_node": 3})
    found = settings.compose(settings.overrides(config, model="M", learn=True))
    assert found.trainer.n_gpus_per_node == 3
    assert found.actor_rollout_ref.actor.optim.betas == [0.9, 0.999]
    with pytest.raises(ConfigError, match=r"engine\.verl\.overrides"):
        settings.compose(["actor_rollout_ref.rollout.no_such_key=1"])
