"""An interpreter of the PTX that CuTe DSL makes of gemm_silu: what a GPU would compute, on a CPU, one block after another.

Warps take turns in random order between barriers, and an asynchronous copy lands at a random one of the two extremes, at once or when it
is waited for, so that a missing wait or barrier shows in the results. Shared memory starts as NaN. Whatever lies outside of the given
buffers raises. Instructions it does not know raise AttributeError; it knows those that occur (PTX ISA 8.8), and mma and ldmatrix by the
manual's figures of fragments.
"""

import operator
import re
from collections import defaultdict

import numpy as np

LANES = np.arange(32)
SHARED = 1024  # where dynamic shared memory begins
_INSTRUCTION = re.compile(r"(?:@(!?)(%p\d+) )?([a-z][\w.:]*) ?(.*)")
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")
_COMPARE = {name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")}
_COMPUTE = {
    "mov": lambda value: value,
    "neg": operator.neg,
    "not": operator.invert,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "shl": operator.lshift,
    "shr": operator.rshift,
    "add": operator.add,
    "sub": operator.sub,
    "mad": lambda a, b, c: a * b + c,
    "ex2": np.exp2,
    "rcp": np.reciprocal,
}


def run(ptx, grid, threads, buffers, scalars=(), seed=0):
    """Runs every block of `grid` (x, y). `buffers`: address -> bytes; `scalars`: value of each parameter's bytes, by (index, offset)."""
    program, labels = _parse(ptx)
    random = np.random.default_rng(seed)
    for y in range(grid[1]):
        for x in range(grid[0]):
            shared = np.full(2**17, 0xFF, np.uint8)
            warps = [_Warp(program, labels, index, (x, y), shared, buffers, dict(scalars), random) for index in range(threads // 32)]
            _take_turns(warps, random)


def _take_turns(warps, random):
    running = {index: warp.steps() for index, warp in enumerate(warps)}
    while running:
        waiting = set()
        while len(waiting) < len(running):
            index = random.choice([each for each in running if each not in waiting])
            event = next(running[index], "end")
            if event == "end":
                assert not waiting, "a warp ended while others wait at a barrier"
                del running[index]
            elif event == "barrier":
                waiting.add(index)


def _parse(ptx):
    body = ptx[ptx.index("{", ptx.index(".reqntid")) + 1 : ptx.rindex("}")]
    program, labels = [], {}
    for statement in re.sub(r"\s+", " ", re.sub(r"//.*|(\$\w+:)", r"\1;", body)).split(";"):
        if match := re.fullmatch(r" ?(\$\w+):", statement):
            labels[match[1]] = len(program)
        elif statement.strip() and not statement.strip().startswith("."):
            negated, guard, name, rest = _INSTRUCTION.fullmatch(statement.strip()).groups()
            program.append(((guard, bool(negated)), name.split("."), _OPERAND.findall(rest)))
    return program, labels


class _Warp:
    def __init__(self, program, labels, index, block, shared, buffers, parameters, random):
        self.program, self.labels, self.shared, self.buffers, self.parameters = program, labels, shared, buffers, parameters
        self.random = random
        self.registers = defaultdict(lambda: np.zeros(32, np.uint64))
        self.special = {"%tid.x": LANES + 32 * index, "%ctaid.x": block[0] + 0 * LANES, "%ctaid.y": block[1] + 0 * LANES}
        self.groups, self.open = [], []
        self.active = np.ones(32, bool)
        self.asleep = defaultdict(lambda: np.zeros(32, bool))  # where lanes that branched ahead wait for the others

    def steps(self):
        at = 0
        while at < len(self.program):
            self.active |= self.asleep.pop(at, np.zeros(32, bool))
            (guard, negated), name, operands = self.program[at]
            where = self.active & ((self.registers[guard] == 0) if negated else (self.registers[guard] != 0)) if guard else self.active
            at += 1
            if name[0] == "ret":
                return
            if name[0] == "bra":
                at = self.branch(self.labels[operands[0]], where, at)
            elif name[0] in {"bar", "barrier"}:
                assert self.active.all()
                yield "barrier"
            else:
                with np.errstate(all="ignore"):
                    self.execute(name[0], name[1:], operands, where)
                if name[0] in {"cp", "st", "ld", "ldmatrix"}:
                    yield "step"

    def execute(self, operation, name, operands, where):
        if operation in _COMPUTE:
            self.compute(_COMPUTE[operation], name, operands, where)
        else:
            getattr(self, "op_" + operation)(name, operands, where)

    def branch(self, target, where, at):
        if (where == self.active).all():
            return target
        if where.any():
            assert target > at, "lanes that part must meet further on"
            self.asleep[target] |= where
            self.active = self.active & ~where
        return at

    def read(self, operand, kind="b32"):
        """An operand's values as numpy's type for PTX's `kind`."""
        width = int(re.sub(r"\D", "", kind) or 1)
        if operand in self.special:
            values = self.special[operand].astype(np.uint64)
        elif operand.startswith("%"):
            values = self.registers[operand]
        elif operand.startswith("__dynamic_shmem__"):
            values = np.full(32, SHARED, np.uint64)
        elif operand.startswith("0f"):
            values = np.full(32, int("0x" + operand[2:], 0), np.uint64)
        else:
            values = np.full(32, int(operand) % 2**64, np.uint64)
        if kind == "pred":
            return values != 0
        return values.astype(f"u{width // 8}").view(f"{ {'s': 'i', 'f': 'f'}.get(kind[0], 'u') }{width // 8}")

    def write(self, register, values, where):
        bits = values if values.dtype == bool else values.view(f"u{values.itemsize}")
        self.registers[register] = np.where(where, bits.astype(np.uint64), self.registers[register])

    def compute(self, function, name, operands, where):
        self.write(operands[0], function(*(self.read(operand, name[-1]) for operand in operands[1:])), where)

    def op_mul(self, name, operands, where):
        if name[0] == "wide":
            a, b = (self.read(operand, name[1]).astype(np.int64) for operand in operands[1:])
            self.write(operands[0], a * b, where)
        else:
            self.compute(operator.mul, name, operands, where)

    def op_selp(self, name, operands, where):
        a, b = (self.read(operand, name[-1]) for operand in operands[1:3])
        self.write(operands[0], np.where(self.read(operands[3], "pred"), a, b), where)

    def op_setp(self, name, operands, where):
        self.compute(_COMPARE[name[0]], name, operands, where)

    def op_cvt(self, name, operands, where):
        if name[1] in {"f16x2", "bf16x2"}:
            high, low = (_narrowed(self.read(operand, "f32"), name[1]).astype(np.uint32) for operand in operands[1:])
            self.write(operands[0], high << 16 | low, where)
        else:
            self.write(
                operands[0], self.read(operands[1], name[1]).astype(name[0].replace("s", "i")[0] + str(int(name[0][1:]) // 8)), where
            )

    def op_shfl(self, name, operands, where):
        values, source = self.read(operands[1]), self.read(operands[2])
        self.write(operands[0].split("|")[0], values[source % 32], where)

    def op_ld(self, name, operands, where):
        if name[0] == "param":
            index, offset = re.fullmatch(r"\[\w+_param_(\d+)(?:\+(\d+))?\]", operands[1]).groups()
            self.write(operands[0], np.full(32, self.parameters[int(index), int(offset or 0)], np.uint64), where)
        else:
            targets, size = operands[0].strip("{}").split(", "), int(name[-1][1:]) // 8
            data = self.load(name[0], self.address(operands[1], name[0]), size * len(targets), where)
            for target, values in zip(targets, data.view(f"u{size}").T, strict=True):
                self.write(target, values, where)

    def op_st(self, name, operands, where):
        kind = name[-1]
        data = np.stack([self.read(value, kind) for value in operands[1].strip("{}").split(", ")], 1).copy().view(np.uint8)
        self.store(name[0], self.address(operands[0], name[0]), data, where)

    def op_cp(self, name, operands, where):
        if name[1] == "commit_group":
            self.groups.append(self.open)
            self.open = []
        elif name[1] == "wait_group":
            while len(self.groups) > int(operands[0]):
                for landing in self.groups.pop(0):
                    landing()
        else:
            self.fetch(operands, where.copy())

    def fetch(self, operands, where):
        target, source, size = self.address(operands[0], "shared"), self.address(operands[1], "global"), int(operands[2])
        taken = self.read(operands[3]) if len(operands) > 3 else np.full(32, size, np.uint32)
        assert np.isin(taken, (0, size)).all()

        def land():
            data = self.load("global", source, size, where & (taken > 0))
            self.store("shared", target, np.where(taken[:, None] > 0, data, 0).astype(np.uint8), where)

        if self.random.integers(2):
            land()
        else:
            self.open.append(land)

    def op_ldmatrix(self, name, operands, where):
        assert where.all()
        targets = operands[0].strip("{}").split(", ")
        rows = self.load("shared", self.address(operands[1], "shared"), 16, where).view(np.uint16).reshape(4, 8, 8)
        for target, matrix in zip(targets, rows.swapaxes(1, 2) if "trans" in name else rows, strict=True):
            self.write(target, matrix.reshape(32, 2).copy().view(np.uint32)[:, 0], where)

    def op_mma(self, name, operands, where):
        assert where.all()
        assert name[2] == "m16n8k16"
        d, a, b, c = (operand.strip("{}").split(", ") for operand in operands)
        a0, a1, a2, a3 = (self.pairs(register, name[6]) for register in a)
        left = np.concatenate([np.concatenate([a0, a2], 1), np.concatenate([a1, a3], 1)], 0)
        right = np.concatenate([self.pairs(register, name[7]) for register in b], 1)
        sums = (left @ right.T).reshape(2, 8, 4, 2)
        for index, (target, addend) in enumerate(zip(d, c, strict=True)):
            self.write(target, sums[index // 2, :, :, index % 2].reshape(32) + self.read(addend, "f32"), where)

    def pairs(self, register, kind):
        """A fragment's register as the (8, 8) matrix that the warp holds in it."""
        halves = self.read(register).view(np.uint16)
        return (halves.view(np.float16).astype(np.float32) if kind == "f16" else _widened(halves)).reshape(8, 8)

    def address(self, operand, space):
        register, offset = re.fullmatch(r"\[([%\w]+)(?:\+(-?\d+))?\]", operand).groups()
        kind = "u32" if space == "shared" else "u64"
        return self.read(register, kind).astype(np.int64) + int(offset or 0)

    def load(self, space, addresses, size, where):
        out = np.zeros((32, size), np.uint8)
        for lane in np.flatnonzero(where):
            out[lane] = self.bytes(space, int(addresses[lane]), size)
        return out

    def store(self, space, addresses, data, where):
        for lane in np.flatnonzero(where):
            self.bytes(space, int(addresses[lane]), data.shape[1])[:] = data[lane]

    def bytes(self, space, address, size):
        assert address % size == 0, f"{space} address {address} is not aligned to {size}"
        buffers = {SHARED: self.shared} if space == "shared" else self.buffers
        for start, buffer in buffers.items():
            if start <= address and address + size <= start + len(buffer):
                return buffer[address - start : address - start + size]
        raise AssertionError(f"{size} bytes at {address} of {space} memory lie outside of every buffer")


def _widened(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _narrowed(values, kind):
    if kind == "f16x2":
        return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
