"""Kernels that are on the GPU before the kernel before them has ended.

A decode step is nine kernels a layer, most of them short, and between two of them a GPU idles. On Hopper GPUs and
later a kernel may start while its predecessor still runs ("programmatic dependent launch"): it sets itself up and waits
in `follow` until the predecessor's results can be read. Nothing that another kernel writes may be touched before that;
weights may be asked for, since a step writes none.
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
def follow(EARLY: tl.constexpr):
    """First statement of a kernel launched with `early`: waits for the kernel before it, lets the next one start."""
    if EARLY:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


@triton.jit
def fetch(POINTERS, BYTES: tl.constexpr):
    """Asks for `BYTES` from each pointer on, to be in the L2 when they are loaded."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [POINTERS, BYTES], tl.int32, False, 1
    )


@cache
def early(device: torch.device) -> dict[str, Any]:
    """Launch options of a kernel that begins with `follow`, where the device can start it early."""
    compiled = os.environ.get("TRITON_INTERPRET") != "1" and torch.version.hip is None
    if device.type != "cuda" or not compiled or torch.cuda.get_device_capability(device) < (9, 0):
        return {}
    return {"EARLY": True, "launch_pdl": True}
