"""Addresses in memory and indices, for one lane or for all lanes of a vector."""

from __future__ import annotations

from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.codegen.llvm.emitter import Function, Reg, listed, number, vector, width_of
from treadle.codegen.llvm.float8 import float8_bits, float8_value
from treadle.codegen.llvm.halves import half_bits, half_value
from treadle.codegen.llvm.module import Module
from treadle.codegen.llvm.scalars import Scalars, register_element
from treadle.kernel.index import (
    Atom,
    Bounded,
    Data,
    Index,
    Quotient,
    Remainder,
    Var,
    data_locals,
    uses,
)


def memory_element(dtype: DType) -> str:
    """The element type in memory."""
    names = {"bool": "i8", "bfloat16": "i16", "float16": "i16"}
    names |= {d.name: "i8" for d in dtypes.FLOAT8}
    return names.get(dtype.name, register_element(dtype))


class Addresses:
    """Where a function is: loop variables, locals, and the variable that lanes count."""

    def __init__(
        self, function: Function, module: Module, pointers: dict[str, Reg], types: dict[str, DType]
    ):
        self.f, self.module, self.pointers, self.types = function, module, pointers, types
        self.scalars = Scalars(function, module.elementary, module.machine)
        self.variables: dict[Var, Reg] = {}  # the first lane's value
        self.lanes: Var | None = None  # the variable that lanes count
        self.width = 1
        self.is_aligned = False  # whether the first lane is a multiple of the width
        self.locals: dict[str, Reg] = {}
        self.shared: dict[str, Reg] = {}  # those on which all lanes agree, as one number
        self.private: dict[str, int] = {}  # buffers of which every lane has its own
        # Private elements of all lanes lie beside each other: of how many, and which is meant.
        self.apart, self.lane = 1, 0

    def load(self, buffer: str, index: Index, dtype: DType) -> Reg:
        step = self.lane_step(buffer, index)
        if self.lanes is None or step == 1:
            return self.loaded(self.address(buffer, index), dtype, self.width)
        if step == 0:
            scalar = self.loaded(self.address(buffer, index), dtype, 1)
            return self.f.splat(scalar, self.width)
        if step == 2:
            return self._every_other(buffer, index, dtype)
        repeats = 0 if buffer in self.private else self._repeats(index)
        if repeats:
            return self._repeated(buffer, index, dtype, repeats)

        def element(lane: int) -> Reg:
            return self.loaded(self.address(buffer, index, lane), dtype, 1)

        return self.f.by_lane(vector(register_element(dtype), self.width), element)

    def lane_step(self, buffer: str, index: Index) -> int | None:
        """How far apart two lanes' elements are; None where that is no one number."""
        if self.lanes is None:
            return 0
        step = None if self._has_lane_data(index) else index.factor_of(self.lanes)
        if buffer in self.private:
            return 1 if step == 0 else None
        return step

    def _every_other(self, buffer: str, index: Index, dtype: DType) -> Reg:
        """Every second element: two loads that end at the last of them, and a shuffle."""
        width = self.width
        first, second = (
            self.loaded(self.address(buffer, index + start), dtype, width)
            for start in (0, width - 1)
        )
        chosen = [2 * i if i < width // 2 else 2 * i + 1 for i in range(width)]
        return self.f.shuffle(first, second, chosen)

    def _repeats(self, index: Index) -> int:
        """How many lanes in a row have one element, where lanes are divided by that; else 0."""
        assert self.lanes is not None
        moving = [(atom, factor) for atom, factor in index.terms if uses(atom, self.lanes)]
        match moving:
            case [(Quotient() as atom, 1)] if self._is_aligned(atom):
                return 0 if self._has_lane_data(index) else atom.divisor
            case _:
                return 0

    def _repeated(self, buffer: str, index: Index, dtype: DType, repeats: int) -> Reg:
        few = self.width // repeats
        part = self.loaded(self.address(buffer, index), dtype, few)
        if few == 1:
            return self.f.splat(part, self.width)
        return self.f.shuffle(part, part, [i // repeats for i in range(self.width)])

    def _is_aligned(self, atom: Quotient | Remainder) -> bool:
        """Whether lanes of a quotient or remainder follow the same pattern in every vector."""
        assert self.lanes is not None
        divisor, inner = atom.divisor, atom.index
        if not self.is_aligned or self.width % divisor or inner.offset % divisor:
            return False
        return all(
            f == 1 if a == self.lanes else f % divisor == 0 and not uses(a, self.lanes)
            for a, f in inner.terms
        )

    def _has_lane_data(self, index: Index) -> bool:
        """Whether the index uses a local that differs from lane to lane."""
        names = [n for n in data_locals(index) if n not in self.shared]
        return any(width_of(self.locals[name].type) > 1 for name in names)

    def address(self, buffer: str, index: Index, lane: int = 0) -> Reg:
        """Of one lane's element."""
        at = self.index(index, lane)
        if buffer in self.private and self.apart > 1:
            at = self.f.binary("mul", at, self.apart)
            at = self.f.binary("add", at, self.lane + lane)
        return self.f.offset(self.pointers[buffer], at, memory_element(self.types[buffer]))

    def loaded(self, address: Reg, dtype: DType, width: int) -> Reg:
        f = self.f
        memory = vector(memory_element(dtype), width)
        found = f.load(memory, address, dtype.itemsize)
        if dtype is dtypes.bool_:
            return f.compare("icmp ne", found, 0)
        if dtype is dtypes.float16:
            return half_value(f, found, self.module.machine.has_half)
        if dtype in dtypes.FLOAT8:
            return float8_value(f, found, dtype)
        if dtype is dtypes.bfloat16:
            wide = f.convert("zext", found, vector("i32", width))
            shifted = f.binary("shl", wide, 16)
            return f.convert("bitcast", shifted, vector("float", width))
        return found

    def stored(self, value: Reg, address: Reg, dtype: DType) -> None:
        f, width = self.f, width_of(value.type)
        if dtype is dtypes.bool_:
            value = f.convert("zext", value, vector("i8", width))
        elif dtype is dtypes.float16:
            value = half_bits(f, value, self.module.machine.has_half)
        elif dtype in dtypes.FLOAT8:
            value = float8_bits(f, value, dtype)
        elif dtype is dtypes.bfloat16:
            bits = f.convert("bitcast", value, vector("i32", width))
            high = f.binary("lshr", bits, 16)
            value = f.convert("trunc", high, vector("i16", width))
        f.store(value, address, dtype.itemsize)

    def is_uniform(self, index: Index) -> bool:
        assert self.lanes is not None
        return index.factor_of(self.lanes) == 0 and not self._has_lane_data(index)

    def index_lanes(self, index: Index) -> Reg:
        """The index of every lane."""
        if self.lanes is None:
            return self.index(index)
        wide = vector("i64", self.width)
        if self._has_lane_data(index):
            return self.f.by_lane(wide, lambda lane: self.index(index, lane))
        step = index.factor_of(self.lanes)
        if step is not None:
            first = self.f.splat(self.index(index), self.width)
            lanes = listed([step * lane for lane in range(self.width)], "i64")
            return self.f.binary("add", first, lanes) if step else first
        total = number(index.offset, wide)
        for atom, factor in index.terms:
            part = self._atom_lanes(atom)
            if factor != 1:
                part = self.f.binary("mul", part, factor)
            total = self.f.binary("add", total, part)
        return total

    def _atom_lanes(self, atom: Atom) -> Reg:
        """An atom of every lane."""
        f, lanes = self.f, range(self.width)
        assert self.lanes is not None
        if not uses(atom, self.lanes):
            return f.splat(self._atom(atom, 0), self.width)
        if not isinstance(atom, (Quotient, Remainder)) or not self._is_aligned(atom):
            return f.by_lane(vector("i64", self.width), lambda lane: self._atom(atom, lane))
        if isinstance(atom, Remainder):
            return listed([i % atom.divisor for i in lanes], "i64")
        first = f.splat(self._atom(atom, 0), self.width)
        return f.binary("add", first, listed([i // atom.divisor for i in lanes], "i64"))

    def index(self, index: Index, lane: int = 0) -> Reg:
        """The index of one lane, a number of 64 bits."""
        f = self.f
        total: Reg | None = None
        for atom, factor in index.terms:
            value = self._atom(atom, lane)
            if factor != 1:
                value = f.binary("mul", value, factor)
            total = value if total is None else f.binary("add", total, value)
        if total is None:
            return number(index.offset, "i64")
        return f.binary("add", total, index.offset) if index.offset else total

    def _atom(self, atom: Atom, lane: int) -> Reg:
        f = self.f
        match atom:
            case Var():
                value = self.variables[atom]
                return f.binary("add", value, lane) if lane and atom == self.lanes else value
            case Data(local, extent):
                value = self.shared[local] if local in self.shared else self.locals[local]
                value = value if width_of(value.type) == 1 else f.extract(value, lane)
                if value.type != "i64":
                    value = f.convert("sext", value, "i64")
                low = f.intrinsic("smax", value, 0)
                return f.intrinsic("smin", low, max(0, extent - 1))
            case Quotient(inner, divisor):
                return f.binary("udiv", self.index(inner, lane), divisor)
            case Remainder(inner, divisor):
                return f.binary("urem", self.index(inner, lane), divisor)
            case Bounded(inner, _):
                return self.index(inner, lane)
