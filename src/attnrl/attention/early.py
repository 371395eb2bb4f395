"""Kernels that are on the GPU before the kernel before them has ended.

A decode step is nine kernels a layer, most of them short, and between two of them a GPU idles. On Hopper GPUs and
later a kernel may start while its predecessor still runs ("programmatic dependent launch"): it sets itself up and waits
until the predecessor's results can be read. It starts once all programs of the predecessor have passed on, which they
do after their own wait, or have ended. Until its wait a kernel reads nothing but weights, which a step does not write,
and what was there before the last kernel that was launched plainly; and it writes nothing.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# The kernels' parameters are Triton values, which have no Python types.

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def wait(EARLY: tl.constexpr):
    """Waits for the kernel before this one, if it was launched with `early`."""
    if EARLY:
        cuda.gdc_wait()


@triton.jit
def pass_on(EARLY: tl.constexpr):
    """Lets the next kernel start, once all programs of this one are here or have ended; comes after `wait`."""
    if EARLY:
        cuda.gdc_launch_dependents()


@triton.jit
def follow(EARLY: tl.constexpr):
    """Waits for the kernel before this one, and lets the next one start."""
    wait(EARLY)
    pass_on(EARLY)


@triton.jit
def fetch(POINTERS, BYTES: tl.constexpr):
    """Asks for `BYTES` from each pointer on, to be in the L2 when they are loaded."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [POINTERS, BYTES], tl.int32, False, 1
    )


@cache
def early(device: torch.device) -> dict[str, Any]:
    """Launch options of a kernel that waits, where the device can start it early."""
    compiled = os.environ.get("TRITON_INTERPRET") != "1" and torch.version.hip is None
    if device.type != "cuda" or not compiled or torch.cuda.get_device_capability(device) < (9, 0):
        return {}
    return {"EARLY": True, "launch_pdl": True}
