"""What is wrong with an installation or a config is said before anything starts."""

import importlib.util
import pickle
import re

import pytest

from attnrl.config import load_config
from attnrl.errors import ConfigError, MissingExtraError, MissingFileError
from attnrl.verl_engine import contract, settings
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


@pytest.mark.skipif(not INSTALLED, reason="needs verl: make test-verl")
def test_without_vllm_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(contract, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"attnrl\[verl,vllm\]"):
        check_verl()


@pytest.mark.skipif(not INSTALLED, reason="needs verl: make test-verl")
def test_of_what_hydra_could_not_make_the_reason_is_told(tmp_path):
    """As it comes from a rank, where verl has Hydra read the model: pickled, so what caused it is in its words only."""
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    from attnrl.verl_engine.backend import cause

    wanted = OmegaConf.create({"model": {"_target_": "os.listdir", "path": str(tmp_path / "nowhere")}})
    with pytest.raises(Exception, match=r"full_key: model$") as raised:
        instantiate(wanted.model)
    said = cause(pickle.loads(pickle.dumps(raised.value)))
    assert said.startswith("InstantiationException: FileNotFoundError(2, 'No such file or directory')")


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
    class Hybrid:
        text_config = type("Text", (), {"layer_types": ["linear_attention", "full_attention"]})

    with pytest.raises(ConfigError, match=r"the layers of Hybrid carry a state .* use engine local"):
        settings.check(load_config("", {}), Hybrid(), learn=True)
    with pytest.raises(ConfigError, match="lora_rank"):
        settings.check(load_config("", {"model.lora_rank": 8}), Llama(), learn=True)
    with pytest.raises(ConfigError, match=r'optimizer = "adamw_8bit" is of engine local.*optimizer_offload=True'):
        settings.check(load_config("", {"update.optimizer": "adamw_8bit"}), Llama(), learn=True)
    for layers in (3, "auto"):
        with pytest.raises(ConfigError, match=f"gradient_checkpointing = {layers!r} is of engine local"):
            settings.check(load_config("", {"update.gradient_checkpointing": layers}), Llama(), learn=True)
    for entry in ("verbose", "=3"):
        changed = {"engine.verl.overrides": [entry], "sampling.max_response_tokens": 100}
        with pytest.raises(ConfigError, match=f"'{entry}' is not of the form key=value"):
            settings.check(load_config("", changed), Llama(), learn=True)


def test_what_a_key_of_ours_decides_is_no_override():
    """verl would print a learning rate that our loop does not take."""
    known = {entry.split("=")[0] for entry in settings.overrides(load_config(""), model="M", learn=True)}
    assert settings.OURS.keys() <= known
    for entry, key in (
        ("actor_rollout_ref.actor.optim.lr=5", "update.lr"),
        ("++trainer.nnodes=3", "engine.verl.nodes"),
    ):
        changed = {"engine.verl.overrides": [entry], "sampling.max_response_tokens": 100}
        with pytest.raises(ConfigError, match=rf"is for {re.escape(key)} to say: set that"):
            settings.check(load_config("", changed), Llama(), learn=True)


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
        "actor_rollout_ref.model.path='M'",
        "actor_rollout_ref.actor.optim.lr=3e-06",
        "actor_rollout_ref.actor.optim.clip_grad=0.5",
        "actor_rollout_ref.rollout.max_model_len=9216",
        "actor_rollout_ref.rollout.dtype=bfloat16",
    ):
        assert line in found


def test_a_model_directory_is_named_as_ranks_find_it_that_run_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "near").mkdir()
    for model, named in (("near", tmp_path / "near"), ("owner/model", "owner/model")):
        found = settings.overrides(load_config("attnrl_1p5b"), model=model, learn=True)
        assert f"actor_rollout_ref.model.path='{named}'" in found


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
    wrong = {
        "actor_rollout_ref.rollout.no_such_key=1": "no_such_key'. To append to your config use +actor",
        "actor_rollout_ref.rollout.dtype=${nope}": "Interpolation key 'nope' not found",
        "actor_rollout_ref.rollout.dtype='a,b": "LexerNoViableAlt",
    }
    for entry, said in wrong.items():
        with pytest.raises(ConfigError, match="engine.verl.overrides: .*" + re.escape(said)):
            settings.compose([entry])


