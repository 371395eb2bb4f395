"""Runs the source of a Gluon kernel on a CPU, for which Triton has no interpreter.

Partitions are threads; copies arrive late and in any order; products read their operands when they are waited for, the
latest moment they may; barriers count arrivals and bytes as the hardware's do, and a wait that never ends is an error.
Memory that was not written is NaN. Not emulated: fences, swizzles, registers, what one warp sees of another.
"""

# mypy: ignore-errors

from __future__ import annotations

import math
import random
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import torch
import triton.experimental

LIMIT = 60.0  # seconds of a wait; a deadlock is one that nothing ends
local = threading.local()


class Tile(torch.Tensor):
    type = types.SimpleNamespace(layout=None)


def tile(x):
    return x.as_subclass(Tile)


class Int(int):
    """A scalar of the kernel."""

    def to(self, dtype):
        return self


def _lift(name):
    plain = getattr(int, name)

    def op(self, other):
        if isinstance(other, torch.Tensor):
            return NotImplemented
        out = plain(self, other)
        return out if out is NotImplemented else Int(out)

    return op


for name in ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "mod", "and", "xor", "lt", "gt", "le", "ge"):
    setattr(Int, f"__{name}__", _lift(f"__{name}__"))


class Const(int):
    def __new__(cls, x):
        return x if isinstance(x, float) else super().__new__(cls, x)

    @property
    def value(self):
        return int(self)


