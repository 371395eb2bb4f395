"""From our config to verl's, and what can be wrong with config, model and checkpoint before anything starts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any

from attnrl.attention.decoder import recurrent
from attnrl.config import Config
from attnrl.errors import ConfigError, MissingExtraError, MissingFileError, reading
from attnrl.ranks.weights import check_shards

STATE = "verl.json"  # what the driver writes into a checkpoint
CPUS = 3  # that verl has Ray set aside for each rank

OURS = {  # settings of verl that a key of ours decides, and no override: some would be taken and not obeyed
    "trainer.nnodes": "engine.verl.nodes",
    "trainer.n_gpus_per_node": "engine.verl.gpus_per_node",
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.actor.optim.lr": "update.lr",
    "actor_rollout_ref.actor.optim.weight_decay": "update.weight_decay",
    "actor_rollout_ref.actor.optim.betas": "update.betas",
    "actor_rollout_ref.actor.optim.clip_grad": "update.max_grad_norm",
    "actor_rollout_ref.rollout.dtype": "model.dtype",
}


def dtype_of(config: Config) -> str:
    """The dtype of servers and of models in checkpoints; auto is half precision where there are GPUs."""
    on_cpu = "trainer.device=cpu" in config.engine.verl.overrides
    return config.model.dtype if config.model.dtype != "auto" else "float32" if on_cpu else "bfloat16"


def max_tokens(config: Config, *, learn: bool) -> int:
    """The longest sequence a run can ask for, prompt and response, in training and in evaluation."""
    trained, measured = config.sampling, config.evaluation
    longest = config.data.max_prompt_tokens + trained.max_response_tokens if learn else 0
    if measured.every or not learn:
        longest = max(longest, measured.max_prompt_tokens + measured.max_response_tokens)
    return longest


def check(config: Config, model_config: Any, *, learn: bool) -> None:
    """Raise where the engine cannot run the config. `model_config`: of transformers."""
    if recurrent(model_config):
        raise ConfigError(
            f"engine verl packs sequences, and the layers of {type(model_config).__name__} carry a state from each "
            "token to the next, which would mix them: use engine local"
        )
    if config.model.lora_rank:
        raise ConfigError("engine verl trains full weights only: set model.lora_rank to 0, or use engine local")
    if config.update.optimizer != "adamw":
        raise ConfigError(
            f'update.optimizer = "{config.update.optimizer}" is of engine local: leave it out; verl offloads its own '
            'by engine.verl.overrides = ["actor_rollout_ref.actor.fsdp_config.optimizer_offload=True"]'
        )
    if config.update.gradient_checkpointing not in ("all", "none"):
        raise ConfigError(
            f"update.gradient_checkpointing = {config.update.gradient_checkpointing!r} is of engine local: verl runs "
            'every layer again or keeps them all; set it to "all" or "none"'
        )
    wanted, limit = max_tokens(config, learn=learn), getattr(model_config, "max_position_embeddings", None)
    if limit is not None and wanted > limit:
        raise ConfigError(
            f"the longest prompt and response are {wanted} tokens together, but the model reads {limit}: lower "
            "max_prompt_tokens (of data, or of evaluation) or max_response_tokens (of sampling, or of evaluation)"
        )
    for entry in config.engine.verl.overrides:
        if entry.find("=") < 1:
            raise ConfigError(f"engine.verl.overrides: {entry!r} is not of the form key=value")
        if (key := entry.split("=")[0].lstrip("+~").strip()) in OURS:
            raise ConfigError(f"engine.verl.overrides: {key} is for {OURS[key]} to say: set that")


def overrides(config: Config, *, model: str, learn: bool) -> list[str]:
    """The settings of verl that the config means, those of engine.verl.overrides last."""
    update, engine, dtype = config.update, config.engine.verl, dtype_of(config)
    precision = "bf16" if dtype == "bfloat16" else "fp32"
    place = str(Path(model).absolute()) if Path(model).is_dir() else model  # ranks may run in another directory
    found: dict[str, Any] = {key: attrgetter(ours)(config) for key, ours in OURS.items()}
    found |= {
        "data.max_prompt_length": config.data.max_prompt_tokens,
        "data.max_response_length": config.sampling.max_response_tokens,
        "actor_rollout_ref.model.path": "'" + place.replace("'", r"\'") + "'",  # commas and = mean something to Hydra
        "actor_rollout_ref.model.use_remove_padding": True,
        "actor_rollout_ref.model.enable_gradient_checkpointing": update.gradient_checkpointing == "all",
        "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",  # ours takes its place in every forward
        "+actor_rollout_ref.model.override_config.attention_dropout": 0.0,
        "actor_rollout_ref.actor.strategy": "fsdp2",
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": update.microbatch_tokens,
        "actor_rollout_ref.actor.optim.betas": list(update.betas),
        "actor_rollout_ref.actor.fsdp_config.model_dtype": "fp32",
        "actor_rollout_ref.ref.fsdp_config.model_dtype": precision,
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "actor_rollout_ref.rollout.load_format": "auto",
        "actor_rollout_ref.rollout.dtype": dtype,
        "actor_rollout_ref.rollout.max_model_len": max_tokens(config, learn=learn),
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz": True,  # verl asks for the same value as the actor's
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": update.microbatch_tokens,
    }
    for part in ("actor_rollout_ref.actor", "actor_rollout_ref.ref"):
        found[f"+{part}.fsdp_config.mixed_precision.param_dtype"] = precision
        found[f"{part}.use_torch_compile"] = False  # of verl's own losses, which are not called
        found[f"{part}.fsdp_config.use_torch_compile"] = False
    if engine.server_gpus:
        found["actor_rollout_ref.rollout.nnodes"] = 1
        found["actor_rollout_ref.rollout.n_gpus_per_node"] = engine.server_gpus
        found["actor_rollout_ref.rollout.checkpoint_engine.backend"] = "nccl"
    return [*(f"{key}={value}" for key, value in found.items()), *engine.overrides]


def compose(entries: Sequence[str]) -> Any:
    """verl's own ppo_trainer.yaml with these overrides, resolved."""
    import hydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        with hydra.initialize_config_module("verl.trainer.config", version_base=None):
            config = hydra.compose("ppo_trainer", overrides=list(entries))
        OmegaConf.resolve(config)
    except (HydraException, OmegaConfBaseException) as error:  # the first lines say what is wrong and what to write
        raise ConfigError("engine.verl.overrides: " + " ".join(str(error).split("\n")[:2]).strip()) from None
    return config


