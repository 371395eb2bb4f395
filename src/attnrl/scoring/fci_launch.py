"""Runs the FCI kernels over the layers of a pack, with tile sizes measured once and remembered.

Shapes: T tokens of a pack, H query heads, K key/value heads, D head size, S steps of the pack.
"""

from __future__ import annotations

import json
import os
import warnings
from contextlib import nullcontext
from dataclasses import asdict, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import triton
from numpy.typing import NDArray

from attnrl.attention.scores import with_sinks
from attnrl.attention.triton_parts import GLUON, LOG2E
from attnrl.errors import ConfigError, DataError
from attnrl.scoring.fci_triton import Layer, Tile, _column_sums, _row_lse, _step_max
from attnrl.scoring.plan import ALIGN, Plan, key_blocks, query_blocks

if GLUON:
    from attnrl.scoring import fci_hopper
else:
    fci_hopper = None  # type: ignore[assignment]

HOPPER = Tile(128, 64, 4, 3, kernel="gluon")
# Measured on one H200 by benchmarks/fci.py, section "tune"; other devices and shapes are measured at first use.
SHIPPED: dict[str, Tile] = {
    "sm90/half/d128/t1024": Tile(64, 64, 4, 3),
    "sm90/half/d128/t2048": Tile(64, 128, 4, 3),
    **{f"sm90/half/d128/t{tokens}": Tile(128, 64, 8, 3) for tokens in (4096, 8192, 16384, 32768)},
    "sm90/half/d128/t1024/gluon": Tile(64, 64, 4, 3),
    "sm90/half/d128/t2048/gluon": Tile(64, 128, 4, 3),
    **{f"sm90/half/d128/t{tokens}/gluon": HOPPER for tokens in (4096, 8192, 16384, 32768)},
    **{f"sm90/half/d64/t{tokens}": Tile(64, 64, 4, 3) for tokens in (1024, 2048, 4096, 8192, 16384)},
    "sm90/half/d64/t32768": Tile(128, 64, 4, 3),
}
CANDIDATES = [
    Tile(128, 64, 8, 3),
    Tile(128, 128, 8, 2, registers=128),
    Tile(256, 64, 8, 3, registers=128),
    Tile(128, 64, 4, 3),
    Tile(64, 64, 4, 3),
    Tile(64, 32, 4, 3),
]
FLOAT32_CANDIDATES = [Tile(64, 32, 4, 2), Tile(32, 32, 4, 2), Tile(64, 64, 8, 2), Tile(32, 16, 4, 2)]
INTERPRETED = Tile(32, 16, 4, 1)
AHEAD = 256  # values behind the last token that a kernel may read ahead, and never uses
_chosen: dict[str, Tile] = {}


