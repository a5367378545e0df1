"""Loads of which not all lanes are wanted."""

from __future__ import annotations

from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.codegen.llvm.addresses import Addresses, memory_element
from treadle.codegen.llvm.emitter import Reg, number, vector
from treadle.codegen.llvm.patterns import Start, neighbours, pattern, step_of
from treadle.codegen.llvm.scalars import register_element
from treadle.kernel.access import accesses
from treadle.kernel.index import Index, data_locals
from treadle.kernel.nodes import For, Load

FEW = 4  # vectors that are written out one by one


class Masks(Addresses):
    """Addresses, and the lanes that may be read there."""

    mask: Reg | None = None  # lanes whose elements may be read, where not all may

    def load(self, buffer: str, index: Index, dtype: DType) -> Reg:
        if self.mask is None:
            return super().load(buffer, index, dtype)
        nothing = number(0, vector(register_element(dtype), self.width))
        return self.masked_load(self.mask, Load(buffer, index, dtype), nothing)

    def is_masked(self, load: Load) -> bool:
        """Whether lanes are neighbours: one instruction reads those that are wanted."""
        return not load.dtype.is_narrow and self.lane_step(load.buffer, load.index) == 1

    def is_maskable(self, load: Load) -> bool:
        """Whether a load can be one instruction where some lane is wanted."""
        is_shared = self.lane_step(load.buffer, load.index) == 0
        return is_shared or self.is_gathered(load.buffer, load.index, load.dtype)

    def masked_load(self, mask: Reg, load: Load, other: Reg) -> Reg:
        """Lanes outside the mask are not touched, and have the other value."""
        f, dtype = self.f, load.dtype
        if self.lane_step(load.buffer, load.index) == 0:  # some lane wants it
            return f.select(mask, super().load(load.buffer, load.index, dtype), other)
        if self.is_gathered(load.buffer, load.index, dtype):
            return self.gathered(load.buffer, load.index, dtype, mask, other)
        address = self.address(load.buffer, load.index)
        memory = vector(memory_element(dtype), self.width)
        if dtype is dtypes.bool_:
            other = f.convert("zext", other, memory)
        found = f.masked_load(address, mask, other, dtype.itemsize)
        return f.compare("icmp ne", found, 0) if dtype is dtypes.bool_ else found

    def is_by_lane(self, buffer: str, index: Index) -> bool:
        """Whether lanes are read one by one."""
        if buffer in self.private or any(n not in self.locals for n in data_locals(index)):
            return False
        steps = self._steps(index)
        return steps is not None and step_of(steps) not in (0, 1, 2) and neighbours(steps) == 1

    def is_clearer(self, loop: For, begin: int, end: int, width: int) -> bool:
        """Whether few vectors, each by itself, have loads in patterns that a loop of them has not.

        Taps of a window are such lanes: those of a loop would be gathered.
        """
        if not width < end - begin <= FEW * width:
            return False
        used = [a.index for a in accesses(loop.body) if not data_locals(a.index)]
        return any(
            pattern(index, loop.var, width, Start(width)) is None
            and pattern(index, loop.var, width, Start(0, begin)) is not None
            for index in used
        )
