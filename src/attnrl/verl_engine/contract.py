"""What this engine calls of verl, checked before anything starts: verl's inner API moves between releases."""

from __future__ import annotations

import inspect
import pkgutil
from importlib import metadata
from importlib.util import find_spec

from attnrl.errors import ConfigError, MissingExtraError

FROM, BELOW = (0, 9, 1), (0, 10)

# object, and the parameters it is called with
CONTRACT: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("verl.trainer.constants_ppo:get_ppo_ray_runtime_env", ("config",)),
    ("verl.single_controller.base.decorator:register", ("dispatch_mode", "blocking")),
    ("verl.single_controller.ray:RayResourcePool", ("process_on_nodes", "max_colocate_count", "name_prefix")),
    ("verl.single_controller.ray:RayClassWithInitArgs", ("cls", "args", "kwargs")),
    ("verl.single_controller.ray:RayWorkerGroup", ("resource_pool", "ray_cls_with_init", "kwargs")),
    ("verl.workers.rollout.llm_server:LLMServerManager", ("config", "worker_group", "rollout_resource_pool")),
    ("verl.workers.rollout.llm_server:LLMServerManager.create", ("args", "kwargs")),
    ("verl.workers.rollout.llm_server:LLMServerManager.get_replicas", ()),
    ("verl.workers.rollout.llm_server:LLMServerManager.get_client", ()),
    ("verl.workers.rollout.llm_server:LLMServerClient.generate", ("request_id", "prompt_ids", "sampling_params")),
    ("verl.checkpoint_engine:CheckpointEngineManager", ("config", "actor_wg", "replicas")),
    ("verl.checkpoint_engine:CheckpointEngineManager.update_weights", ("global_steps",)),
    ("verl.checkpoint_engine:CheckpointEngineManager.sleep_replicas", ()),
    ("verl.workers.rollout.replica:RolloutReplica.init_standalone", ()),
    ("verl.utils.config:omega_conf_to_dataclass", ("config",)),
    ("verl.utils.device:get_device_name", ()),
    ("verl.utils.device:get_device_id", ()),
    ("verl.workers.engine_workers:ActorRolloutRefWorker", ("config", "role")),
    ("verl.workers.engine_workers:ActorRolloutRefWorker.init_model", ()),
    ("verl.workers.engine_workers:ActorRolloutRefWorker.update_weights", ("global_steps", "mode")),
    ("verl.workers.engine.fsdp.transformer_impl:FSDPEngine.eval_mode", ("kwargs",)),
    ("verl.workers.engine.fsdp.transformer_impl:FSDPEngine.train_mode", ("kwargs",)),
    ("verl.workers.engine.fsdp.transformer_impl:FSDPEngine.optimizer_zero_grad", ()),
    ("verl.workers.engine.fsdp.transformer_impl:FSDPEngine.optimizer_step", ()),
    ("verl.workers.engine.fsdp.transformer_impl:FSDPEngine._gradient_sync_context", ("is_last_micro_batch",)),
)


def check_verl(contract: tuple[tuple[str, tuple[str, ...]], ...] = CONTRACT) -> None:
    """Raise where verl or vLLM is missing, verl of another release, or the first of its methods does not fit."""
    try:
        version = metadata.version("verl")
        if find_spec("vllm") is None:  # whose builds have several names
            raise metadata.PackageNotFoundError("vllm")
    except metadata.PackageNotFoundError:
        raise MissingExtraError("engine verl needs verl, Ray and vLLM: pip install 'attnrl[verl,vllm]'") from None
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if not FROM <= numbers < BELOW:
        raise ConfigError(f"engine verl is written for verl >=0.9.1,<0.10; installed is {version}")
    for name, wanted in contract:
        try:
            has = inspect.signature(pkgutil.resolve_name(name)).parameters
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"verl {version} has no usable {name}: {error}") from error
        if missing := [p for p in wanted if p not in has]:
            raise ConfigError(f"verl {version}: {name} takes no {missing[0]!r} (it takes {', '.join(has)})")