def interpreting() -> bool:
    """Triton runs on the CPU, in Python (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def cache_file() -> Path:
    """Where measured tiles are kept, one file per device kind."""
    root = Path(os.environ.get("ATTNRL_CACHE", Path.home() / ".cache" / "attnrl"))
    name = torch.cuda.get_device_name().replace(" ", "_") if torch.cuda.is_available() else "cpu"
    return root / f"fci_tiles_{name}_triton{triton.__version__}.json"


def _key(q_THD: torch.Tensor, longest: int, *, special: bool, hopper: bool) -> str:
    bucket = 1024 if longest <= 1024 else 1 << (longest - 1).bit_length()
    arch = "sm{}{}".format(*torch.cuda.get_device_capability(q_THD.device))
    dtype = "float32" if q_THD.dtype == torch.float32 else "half"
    name = f"{arch}/{dtype}/d{q_THD.shape[-1]}/t{min(bucket, 32768)}"
    return name + ("/window_or_softcap" if special else "") + ("/gluon" if hopper else "")


def _send(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """A copy on the device that the host does not wait for: a plain copy would first let the GPU run dry."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class LayerSums:
    """The FCI of a pack's steps, one call per attention layer; `best_S` is the running max over layers and heads."""

    def __init__(self, plan: Plan, device: torch.device, *, keep_heads: bool = False, tile: Tile | None = None) -> None:
        self.plan, self.device, self.tile, self.keep_heads = plan, device, tile, keep_heads
        self.best_S = torch.zeros(len(plan.step_S), device=device)
        self.heads_LHS: list[torch.Tensor] = []
        # Rows start at multiples of 16 values, so that the kernel may read them in wide loads whatever the length.
        self._pitch = -(-len(plan.qmin_T) // ALIGN) * ALIGN + AHEAD
        self._sums_HP = self._bias_HP = torch.empty(0, self._pitch, device=device)
        self._tables: dict[tuple[int, int | None], torch.Tensor] = {}
        self._tiles: dict[tuple[Any, ...], Tile] = {}
        self.kinds: set[str] = set()  # kernels that ran

    @cached_property
    def _on_device(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """log2 of the query weights [T], qmin [T], step bounds [S, 2], divisors [S].

        Sent by the first layer, not before: while the host prepares them, the GPU runs that layer's attention.
        """
        bounds = self.plan.step_S.copy()
        bounds[~self.plan.live_S, 1] = bounds[~self.plan.live_S, 0]  # no later step: scores 0
        arrays = (self.plan.weight_T, self.plan.qmin_T, bounds, self.plan.divisor_S)
        weight_T, qmin_T, step_S, divisor_S = (_send(array, self.device) for array in arrays)
        return torch.log2(weight_T), qmin_T, step_S, divisor_S  # log2 is -inf outside steps: those never count

    def table(self, size: int, window: int | None) -> torch.Tensor:
        if (size, window) not in self._tables:
            self._tables[size, window] = _send(key_blocks(self.plan, size, window), self.device)
        return self._tables[size, window]

    def __call__(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        lse_HT: torch.Tensor | None,
        *,
        sinks_H: torch.Tensor | None = None,
        **shape: Any,
    ) -> None:
        if not len(self.plan.step_S):
            return
        q_THD, k_TKD = (x.to(self.device) for x in (q_THD, k_TKD))  # a model may span devices
        q_THD, k_TKD = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_THD, k_TKD))
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            if lse_HT is None:
                lse_HT = row_lse(q_THD, k_TKD, self.plan.lengths, **shape)
                lse_HT = lse_HT if sinks_H is None else with_sinks(lse_HT, sinks_H)
            lse_HT = lse_HT.to(self.device)
            tile = self.tile or self._choose(q_THD, k_TKD, lse_HT, shape)
            self.column_sums(q_THD, k_TKD, lse_HT, tile=tile, **shape)
            self._reduce(q_THD.shape[1])

    def column_sums(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        lse_HT: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        tile: Tile,
    ) -> torch.Tensor:
        """sum over q of w_q * P[q, t] for each head and key, [H, T]; keys that score nothing are left undefined."""
        total, heads, _ = q_THD.shape
        if max(sum(n * step for n, step in zip(x.shape, x.stride(), strict=True)) for x in (q_THD, k_TKD)) >= 2**31:
            raise DataError(f"a pack of {total} tokens is beyond 32-bit addresses; lower token_budget")
        if self._sums_HP.shape[0] != heads:
            self._sums_HP = torch.empty(heads, self._pitch, device=self.device)
            self._bias_HP = torch.empty_like(self._sums_HP)
        logw_T, qmin_T, *_ = self._on_device
        torch.add(logw_T, lse_HT, alpha=-LOG2E, out=self._bias_HP[:, :total])
        table = self.table(tile.keys, window)
        if not len(table):
            return self._sums_HP[:, :total]
        self.kinds.add(tile.kernel)
        layer = Layer(
            q_THD, k_TKD, self._bias_HP, qmin_T, table, self._sums_HP, scale * LOG2E, window=window, softcap=softcap
        )
        (fci_hopper.launch if tile.kernel == "gluon" else _launch)(layer, tile)
        return self._sums_HP[:, :total]

    def _reduce(self, heads: int) -> None:
        steps = len(self.plan.step_S)
        *_, step_S, divisor_S = self._on_device
        heads_HS = torch.empty(heads, steps, device=self.device) if self.keep_heads else self.best_S
        _step_max[(steps,)](
            self._sums_HP,
            step_S,
            divisor_S,
            self.best_S,
            heads_HS,
            self._pitch,
            steps,
            H=heads,
            BH=triton.next_power_of_2(heads),
            BT=64,
            KEEP=self.keep_heads,
            num_warps=4,
        )
        if self.keep_heads:
            self.heads_LHS.append(heads_HS)

    def _choose(self, q_THD: torch.Tensor, k_TKD: torch.Tensor, lse_HT: torch.Tensor, shape: dict[str, Any]) -> Tile:
        if interpreting():
            return INTERPRETED
        seen = (q_THD.dtype, q_THD.shape, q_THD.stride(), k_TKD.stride(), q_THD.data_ptr() % 16, *shape.values())
        if seen not in self._tiles:
            special = shape["window"] is not None or shape["softcap"] is not None
            hopper = fci_hopper is not None and fci_hopper.fits(q_THD, k_TKD, shape["softcap"])
            key = _key(q_THD, max(self.plan.lengths), special=special, hopper=hopper)
            if key not in _chosen:
                _chosen[key] = SHIPPED.get(key) or _remembered(key) or self._measure(key, q_THD, k_TKD, lse_HT, shape)
            self._tiles[seen] = _chosen[key]
        return self._tiles[seen]

    def _measure(
        self, key: str, q_THD: torch.Tensor, k_TKD: torch.Tensor, lse_HT: torch.Tensor, shape: dict[str, Any]
    ) -> Tile:
        """The fastest candidate on these tensors, written to the cache file."""
        candidates = FLOAT32_CANDIDATES if q_THD.dtype == torch.float32 else CANDIDATES
        candidates = [HOPPER, *candidates] if key.endswith("/gluon") else candidates
        times: dict[Tile, float] = {}
        for tile in candidates:
            try:
                self.column_sums(q_THD, k_TKD, lse_HT, tile=tile, **shape)
            except triton.runtime.errors.OutOfResources:
                continue  # too large for this device: not a candidate here
            times[tile] = triton.testing.do_bench(
                lambda tile=tile: self.column_sums(q_THD, k_TKD, lse_HT, tile=tile, **shape), warmup=5, rep=20
            )
        if not times:
            raise ConfigError(f"no tile of the FCI kernel fits this device for {key}; use kind='torch_blocks'")
        best = min(times, key=times.__getitem__)
        _remember(key, best)
        return best


