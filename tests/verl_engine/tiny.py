"""The environment and the settings under which verl runs the tiny Llama on a CPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path

SHIMS = Path(__file__).parent / "shims"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # Ray would end workers where other programs fill the machine's memory
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu",
}


def environment() -> dict[str, str]:
    """For the driver; Ray's processes inherit it."""
    paths = [str(SHIMS), str(Path(__file__).parents[2] / "src"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}


def overrides() -> list[str]:
    """What a machine without an accelerator needs beside what the engine sets; the same at any number of ranks and for
    servers apart from them, because it may not change on resume.
    """
    rollout = {
        "enforce_eager": True,
        "free_cache_engine": False,
        "+enable_sleep_mode": False,
        "enable_chunked_prefill": False,  # with seeds it ends vLLM on a CPU
        "max_num_batched_tokens": 4096,
        "max_num_seqs": 64,
        "checkpoint_engine.update_weights_bucket_megabytes": 64,
        "checkpoint_engine.backend": "file",  # for servers on GPUs of their own
        "checkpoint_engine.custom_backend_module": "verl_cpu_sync",
        "+engine_kwargs.vllm.worker_extension_cls": "verl_cpu_vllm.CPUExtension",
    }
    found = [
        "trainer.device=cpu",
        "+ray_kwargs.ray_init.num_gpus=3",
        "ray_kwargs.ray_init.num_cpus=16",
        "+ray_kwargs.ray_init.include_dashboard=False",
        "actor_rollout_ref.model.external_lib=verl_cpu_engine",
    ]
    for key, value in rollout.items():
        plus = "+" if key.startswith("+") else ""
        found.append(f"{plus}actor_rollout_ref.rollout.{key.removeprefix('+')}={value}")
    return found


def prepare() -> None:
    """This process becomes a driver: its environment, and the shims on its path."""
    os.environ.update(ENVIRONMENT)
    os.environ["PYTHONPATH"] = environment()["PYTHONPATH"]
    sys.path.insert(0, str(SHIMS))


def write_preset(folder: Path, base: str, ranks: int, *, keys: str = "", algo: str = "") -> Path:
    """A TOML file that runs a preset of attnrl at this size: the tiny model in `folder`/model, four prompts."""
    problems = [f'{{"problem": "add {i} and {i * 7 % 13}", "answer": "{i + i * 7 % 13}"}}' for i in range(40)]
    (folder / "problems.jsonl").write_text("\n".join(problems) + "\n")
    lines = ",\n  ".join(f'"{entry}"' for entry in overrides())
    path = folder / f"{base}_{ranks}.toml"
    path.write_text(
        f"""base = "{base}"
reward = "verl_reward:many"
{keys}
[model]
path = "{folder / "model"}"
[data]
train = ["{folder / "problems.jsonl"}"]
decontaminate = []
clean = false
template = "{{problem}}"
max_prompt_tokens = 64
[sampling]
max_response_tokens = 40
[algo]
prompts = 4
group = 3
segmenter = "every_n_tokens"
segmenter_options = {{tokens = 4}}
{algo}
[update]
minibatches = 2
microbatch_tokens = 200
lr = 1e-3
[evaluation]
every = 0
[engine]
name = "verl"
[engine.verl]
gpus_per_node = {ranks}
overrides = [
  {lines}
]
[run]
iterations = 5
checkpoint_every = 1
"""
    )
    return path
