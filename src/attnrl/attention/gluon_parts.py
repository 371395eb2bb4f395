"""What our Gluon kernels share: where they run, names that Triton changed between 3.6 and 3.9, and barriers."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# The kernels' parameters are Triton values, which have no Python types.

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
sync = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_memory = gl.shared_memory_descriptor
view = _memory.reinterpret if hasattr(_memory, "reinterpret") else _memory._reinterpret


def on_hopper(x: Tensor) -> bool:
    """Whether the tensor lies on a Hopper GPU; some of AMD's have its number too."""
    return x.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(x.device)[0] == 9


@gluon.jit
def new_barriers(n: gl.constexpr, arrivals: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [n, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(n):
        mbarrier.init(made.index(i), count=arrivals)
    return made