class Pointer:
    def __init__(self, data, at=0):
        self.data, self.at = data, at

    def __add__(self, other):
        return Pointer(self.data, self.at + other)

    @property
    def dtype(self):
        return types.SimpleNamespace(element_ty=self.data.dtype)

    def _flat(self):
        return self.data.as_strided((self.data.untyped_storage().nbytes() // self.data.element_size(),), (1,), 0)


def load(p, mask=True, other=0):
    if isinstance(p.at, torch.Tensor):
        mask = torch.as_tensor(mask).expand(p.at.shape)
        return tile(torch.where(mask, p._flat()[torch.where(mask, p.at, 0)], other))
    return Int(p._flat()[p.at]) if mask else Int(other)


def store(p, x, mask):
    mask = mask.expand(x.shape)
    p._flat()[p.at[mask]] = x[mask].to(p.data.dtype)


class Barrier:
    def __init__(self):
        self.count = None

    def start(self, count):
        self.count = self.pending = count
        self.bytes, self.phase = 0, 0

    def change(self, arrivals=0, bytes=0):
        with local.program.moved:
            self.pending -= arrivals
            self.bytes += bytes
            assert self.pending >= 0, "more arrivals than the barrier counts"
            if self.pending == 0 and self.bytes == 0:
                self.phase += 1
                self.pending = self.count
                local.program.moved.notify_all()

    def wait(self, parity):
        with local.program.moved:
            if not local.program.moved.wait_for(lambda: self.phase & 1 != parity or local.program.dead, LIMIT):
                local.program.dead = True
                local.program.moved.notify_all()
                raise RuntimeError(f"deadlock: {local.name} waits for parity {parity} at phase {self.phase}")
            if local.program.dead:
                raise RuntimeError("another partition failed")


class Shared:
    """Elements in shared memory, as the copy engine lays them out: columns in panels of 64, rows inside a panel."""

    def __init__(self, data, at, shape, dtype, layout, turned=False):
        self.data, self.at, self.shape, self.dtype, self.layout, self.turned = (
            data,
            at,
            list(shape),
            dtype,
            layout,
            turned,
        )

    def index(self, i):
        assert 0 <= i < self.shape[0], "out of the ring"
        return Shared(self.data, self.at + int(i) * math.prod(self.shape[1:]), self.shape[1:], self.dtype, self.layout)

    def permute(self, order):
        assert order == (1, 0)
        return Shared(self.data, self.at, self.shape, self.dtype, self.layout, True)

    def reinterpret(self, dtype, shape, layout):
        assert math.prod(shape) == math.prod(self.shape)
        return Shared(self.data, self.at, shape, dtype, layout)

    def _places(self):
        rows, columns = self.shape
        wide = min(columns, 64)
        r, c = torch.arange(rows)[:, None], torch.arange(columns)[None]
        return self.at + c // wide * (rows * wide) + r * wide + c % wide

    def load(self, layout=None):
        x = self.data[self._places()].to(self.dtype)
        return tile(x.T if self.turned else x)

    def store(self, x):
        self.data[self._places()] = x.float()


class Ring:
    def __init__(self, n):
        self.barriers = [Barrier() for _ in range(n)]

    def index(self, i):
        assert 0 <= i < len(self.barriers)
        return self.barriers[i]


class MBarrierLayout:
    pass


class Descriptor:
    def __init__(self, base, shape, strides, block_shape, layout):
        assert (base.data_ptr() % 16, strides[-1], strides[0] * base.element_size() % 16) == (0, 1, 0)
        self.base, self.shape, self.strides, self.layout, self.dtype = base, shape, strides, layout, base.dtype
        self.block_type = types.SimpleNamespace(shape=[Const(n) for n in block_shape])


def async_load(source, at, barrier, target):
    block = [int(n) for n in source.block_type.shape]
    assert block == [int(n) for n in target.shape], (block, target.shape)
    assert int(at[1]) * source.base.element_size() % 16 == 0, "the copy engine would stop the kernel"

    def copy():
        flat = Pointer(source.base)._flat()
        r = int(at[0]) + torch.arange(block[0])[:, None]
        c = int(at[1]) + torch.arange(block[1])[None]
        inside = (r >= 0) & (r < source.shape[0]) & (c >= 0) & (c < source.shape[1])
        place = source.base.storage_offset() + r * source.strides[0] + c
        x = flat[torch.where(inside, place, 0)]
        target.store(torch.where(inside, x, torch.zeros_like(x)))
        barrier.change(bytes=-block[0] * block[1] * source.base.element_size())

    program = local.program
    with program.moved:
        program.copies.append(copy)


def async_store(target, at, source):
    """A copy to global memory that reads `source` some time later, until `store_wait`."""
    block = [int(n) for n in target.block_type.shape]
    assert block == [int(n) for n in source.shape], (block, source.shape)
    done = threading.Event()

    def copy():
        r = int(at[0]) + torch.arange(block[0])[:, None]
        c = int(at[1]) + torch.arange(block[1])[None]
        inside = (r >= 0) & (r < target.shape[0]) & (c >= 0) & (c < target.shape[1])
        place = target.base.storage_offset() + r * target.strides[0] + c
        Pointer(target.base)._flat()[place[inside]] = source.load()[inside].as_subclass(torch.Tensor)
        done.set()

    local.sends.append(done)
    with local.program.moved:
        local.program.copies.append(copy)


def store_wait(pendings):
    assert pendings == 0
    while local.sends:
        assert local.sends.pop().wait(LIMIT), "a copy that never ends"


def engine(program):
    """The copy engine: any copy that was asked for, some time later."""
    local.program, local.name = program, "copies"
    while not program.over:
        with program.moved:
            copy = program.copies.pop(random.randrange(len(program.copies))) if program.copies else None
        if copy is None or random.random() < 0.2:
            time.sleep(random.random() * 0.002)
        if copy is not None:
            copy()


class Product:
    def __init__(self, a, b, acc, use_acc):
        self.operands, self.value = (a, b, acc, use_acc), None

    def finish(self):
        a, b, acc, use_acc = self.operands
        a, b = (x.load() if isinstance(x, Shared) else x for x in (a, b))
        acc = acc.value if isinstance(acc, Product) else acc
        self.value = tile(a.float() @ b.float() + (acc if use_acc else 0.0))


def warpgroup_mma(a, b, acc, use_acc=True, is_async=False):
    assert is_async
    product = Product(a, b, acc, use_acc)
    local.products.append(product)
    return product


def warpgroup_mma_wait(outstanding, deps):
    while len(local.products) > outstanding:
        local.products.pop(0).finish()
    # One that is still on its way stays a product: more may be added to it, and nothing else can be done with it.
    out = [d.value if isinstance(d, Product) and d.value is not None else d for d in deps]
    return out[0] if len(out) == 1 else tuple(out)


def warp_specialize(parts, warps, registers):
    program = local.program

    def partition(i, function, arguments):
        local.program, local.name, local.products, local.sends = program, f"partition {i}", [], []
        whole = False
        try:
            function(*arguments)
            assert not local.products, "a product nobody waited for"
            assert not local.sends, "a copy that may outlive the program"
            whole = True
        finally:
            if not whole:
                with program.moved:
                    program.dead = True
                    program.moved.notify_all()

    with ThreadPoolExecutor(len(parts)) as pool:
        running = [pool.submit(partition, i, *part) for i, part in enumerate(parts)]
    errors = [error for error in (future.exception() for future in running) if error is not None]
    if errors:
        raise min(errors, key=lambda error: "another partition" in str(error))


class Kernel:
    def __init__(self, function):
        self.function = function

    def __call__(self, *args, **kw):
        return self.function(*args, **kw)

    def __getitem__(self, grid):
        def start(*args, num_warps, **kw):
            args = [
                Pointer(a, a.storage_offset()) if isinstance(a, torch.Tensor) else Int(a) if isinstance(a, int) else a
                for a in args
            ]
            grid3 = (*grid, 1, 1)
            for y in range(grid3[1]):
                for x in range(grid3[0]):
                    program = types.SimpleNamespace(
                        id=(Int(x), Int(y)),
                        grid=tuple(Int(n) for n in grid3),
                        moved=threading.Condition(),
                        copies=[],
                        over=False,
                        dead=False,
                    )
                    local.program, local.name, local.products = program, "whole", []
                    copier = threading.Thread(target=engine, args=(program,))
                    copier.start()
                    try:
                        self.function(*args, **kw)
                        assert not program.copies, "the program ends before its copies"
                    finally:
                        program.over = True
                        copier.join()

        return start


def jit(function=None, **options):
    return Kernel(function) if function else Kernel


def allocate_shared_memory(dtype, shape, layout):
    if isinstance(layout, MBarrierLayout):
        return Ring(shape[0])
    shape = [Const(n) for n in shape]
    return Shared(torch.full((math.prod(shape),), torch.nan), 0, shape, dtype, layout)


def pick(kind):
    plain = {"maximum": max, "minimum": min}[kind]
    return lambda x, y: getattr(torch, kind)(x, y) if isinstance(x, torch.Tensor) else Int(plain(x, y))


def anything(*a, **k):
    return None


def install() -> None:
    """Put this module's stand-ins where kernels import Gluon from; for the whole process."""
    triton.runtime.jit.mangle_type(0)  # at its first use Triton looks up what is put aside here
    gl = {
        "constexpr": Const,
        "static_range": range,
        "load": load,
        "store": store,
        "program_id": lambda i: local.program.id[i],
        "num_programs": lambda i: local.program.grid[i],
        "cdiv": lambda a, b: Int(-(-a // b)),
        "multiple_of": lambda x, n: x,
        "arange": lambda a, b, layout=None: tile(torch.arange(a, b)),
        "SliceLayout": anything,
        "BlockedLayout": anything,
        "NVMMADistributedLayout": anything,
        "DotOperandLayout": anything,
        "NVMMASharedLayout": anything,
        "zeros": lambda shape, dtype, layout: tile(torch.zeros([int(n) for n in shape])),
        "full": lambda shape, x, dtype, layout: tile(torch.full([int(n) for n in shape], x)),
        "zeros_like": torch.zeros_like,
        "sum": lambda x, axis: x.sum(axis),
        "max": lambda x, axis: x.amax(axis),
        "reshape": lambda x, shape: x.reshape([int(n) for n in shape]),
        "exp2": torch.exp2,
        "exp": torch.exp,
        "log2": torch.log2,
        "permute": lambda x, order: x.permute(order),
        "split": lambda x: (x[..., 0], x[..., 1]),
        "where": torch.where,
        "convert_layout": lambda x, layout: x,
        "maximum": pick("maximum"),
        "minimum": pick("minimum"),
        "shared_memory_descriptor": Shared,
        "barrier": anything,
        "allocate_shared_memory": allocate_shared_memory,
        "warp_specialize": warp_specialize,
        "float32": torch.float32,
        "int64": torch.int64,
        "int32": torch.int32,
    }
    mbarrier = types.SimpleNamespace(
        MBarrierLayout=MBarrierLayout,
        init=lambda b, count: b.start(count),
        arrive=lambda b, pred=True: b.change(arrivals=1) if pred else None,
        expect=lambda b, n: b.change(arrivals=1, bytes=int(n)),
        wait=lambda b, parity: b.wait(parity),
    )
    hopper = {
        "fence_async_shared": anything,
        "mbarrier": mbarrier,
        "tma": types.SimpleNamespace(async_load=async_load, async_store=async_store, store_wait=store_wait),
        "warpgroup_mma": warpgroup_mma,
        "warpgroup_mma_wait": warpgroup_mma_wait,
    }
    root = "triton.experimental.gluon"
    contents = {
        "": {"jit": jit},
        ".language": gl,
        ".language.nvidia": {},
        ".language.nvidia.hopper": hopper,
        ".nvidia": {},
        ".nvidia.hopper": {"TensorDescriptor": Descriptor},
    }
    for name, held in contents.items():
        sys.modules[root + name] = types.ModuleType(root + name)
        vars(sys.modules[root + name]).update(held)
    triton.experimental.gluon = sys.modules[root]
    triton.experimental.gluon.language = sys.modules[f"{root}.language"]
