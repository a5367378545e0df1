"""Addresses in memory and indices, for one lane or for all lanes of a vector."""

from __future__ import annotations

from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.codegen.llvm.emitter import (
    Function,
    Reg,
    element_of,
    listed,
    number,
    vector,
    width_of,
)
from treadle.codegen.llvm.float8 import float8_bits, float8_value
from treadle.codegen.llvm.halves import half_bits, half_value
from treadle.codegen.llvm.module import Module
from treadle.codegen.llvm.patterns import ANYWHERE, Pattern, neighbours, pattern, step_of
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
)


def memory_element(dtype: DType) -> str:
    """The element type in memory."""
    names = {"bool": "i8", "bfloat16": "i16", "float16": "i16"}
    names |= {d.name: "i8" for d in dtypes.FLOAT8}
    return names.get(dtype.name, register_element(dtype))


Terms = list[tuple[Atom, int]]
_GATHERED = ("float", "double", "i32", "i64")  # elements that processors gather


def fits(index: Index) -> bool:
    """Whether 32 bits hold an index and everything that is divided in it."""
    low, high = index.range
    if low < -(1 << 31) or high >= 1 << 31:
        return False
    inner = (a.index for a, _ in index.terms if isinstance(a, (Quotient, Remainder, Bounded)))
    return all(map(fits, inner))