def check_servers(composed: Any, server_gpus: int, *, longest: int) -> None:
    """Raise where servers cannot be as verl's config, `composed`, has them, or read no `longest` tokens."""
    rollout, trainer = composed.actor_rollout_ref.rollout, composed.trainer
    each, ranks = rollout.tensor_model_parallel_size, trainer.n_gpus_per_node * trainer.nnodes
    for key, value in (("tensor_model_parallel_size", each), ("max_model_len", rollout.max_model_len)):
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"engine.verl.overrides: {key} = {value!r} is no number of GPUs or tokens")
    for key, gpus in (("nodes x gpus_per_node", ranks), ("server_gpus", server_gpus)):
        if gpus % each:
            raise ConfigError(f"engine.verl.{key} = {gpus} is no multiple of the {each} GPUs of a server")
    if rollout.max_model_len < longest:
        raise ConfigError(
            f"engine.verl.overrides: servers that read {rollout.max_model_len} tokens (max_model_len) are too short: "
            f"the longest prompt and response are {longest} together"
        )
    if server_gpus and rollout.checkpoint_engine.backend == "nccl" and find_spec("cupy") is None:
        raise MissingExtraError(
            "engine.verl.server_gpus: verl sends weights by NCCL through cupy: pip install cupy-cuda12x, or the build "
            "for your CUDA"
        )


def check_room(nodes: Sequence[Mapping[str, float]], machines: Sequence[int], server_gpus: int) -> None:
    """Raise where ranks and servers do not fit on Ray's nodes: Ray would wait for others, and the run for Ray."""
    have, wanted = int(sum(node.get("GPU", 0) for node in nodes)), sum(machines) + server_gpus
    if have < wanted:
        raise ConfigError(
            f"engine.verl: nodes x gpus_per_node + server_gpus asks for {wanted} GPUs, the Ray cluster has {have}"
        )
    each, cpus = machines[0], CPUS * machines[0]
    room = sum(int(min(node.get("GPU", 0) // each, node.get("CPU", 0) // cpus)) for node in nodes)
    if room < len(machines):
        found = "; ".join(f"{node.get('GPU', 0):g} GPUs and {node.get('CPU', 0):g} CPUs" for node in nodes)
        raise ConfigError(
            f"engine.verl: gpus_per_node = {each} takes {each} GPUs and {cpus} CPUs of one machine, of {len(machines)} "
            f"machines (nodes); Ray's have {found}"
        )


def read_state(path: Path) -> dict[str, Any]:
    """What the driver wrote into a checkpoint; raises where this engine cannot go on from it."""
    if not (path / STATE).is_file():
        raise MissingFileError(f"{path} is no checkpoint of engine verl: {STATE} is missing")
    check_shards(path / "actor")
    with reading(path / STATE, path):
        state: dict[str, Any] = json.loads((path / STATE).read_text("utf-8"))
    return state