@pytest.mark.skipif(not INSTALLED, reason="needs verl: make test-verl")
@pytest.mark.parametrize("path", ["/a b/c,d", "/a=1/b(2)", "/ü/~x/#1", "/it's/{here}", "1e5", "null"])
def test_verl_reads_a_model_path_as_it_is(path):
    found = settings.compose(settings.overrides(load_config("attnrl_1p5b"), model=path, learn=True))
    assert found.actor_rollout_ref.model.path == path


@pytest.mark.skipif(not INSTALLED, reason="needs verl: make test-verl")
@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("tensor_model_parallel_size", "two", "tensor_model_parallel_size = 'two' is no number"),
        ("tensor_model_parallel_size", "0", "tensor_model_parallel_size = 0 is no number"),
        ("max_model_len", "null", "max_model_len = None is no number"),
        ("max_model_len", "99", "servers that read 99 tokens .* the longest prompt and response are 100 together"),
        ("tensor_model_parallel_size", "3", "nodes x gpus_per_node = 8 is no multiple of the 3 GPUs of a server"),
    ],
)
def test_servers_that_cannot_be_are_refused(key, value, said):
    config = load_config("attnrl_1p5b", {"engine.verl.gpus_per_node": 4, "engine.verl.nodes": 2})
    known = settings.overrides(config, model="M", learn=True)
    settings.check_servers(settings.compose(known), 0, longest=100)
    with pytest.raises(ConfigError, match=said):
        settings.check_servers(settings.compose([*known, f"actor_rollout_ref.rollout.{key}={value}"]), 0, longest=100)


def test_ranks_that_ray_would_never_place_are_refused():
    """Each rank takes a GPU and three CPUs, those of a machine of ours together on one of Ray's."""
    two, four = {"GPU": 2.0, "CPU": 6.0}, {"GPU": 4.0, "CPU": 12.0}
    settings.check_room([two, {"CPU": 64.0}], [2], 0)
    settings.check_room([two, four], [2, 2, 2], 0)
    settings.check_room([two, four], [4], 2)
    with pytest.raises(ConfigError, match="asks for 7 GPUs, the Ray cluster has 6"):
        settings.check_room([two, four], [4], 3)
    with pytest.raises(
        ConfigError, match=r"gpus_per_node = 4 takes 4 GPUs and 12 CPUs of one machine.*2 GPUs and 6 CPUs"
    ):
        settings.check_room([two, two, two], [4], 0)
    with pytest.raises(ConfigError, match=r"of 2 machines \(nodes\); Ray's have 4 GPUs and 11 CPUs; 4 "):
        settings.check_room([{**four, "CPU": 11.0}, four], [4, 4], 0)


def test_a_checkpoint_that_lost_a_file_is_refused(tmp_path):
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp

    with pytest.raises(MissingFileError, match=r"is no checkpoint of engine verl: verl\.json is missing"):
        settings.read_state(tmp_path)
    (tmp_path / "verl.json").write_text('{"version": 3}')
    with pytest.raises(MissingFileError, match=r"actor/\.metadata is missing"):
        settings.read_state(tmp_path)
    dcp.save({"model": {"a": torch.ones(1000)}}, checkpoint_id=tmp_path / "actor", no_dist=True)
    assert settings.read_state(tmp_path) == {"version": 3}
    for part in ("", '{"version": 3', "\0" * 14):
        (tmp_path / "verl.json").write_text(part)
        with pytest.raises(MissingFileError, match=rf"verl\.json is missing or cut short; remove {tmp_path} to go on"):
            settings.read_state(tmp_path)
    (tmp_path / "verl.json").write_text('{"version": 3}')
    (tmp_path / "actor" / ".metadata").write_bytes(b"")
    with pytest.raises(MissingFileError, match=rf"\.metadata is missing or cut short; remove {tmp_path} to go on"):
        settings.read_state(tmp_path)
