"""What an iteration of AttnRL costs on 8 to 512 GPUs, by arithmetic from measured single-GPU numbers. Prints markdown.

    python benchmarks/scale.py

Three tables: servers and ranks take turns on the same GPUs (schedule one_step_off_policy), servers have GPUs of
their own (schedule overlapped, engine.verl.server_gpus) at the best split of each size, and what was measured on one.

Nothing here was run on several GPUs. Measured (docs/performance.md, H200): the time of a scoring forward with FCI. From
data sheets: memory, its bandwidth and links. Assumed: the last four numbers of `Machine`, and all of `Work`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SIZES = (8, 16, 64, 256, 512)


@dataclass(frozen=True, slots=True)
class Shape:
    """A Qwen2 shape. `forward_s`: measured seconds of a scoring forward with FCI over 8,192 tokens on one GPU."""

    name: str
    weights: float
    width: int
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
    memory_share: float = 0.9  # assumed: part of the memory that can be filled


@dataclass(frozen=True, slots=True)
class Work:
    """An iteration: preset attnrl_1p5b with full trees and responses of 4,000 tokens on average."""

    trunks: int = 64 * 6
    branches: int = 64 * 6 * 4
    tokens: int = 4000  # of a response
    branch_share: float = 0.5  # of a response that a branch draws
    longest: int = 8192
    longest_branch: int = 4096  # half of the longest response, as a branch draws half of one
    prompts: int = 64
    prompt: int = 150
    updates: int = 2
    microbatch: int = 16384

    @property
    def generated(self) -> float:
        return self.trunks * self.tokens + self.branches * self.tokens * self.branch_share

    @property
    def learned(self) -> float:
        """Tokens the learner runs over: prefixes once."""
        return self.generated + self.prompts * self.prompt


SHAPES = (
    Shape("1.5B", 1.54e9, 1536, 28, 2 * 2 * 128, 0.0872, 1),
    Shape("7B", 7.6e9, 3584, 28, 2 * 4 * 128, 0.2775, 1),
    Shape("32B", 32.8e9, 5120, 64, 2 * 8 * 128, 0.2775 * 32.8 / 7.6, 4),  # no measurement: the 7B's FLOP/s
)


@dataclass(frozen=True, slots=True)
class Measured:
    """An iteration of a run over verl on one H200 (docs/cluster.md, commit e647cfc): its work, seconds and GB."""

    iteration: int
    work: Work
    generate: float
    score: float
    update: float
    memory: float


def _eight_prompts(trunks: int, rollouts: int, drawn: int) -> Work:
    """8 prompts, responses of 2,048 tokens that all end at the limit; points lie early, so branches are long."""
    branches = rollouts - trunks
    share = (drawn / 2048 - trunks) / branches
    return Work(trunks, branches, 2048, share, longest=2048, longest_branch=2048, prompts=8, prompt=101)


ONE_GPU = Shape("1.5B, untied", 1.78e9, 1536, 28, 2 * 2 * 128, 0.0872, 1)
MEASURED = (
    Measured(2, _eight_prompts(48, 192, 383_496), 17.5, 0.97, 22.0, 35.6),
    Measured(3, _eight_prompts(54, 174, 345_796), 16.9, 1.09, 18.8, 35.6),
)


@dataclass(frozen=True, slots=True)
class Drawn:
    """Seconds from the start of generation: until branches are there, until all is, and the longest response alone."""

    branches: float
    all: float
    longest: float


def generate_s(shape: Shape, gpus: int, work: Work, machine: Machine) -> Drawn:
    """What servers on so many GPUs take when branches and trunks begin together.

    A step reads the weights once, and the keys and values of every sequence that has a place. Those that have none
    wait for one, trunks behind branches.
    """
    servers = gpus / shape.tensor_parallel
    bandwidth = machine.bandwidth * machine.decode_share * shape.tensor_parallel
    held = (work.prompt + 0.6 * work.tokens) * 2 * shape.kv_width * shape.layers  # bytes of a sequence
    memory = machine.memory_gb * 1e9 * machine.memory_share * shape.tensor_parallel
    sequences = (work.trunks + work.branches) / servers
    places = min(sequences, max(1.0, (memory - 2 * shape.weights) / held))
    step = machine.step_floor_s + (2 * shape.weights + places * held) / bandwidth
    alone = machine.step_floor_s + 2 * shape.weights / bandwidth
    both = work.generated / (work.trunks + work.branches) * sequences / places * step
    branches = work.tokens * work.branch_share * max(1.0, work.branches / servers / places) * step
    longest = work.longest * alone
    return Drawn(max(branches, work.longest_branch * alone), max(both, longest), longest)


def network_s(shape: Shape, gpus: int, work: Work, machine: Machine) -> tuple[float, float]:
    """(seconds of FSDP2's collectives that forwards cannot hide, seconds of one weight sync)."""
    link = (machine.inside if gpus <= 8 else machine.between) * machine.link_share
    gather = 2 * shape.weights * (gpus - 1) / gpus / link  # bfloat16 weights to every GPU
    packs = max(1.0, work.learned / gpus / work.microbatch)
    # actor: gather for forward, again for backward; gradients are reduced in float32; reference: gather for forward
    each = 3 * gather + 2 * gather
    compute = 4 * shape.forward_s * min(work.microbatch, work.learned / gpus) / 8192
    return packs * max(0.0, each - compute), gather


def learn_s(shape: Shape, gpus: int, work: Work, machine: Machine) -> dict[str, float]:
    """Seconds of what ranks on so many GPUs do."""
    forward = shape.forward_s / 8192 / gpus
    network, sync = network_s(shape, gpus, work, machine)
    return {
        "score": work.trunks * (work.tokens + work.prompt) * forward,
        "update": work.learned * forward * 5,  # reference forward, forward, recomputation, backward (twice a forward)
        "network": network,
        "sync": sync,
    }


def memory_gb(shape: Shape, gpus: int, work: Work) -> float:
    """GB a GPU holds while learning. Float32 weights, gradients and two averages, and the reference in bfloat16, are
    sharded; activations are those at layer borders, one layer inside, two gathered layers and 512 MiB of logits."""
    states = 18 * shape.weights / gpus
    activations = work.microbatch * shape.width * 2 * (shape.layers + 34) + 0.54e9 + 4 * shape.weights / shape.layers
    return (states + activations) / 1e9


def in_turn(shape: Shape, gpus: int, work: Work, machine: Machine) -> dict[str, float]:
    """Seconds of an iteration whose servers and ranks take turns on all GPUs, and of its phases."""
    drawn, learned = generate_s(shape, gpus, work, machine), learn_s(shape, gpus, work, machine)
    return {"generate": drawn.all, **learned, "iteration": drawn.all + sum(learned.values()), "longest": drawn.longest}


def overlapped(shape: Shape, servers: int, ranks: int, work: Work, machine: Machine) -> dict[str, float]:
    """Seconds of an iteration of the schedule `overlapped` with so many GPUs for servers and ranks, and of its phases.

    Servers draw branches and the next trunks; ranks update once they have the branches. What both wait for comes
    before, the new weights, and after, scoring the trunks by the policy that was updated.
    """
    drawn, learned = generate_s(shape, servers, work, machine), learn_s(shape, ranks, work, machine)
    _, sync = network_s(shape, servers + ranks, work, machine)
    update = learned["update"] + learned["network"]
    busy = max(drawn.all, drawn.branches + update)
    phases = {"branches": drawn.branches, "all drawn": drawn.all, "update": update, "score": learned["score"]}
    return {**phases, "sync": sync, "iteration": sync + busy + learned["score"]}


def best_split(shape: Shape, gpus: int, work: Work, machine: Machine) -> tuple[int, int] | None:
    """GPUs for servers and for ranks with which the schedule `overlapped` is fastest; None where no ranks fit.

    Servers are whole, and ranks a multiple of a server's GPUs, as verl asks.
    """
    splits = [(n, gpus - n) for n in range(shape.tensor_parallel, gpus, shape.tensor_parallel)]
    most = machine.memory_gb * machine.memory_share
    fitting = [split for split in splits if memory_gb(shape, split[1], work) <= most]
    return min(fitting, key=lambda split: overlapped(shape, *split, work, machine)["iteration"], default=None)


def bottleneck(found: dict[str, float]) -> str:
    names = {"generate": "reading keys and values", "update": "compute of the update", "network": "links of FSDP2"}
    if found["generate"] <= found["longest"] * 1.001 and found["generate"] > found["update"]:
        return "the longest response"
    return names[max(names, key=lambda name: found[name])]


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(
        [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *(f"| {' | '.join(r)} |" for r in rows)]
    )


def tables(work: Work, machine: Machine) -> list[str]:
    """The two tables of docs/scale.md."""
    phases, parts = (
        ("generate", "score", "update", "network", "sync"),
        ("branches", "all drawn", "update", "score", "sync"),
    )
    turns, splits = [], []
    for shape, gpus in ((shape, gpus) for shape in SHAPES for gpus in SIZES):
        found = in_turn(shape, gpus, work, machine)
        cells = [shape.name, str(gpus), *(f"{found[name]:.1f}" for name in phases), f"{found['iteration']:.0f}"]
        speed, memory = work.generated / found["iteration"] / gpus, memory_gb(shape, gpus, work)
        turns.append([*cells, f"{speed:,.0f}", f"{memory:.0f}", bottleneck(found)])
        split = best_split(shape, gpus, work, machine)
        if split is None:
            splits.append([shape.name, str(gpus), "none fits", *("-" for _ in range(len(parts) + 3))])
            continue
        apart = overlapped(shape, *split, work, machine)
        cells = [shape.name, str(gpus), f"{split[0]} + {split[1]}", *(f"{apart[name]:.1f}" for name in parts)]
        gain, memory = found["iteration"] / apart["iteration"], memory_gb(shape, split[1], work)
        splits.append([*cells, f"{apart['iteration']:.0f}", f"{gain:.2f}", f"{memory:.0f}"])
    first = ["shape", "GPUs", *(f"{n} s" for n in phases), "iteration s", "tokens/s a GPU", "memory GB", "slowest"]
    second = [
        "shape",
        "GPUs",
        "servers + ranks",
        *(f"{n} s" for n in parts),
        "iteration s",
        "times faster",
        "memory GB",
    ]
    return [table(first, turns), table(second, splits)]


def against_one_gpu(machine: Machine) -> str:
    """What was measured on one GPU beside what the same arithmetic says of that work."""
    rows = []
    for m in MEASURED:
        found = in_turn(ONE_GPU, 1, m.work, machine) | {"memory": memory_gb(ONE_GPU, 1, m.work)}
        pairs = [(found[name], getattr(m, name)) for name in ("generate", "score", "update", "memory")]
        rows.append([str(m.iteration), *(f"{said:.1f}, {was:.1f}, {was / said:.2f}" for said, was in pairs)])
    return table(["iteration", "generate s", "score s", "update s", "memory GB"], rows)


if __name__ == "__main__":
    print("\n\n".join([*tables(Work(), Machine()), against_one_gpu(Machine())]))