def _constants(q_THD: torch.Tensor, k_TKD: torch.Tensor, window: int | None, softcap: float | None) -> dict[str, Any]:
    """The compile-time arguments that both Triton kernels take."""
    heads, head = q_THD.shape[1:]
    return {
        "G": heads // k_TKD.shape[1],
        "D": head,
        "BD": max(16, triton.next_power_of_2(head)),
        "WINDOW": window is not None,
        "SOFTCAP": softcap is not None,
        "UPCAST": interpreting(),  # the interpreter multiplies the bits of bfloat16
    }


def _launch(layer: Layer, tile: Tile) -> None:
    """Column sums of one layer."""
    options: dict[str, Any] = {"num_warps": tile.warps, "num_stages": tile.stages}
    if tile.registers and not interpreting():
        options["maxnreg"] = tile.registers
    _column_sums[(layer.q_THD.shape[1], len(layer.table))](
        layer.q_THD,
        layer.k_TKD,
        layer.bias_HP,
        layer.qmin_T,
        layer.table,
        layer.sums_HP,
        layer.scale2,
        layer.softcap or 1.0,
        layer.window or 0,
        layer.bias_HP.stride(0),
        *layer.q_THD.stride()[:2],
        *layer.k_TKD.stride()[:2],
        BM=tile.queries,
        BN=tile.keys,
        PRECISION=tile.precision,
        **_constants(layer.q_THD, layer.k_TKD, layer.window, layer.softcap),
        **options,
    )


def row_lse(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    lengths: tuple[int, ...],
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Row log-sum-exp [H, T] in nats of packed causal attention, where the attention kernel gave none."""
    total, heads, head = q_THD.shape
    size, keys = (16, 16) if interpreting() or head > 128 else (64, 32)
    spans = torch.from_numpy(query_blocks(lengths, size)).to(q_THD.device)
    lse_HT = torch.empty(heads, total, device=q_THD.device)
    _row_lse[(heads, len(spans))](
        q_THD,
        k_TKD,
        spans,
        lse_HT,
        scale * LOG2E,
        softcap or 1.0,
        window or 0,
        total,
        *q_THD.stride()[:2],
        *k_TKD.stride()[:2],
        BM=size,
        BN=keys,
        PRECISION="ieee",
        **_constants(q_THD, k_TKD, window, softcap),
        num_warps=4,
        num_stages=2,
    )
    return lse_HT


def _known() -> dict[str, Any]:
    """The measured tiles on disk; a file that is missing or broken knows none."""
    try:
        known = json.loads(cache_file().read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _remembered(key: str) -> Tile | None:
    entry = _known().get(key)
    return Tile(**entry) if entry and set(entry) == {f.name for f in fields(Tile)} else None


def _remember(key: str, tile: Tile) -> None:
    path = cache_file()
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(_known() | {key: asdict(tile)}, indent=1, sort_keys=True))
        partial.replace(path)  # whole or not at all: several processes may measure at once
    except OSError as error:
        warnings.warn(f"the measured tile of the FCI kernel is kept for this process only: {error}", stacklevel=2)