def reciprocal(divisor: int, most: int) -> tuple[int, int] | None:
    """(m, s) with x // divisor = x · m >> s for 0 ≤ x ≤ most, all in 32 bits; None if none is."""
    for shift in range(divisor.bit_length() - 1, 32):
        factor = -(-(1 << shift) // divisor)
        if factor * most >= 1 << 32:
            return None
        if (factor * divisor - (1 << shift)) * most < 1 << shift:
            return factor, shift
    return None


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
        self.start = ANYWHERE  # what is known of the first lane
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
        steps = None if buffer in self.private else self._steps(index)
        if steps is not None:
            return self._by_pattern(buffer, index, dtype, steps)
        if self.is_gathered(buffer, index, dtype):
            return self.gathered(buffer, index, dtype)

        def element(lane: int) -> Reg:
            return self.loaded(self.address(buffer, index, lane), dtype, 1)

        return self.f.by_lane(vector(register_element(dtype), self.width), element)

    def _steps(self, index: Index) -> Pattern | None:
        """How far each lane's element is from the first's, if that is known."""
        assert self.lanes is not None
        if self._has_lane_data(index):
            return None
        return pattern(index, self.lanes, self.width, self.start)

    def _by_pattern(self, buffer: str, index: Index, dtype: DType, steps: Pattern) -> Reg:
        """Few elements that lanes choose from, else runs of neighbours, else one by one."""
        f, least = self.f, min(steps)
        few = max(steps) - least + 1
        if few <= self.width and few & (few - 1) == 0:
            part = self.loaded(self.address(buffer, index + least), dtype, few)
            return f.shuffle(part, part, [step - least for step in steps])
        run = neighbours(steps)
        starts = [self.address(buffer, index + steps[i]) for i in range(0, self.width, run)]
        parts = [self.loaded(start, dtype, run) for start in starts]
        if run == 1:
            return f.by_lane(vector(register_element(dtype), self.width), lambda i: parts[i])
        while len(parts) > 1:
            pairs = zip(parts[::2], parts[1::2], strict=True)
            parts = [f.shuffle(a, b, range(2 * width_of(a.type))) for a, b in pairs]
        return parts[0]

    def is_gathered(self, buffer: str, index: Index, dtype: DType) -> bool:
        """Whether lanes lie apart, and one instruction reads them."""
        is_anywhere = buffer not in self.private and self.lane_step(buffer, index) not in (0, 1)
        return is_anywhere and memory_element(dtype) in _GATHERED and fits(index)

    def gathered(
        self,
        buffer: str,
        index: Index,
        dtype: DType,
        mask: Reg | None = None,
        other: Reg | None = None,
    ) -> Reg:
        """Elements of all lanes, or of those of a mask beside another value."""
        f, element = self.f, memory_element(dtype)
        first, moving = self._parts(index)
        zero = number(0, vector("i32", self.width))
        # What all lanes add may lie outside of the buffer: an address that nobody reads.
        base = f.pure(
            "ptr", f"getelementptr {element}, {self.pointers[buffer]}, {self.index(first)}"
        )
        offsets = self._moved(zero, first, moving)
        addresses = f.pure(vector("ptr", self.width), f"getelementptr {element}, {base}, {offsets}")
        type_ = vector(element, self.width)
        mask = mask or number(True, vector("i1", self.width))
        return f.gather(addresses, mask, other or Reg(type_, "poison"), dtype.itemsize)

    def lane_step(self, buffer: str, index: Index) -> int | None:
        """How far apart two lanes' elements are; None where that is no one number."""
        if self.lanes is None:
            return 0
        steps = self._steps(index)
        step = None if steps is None else step_of(steps)
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

    def _has_lane_data(self, index: Index) -> bool:
        """Whether the index uses a local that differs from lane to lane."""
        names = [n for n in data_locals(index) if n not in self.shared]
        return any(width_of(self.locals[name].type) > 1 for name in names)

    def address(self, buffer: str, index: Index, lane: int = 0) -> Reg:
        """Of one lane's element."""
        step = self.lane_step(buffer, index) if lane else None
        if step is not None and buffer not in self.private:
            first, element = self.address(buffer, index), memory_element(self.types[buffer])
            return self.f.offset(first, lane * step, element)
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
        """The index of every lane: numbers of 32 bits where those hold all of it, else of 64."""
        if self.lanes is None:
            return self.index(index)
        return self._lanes_of(index, "i32" if fits(index) else "i64")

    def _parts(self, index: Index) -> tuple[Index, Terms]:
        """What lanes have in a known pattern, and the other terms."""
        known: Terms = []
        moving: Terms = []
        for atom, factor in index.terms:
            is_known = self._steps(Index(((atom, 1),))) is not None
            (known if is_known else moving).append((atom, factor))
        return Index(tuple(known), index.offset), moving

    def _moved(self, start: Reg, first: Index, moving: Terms) -> Reg:
        """Numbers of lanes, moved by the lanes' own parts of an index."""
        f, element = self.f, element_of(start.type)
        steps = self._steps(first)
        assert steps is not None
        total = f.binary("add", start, listed(steps, element)) if any(steps) else start
        for atom, factor in moving:
            part = self._atom_lanes(atom, element)
            part = part if factor == 1 else f.binary("mul", part, factor)
            total = f.binary("add", total, part)
        return total

    def _lanes_of(self, index: Index, element: str) -> Reg:
        """An index of every lane as numbers of one type."""
        first, moving = self._parts(index)
        start = self.index(first)
        start = start if element == "i64" else self.f.convert("trunc", start, element)
        return self._moved(self.f.splat(start, self.width), first, moving)

    def _atom_lanes(self, atom: Atom, element: str) -> Reg:
        """An atom of every lane."""
        f = self.f
        match atom:
            case Bounded(inner, _):
                return self._lanes_of(inner, element)
            case Quotient(inner, divisor) if element == "i32":
                return self._divided(inner, divisor)
            case Remainder(inner, divisor) if element == "i32":
                whole = f.binary("mul", self._divided(inner, divisor), divisor)
                return f.binary("sub", self._lanes_of(inner, element), whole)
            case _:  # vectors of 64 bits are not divided faster than numbers
                wide = f.by_lane(vector("i64", self.width), lambda lane: self._atom(atom, lane))
                return (
                    wide
                    if element == "i64"
                    else f.convert("trunc", wide, vector("i32", self.width))
                )

    def _divided(self, index: Index, divisor: int) -> Reg:
        """The quotient of every lane, of 32 bits."""
        value = self._lanes_of(index, "i32")
        found = reciprocal(divisor, index.range[1])
        if found is None:
            return self.f.binary("udiv", value, divisor)
        factor, shift = found
        return self.f.binary("lshr", self.f.binary("mul", value, factor), shift)

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
