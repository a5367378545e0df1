"""Addresses in memory and indices, for one lane or for all lanes of a vector."""

from __future__ import annotations

from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.codegen.llvm.analysis import memory_element
from treadle.codegen.llvm.emitter import Function, Reg, listed, number, vector, width_of
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
        step = self._lane_step(buffer, index)
        if self.lanes is None or step == 1:
            return self._loaded(self._address(buffer, self.index(index), dtype), dtype, self.width)
        if step == 0:
            scalar = self._loaded(self._address(buffer, self.index(index), dtype), dtype, 1)
            return self.f.splat(scalar, self.width)
        if step == 2:
            return self._every_other(buffer, index, dtype)
        repeats = 0 if buffer in self.private else self._repeats(index)
        if repeats:
            return self._repeated(buffer, index, dtype, repeats)
        result = Reg(vector(register_element(dtype), self.width), "poison")
        for lane in range(self.width):
            element = self._loaded(self._lane_address(buffer, index, lane), dtype, 1)
            result = self.f.insert(result, element, lane)
        return result

    def _lane_step(self, buffer: str, index: Index) -> int | None:
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
        parts = [
            self._loaded(self._address(buffer, self.index(index + start), dtype), dtype, width)
            for start in (0, width - 1)
        ]
        chosen = [2 * i if i < width // 2 else 2 * i + 1 for i in range(width)]
        return self.f.shuffle(parts[0], parts[1], chosen)

    def _repeats(self, index: Index) -> int:
        """How many lanes in a row have one element, where lanes are divided by that; else 0."""
        assert self.lanes is not None
        found = 0
        for atom, factor in index.terms:
            if not uses(atom, self.lanes):
                continue
            is_whole = isinstance(atom, Quotient) and factor == 1 and not found
            if not is_whole or not self._is_aligned(atom):
                return 0
            assert isinstance(atom, Quotient)
            found = atom.divisor
        return 0 if self._has_lane_data(index) else found

    def _repeated(self, buffer: str, index: Index, dtype: DType, repeats: int) -> Reg:
        few = self.width // repeats
        part = self._loaded(self._address(buffer, self.index(index), dtype), dtype, few)
        if few == 1:
            return self.f.splat(part, self.width)
        return self.f.shuffle(part, part, [i // repeats for i in range(self.width)])

    def _is_aligned(self, atom: Atom) -> bool:
        """Whether lanes of a quotient or remainder follow the same pattern in every vector."""
        if not isinstance(atom, (Quotient, Remainder)) or not self.is_aligned:
            return False
        divisor, inner = atom.divisor, atom.index
        if self.width % divisor or inner.offset % divisor:
            return False
        return all(
            f == 1 if a == self.lanes else f % divisor == 0 and not uses(a, self.lanes)
            for a, f in inner.terms
            if self.lanes is not None
        )

    def _has_lane_data(self, index: Index) -> bool:
        """Whether the index uses a local that differs from lane to lane."""
        names = [n for n in data_locals(index) if n not in self.shared]
        return any(width_of(self.locals[name].type) > 1 for name in names)

    def _lane_address(self, buffer: str, index: Index, lane: int) -> Reg:
        """Of one lane's element."""
        return self._address(buffer, self._lane_index(index, lane), self.types[buffer], lane)

    def _address(self, buffer: str, at: Reg, dtype: DType, lane: int = 0) -> Reg:
        memory = memory_element(dtype)
        if buffer in self.private and self.apart > 1:
            at = self.f.binary("mul", at, number(self.apart, "i64"))
            at = self.f.binary("add", at, number(self.lane + lane, "i64"))
        return self.f.value(
            "ptr", f"getelementptr inbounds {memory}, {self.pointers[buffer]}, {at}"
        )

    def _loaded(self, address: Reg, dtype: DType, width: int) -> Reg:
        f = self.f
        memory = vector(memory_element(dtype), width)
        found = f.value(memory, f"load {memory}, {address}, align {dtype.itemsize}")
        if dtype is dtypes.bool_:
            return f.compare("icmp ne", found, number(0, memory))
        if dtype is dtypes.float16:
            return half_value(f, found, self.module.machine.has_half)
        if dtype is dtypes.bfloat16:
            wide = f.convert("zext", found, vector("i32", width))
            shifted = f.binary("shl", wide, number(16, wide.type))
            return f.convert("bitcast", shifted, vector("float", width))
        return found

    def _stored(self, value: Reg, address: Reg, dtype: DType) -> None:
        f, width = self.f, width_of(value.type)
        if dtype is dtypes.bool_:
            value = f.convert("zext", value, vector("i8", width))
        elif dtype is dtypes.float16:
            value = half_bits(f, value, self.module.machine.has_half)
        elif dtype is dtypes.bfloat16:
            bits = f.convert("bitcast", value, vector("i32", width))
            high = f.binary("lshr", bits, number(16, bits.type))
            value = f.convert("trunc", high, vector("i16", width))
        f.do(f"store {value}, {address}, align {dtype.itemsize}")

    def _is_uniform(self, index: Index) -> bool:
        assert self.lanes is not None
        return index.factor_of(self.lanes) == 0 and not self._has_lane_data(index)

    def index(self, index: Index) -> Reg:
        """The index of the first lane."""
        return self._lane_index(index, 0)

    def index_lanes(self, index: Index) -> Reg:
        """The index of every lane."""
        if self.lanes is None:
            return self.index(index)
        step = index.factor_of(self.lanes)
        wide = vector("i64", self.width)
        if step is not None and not self._has_lane_data(index):
            first = self.f.splat(self.index(index), self.width)
            if step == 0:
                return first
            lanes = [step * lane for lane in range(self.width)]
            return self.f.binary("add", first, listed(lanes, "i64"))
        if self._has_lane_data(index):
            result = Reg(wide, "poison")
            for lane in range(self.width):
                result = self.f.insert(result, self._lane_index(index, lane), lane)
            return result
        total = number(index.offset, wide)
        for atom, factor in index.terms:
            part = self._atom_lanes(atom)
            if factor != 1:
                part = self.f.binary("mul", part, number(factor, wide))
            total = self.f.binary("add", total, part)
        return total

    def _atom_lanes(self, atom: Atom) -> Reg:
        """An atom of every lane."""
        f, wide = self.f, vector("i64", self.width)
        assert self.lanes is not None
        if not uses(atom, self.lanes):
            return f.splat(self._atom(atom, 0), self.width)
        if isinstance(atom, (Quotient, Remainder)) and self._is_aligned(atom):
            d = atom.divisor
            if isinstance(atom, Remainder):
                return listed([i % d for i in range(self.width)], "i64")
            first = f.splat(self._atom(atom, 0), self.width)
            return f.binary("add", first, listed([i // d for i in range(self.width)], "i64"))
        result = Reg(wide, "poison")
        for lane in range(self.width):
            result = f.insert(result, self._atom(atom, lane), lane)
        return result

    def _lane_index(self, index: Index, lane: int) -> Reg:
        """The index of one lane, a number of 64 bits."""
        f = self.f
        total: Reg | None = None
        for atom, factor in index.terms:
            value = self._atom(atom, lane)
            if factor != 1:
                value = f.binary("mul", value, number(factor, "i64"))
            total = value if total is None else f.binary("add", total, value)
        if total is None:
            return number(index.offset, "i64")
        return f.binary("add", total, number(index.offset, "i64")) if index.offset else total

    def _atom(self, atom: Atom, lane: int) -> Reg:
        f = self.f
        match atom:
            case Var():
                value = self.variables[atom]
                is_lane = lane and atom == self.lanes
                return f.binary("add", value, number(lane, "i64")) if is_lane else value
            case Data(local, extent):
                value = self.shared[local] if local in self.shared else self.locals[local]
                value = value if width_of(value.type) == 1 else f.extract(value, lane)
                if value.type != "i64":
                    value = f.convert("sext", value, "i64")
                low = f.intrinsic("smax", value, number(0, "i64"))
                return f.intrinsic("smin", low, number(max(0, extent - 1), "i64"))
            case Quotient(inner, divisor):
                return f.binary("udiv", self._lane_index(inner, lane), number(divisor, "i64"))
            case Remainder(inner, divisor):
                return f.binary("urem", self._lane_index(inner, lane), number(divisor, "i64"))
            case Bounded(inner, _):
                return self._lane_index(inner, lane)
