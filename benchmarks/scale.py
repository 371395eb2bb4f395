"""What an iteration of AttnRL costs on 8 to 512 GPUs, by arithmetic from measured single-GPU numbers. Prints markdown.

    python benchmarks/scale.py [--overlap]

Nothing here was run on a cluster. Measured (docs/performance.md, H200): the time of a scoring forward with FCI. From
data sheets: memory bandwidth and links. Assumed: the last three numbers of `Machine`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """A Qwen2 shape. `forward_s`: measured seconds of a scoring forward with FCI over 8,192 tokens on one GPU."""

    name: str
    weights: float
    layers: int
    kv_width: int  # key and value numbers of a token in a layer
    forward_s: float
    tensor_parallel: int  # GPUs of one server


@dataclass(frozen=True, slots=True)
class Machine:
    """An H200 in a machine of eight, machines joined by 8 x 400 Gb/s."""

    memory_gb: float = 141.0
    bandwidth: float = 4.8e12  # bytes/s of device memory
    inside: float = 450e9  # bytes/s a GPU sends to others of its machine
    between: float = 50e9  # bytes/s a GPU sends to other machines
    decode_share: float = 0.6  # assumed: part of the memory bandwidth that decoding reaches
    link_share: float = 0.7  # assumed: part of a link that collectives reach
    step_floor_s: float = 0.004  # assumed: host time of a decoding step


@dataclass(frozen=True, slots=True)
class Work:
    """An iteration: preset attnrl_1p5b with full trees and responses of 4,000 tokens on average."""

    trunks: int = 64 * 6
    branches: int = 64 * 6 * 4
    tokens: int = 4000  # of a response; a branch draws half of one
    longest: int = 8192
    prompt: int = 150
    updates: int = 2
    microbatch: int = 16384

    @property
    def generated(self) -> float:
        return self.trunks * self.tokens + self.branches * self.tokens / 2

    @property
    def learned(self) -> float:
        """Tokens the learner runs over: prefixes once."""
        return self.generated + 64 * self.prompt


SHAPES = (
    Shape("1.5B", 1.54e9, 28, 2 * 2 * 128, 0.0872, 1),
    Shape("7B", 7.6e9, 28, 2 * 4 * 128, 0.2775, 1),
    Shape("32B", 32.8e9, 64, 2 * 8 * 128, 0.2775 * 32.8 / 7.6, 4),  # no measurement: the 7B's FLOP/s
)


def generate_s(shape: Shape, gpus: int, work: Work, machine: Machine) -> tuple[float, float]:
    """(seconds of generation, seconds that the longest response alone takes).

    A step reads the weights once, and the keys and values of every sequence."""
    servers = gpus / shape.tensor_parallel
    bandwidth = machine.bandwidth * machine.decode_share * shape.tensor_parallel
    sequences = (work.trunks + work.branches) / servers
    context = work.prompt + 0.6 * work.tokens
    reads = 2 * shape.weights + sequences * context * 2 * shape.kv_width * shape.layers
    step = machine.step_floor_s + reads / bandwidth
    alone = work.longest * (machine.step_floor_s + 2 * shape.weights / bandwidth)
    return max(work.generated / servers / max(sequences, 1.0) * step, alone), alone


def network_s(shape: Shape, gpus: int, work: Work, machine: Machine) -> tuple[float, float]:
    """(seconds of FSDP2's collectives that forwards cannot hide, seconds of one weight sync)."""
    link = (machine.inside if gpus <= 8 else machine.between) * machine.link_share
    gather = 2 * shape.weights * (gpus - 1) / gpus / link  # bfloat16 weights to every GPU
    packs = max(1.0, work.learned / gpus / work.microbatch)
    # actor: gather for forward, again for backward; gradients are reduced in float32; reference: gather for forward
    each = 3 * gather + 2 * gather
    compute = 4 * shape.forward_s * min(work.microbatch, work.learned / gpus) / 8192
    return packs * max(0.0, each - compute), gather


def iteration(shape: Shape, gpus: int, work: Work, machine: Machine) -> dict[str, float]:
    """Seconds of each phase."""
    generate, alone = generate_s(shape, gpus, work, machine)
    score = work.trunks * (work.tokens + work.prompt) / gpus / 8192 * shape.forward_s
    # reference forward, forward, recomputation, backward (twice a forward)
    update = work.learned / gpus / 8192 * shape.forward_s * 5
    network, sync = network_s(shape, gpus, work, machine)
    return {"generate": generate, "score": score, "update": update, "network": network, "sync": sync, "longest": alone}


def memory_gb(shape: Shape, gpus: int, work: Work) -> float:
    """GB a GPU holds while learning. Float32 weights, gradients and two averages, and the reference in bfloat16, are
    sharded; activations are those at layer borders, one layer inside, two gathered layers and 512 MiB of logits."""
    width = {"1.5B": 1536, "7B": 3584, "32B": 5120}[shape.name]
    states = 18 * shape.weights / gpus
    activations = work.microbatch * width * 2 * (shape.layers + 34) + 0.54e9 + 4 * shape.weights / shape.layers
    return (states + activations) / 1e9


def bottleneck(found: dict[str, float]) -> str:
    names = {"generate": "reading keys and values", "update": "compute of the update", "network": "links of FSDP2"}
    if found["generate"] <= found["longest"] * 1.001 and found["generate"] > found["update"]:
        return "the longest response"
    return names[max(names, key=lambda name: found[name])]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--overlap", action="store_true", help="half of the GPUs generate while the others learn")
    overlap = parser.parse_args().overlap
    work, machine = Work(), Machine()
    phases = ("generate", "score", "update", "network", "sync")
    columns = (
        "shape",
        "GPUs",
        *(f"{name} s" for name in phases),
        "iteration s",
        "tokens/s a GPU",
        "memory GB",
        "slowest",
    )
    print(f"| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|")
    for shape in SHAPES:
        for gpus in (8, 16, 64, 256, 512):
            half = gpus // 2 if overlap else gpus
            found = iteration(shape, half, work, machine)
            learn = found["score"] + found["update"] + found["network"]
            both = max(found["generate"], learn) if overlap else found["generate"] + learn
            total = both + found["sync"]
            cells = [shape.name, str(gpus), *(f"{found[name]:.1f}" for name in phases), f"{total:.0f}"]
            cells += [f"{work.generated / total / gpus:,.0f}", f"{memory_gb(shape, half, work):.0f}", bottleneck(found)]
            print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
