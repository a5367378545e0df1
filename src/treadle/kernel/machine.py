"""Processors that code is made for: their names, and what code may use of each."""

from __future__ import annotations

from dataclasses import dataclass

from treadle.base.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Machine:
    """What the code of a kernel may use."""

    width: int  # float32 lanes of a vector
    permutes: int = 0  # numbers of a register in which lanes look others up: 16, 8 or none
    has_fma: bool = True  # whether one instruction multiplies and adds
    has_half: bool = True  # whether one instruction converts float16
    registers: int = 16  # vectors of that width that are held at a time
    # Sizes of loops: chosen, unless a reason is given.
    most_tile_rows: int = 8  # more were no faster with 32 registers (docs/rejected.md)
    tile_vectors: int = 2  # of a row of a matmul's tile
    unroll: int = 4  # iterations of a matmul's depth written out
    # Lines of the next panel that are fetched in as many iterations as are written out: two in
    # each. That fetching pays was measured (docs/decisions.md, "The next panel is fetched ahead").
    most_ahead: int = 8
    copied_ahead: int = 16  # runs ahead that a copy of short runs asks for: some tens of ns
    # Bytes of panels that stay in the second-level cache from one block of rows to the next.
    cached_bytes: int = 1 << 19
    # Vectors of a loop that sums inside, and of one that is itself a sum: as many additions at a
    # time as hide the latency of one.
    summing_vectors: int = 2
    accumulating_vectors: int = 4
    written_out: int = (
        16  # statements of all iterations of a loop inside lanes that is no loop then
    )
    # Lines of LLVM text that are compiled as one, in about a twentieth of a second. Parts are
    # compiled side by side, each on a thread; parts of a tenth took no less time in all.
    lines_at_once: int = 2000
    least_width: int = 4  # lanes of the narrower vectors that take what wide ones leave

    @property
    def tile_rows(self) -> int:
        """Rows of a matmul's tile, as many as leave registers for the vectors it needs beside.

        Those are a row of the right matrix, an element of the left one, and products that are not
        added by the same instruction.
        """
        beside = self.tile_vectors + (1 if self.has_fma else 3)
        rows = (self.registers - beside) // self.tile_vectors
        return max(1, min(rows, self.most_tile_rows))


NATIVE = "native"
# What a device may have and is used only where the target asks for it: "native+cooperative-matrix".
# WebGPU's matrices of float16 that a subgroup multiplies at once are experimental in wgpu.
COOPERATIVE_MATRIX = "cooperative-matrix"
FEATURES = (COOPERATIVE_MATRIX,)
# x86-64's levels: the features that each adds to the one before, as LLVM spells them, and lanes.
LEVELS: dict[str, tuple[tuple[str, ...], int]] = {
    "x86-64-v2": (("cx16", "popcnt", "sahf", "sse3", "ssse3", "sse4.1", "sse4.2"), 4),
    "x86-64-v3": (("avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "xsave"), 8),
    "x86-64-v4": (("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"), 16),
}
ARM64 = "arm64"  # every one has NEON: vectors of four lanes, and instructions for float16
SHORT = {name.removeprefix("x86-64-"): name for name in LEVELS}
WIDTHS = (1, 2, 4, 8, 16, 32, 64)


def features_of(level: str) -> tuple[str, ...]:
    """All features that a level needs, those of the levels below first."""
    names = list(LEVELS)
    below = names[: names.index(level) + 1]
    return tuple(feature for name in below for feature in LEVELS[name][0])


def target_name(given: str | int, where: str = "CompileOptions: target") -> str:
    """A target as it is written; anything that is none is an error."""
    is_number = isinstance(given, int) and not isinstance(given, bool)
    text = str(given) if is_number else given
    if isinstance(text, str) and text in (NATIVE, ARM64, *SHORT, *LEVELS, *map(str, WIDTHS)):
        return SHORT.get(text, text)
    if isinstance(text, str) and text.startswith(f"{NATIVE}+") and features_in(text) <= {*FEATURES}:
        return text
    widths = ", ".join(map(str, WIDTHS))
    raise ArgumentError(
        where,
        f"{given!r} is no target",
        f"Use {NATIVE!r}, one of {', '.join(map(repr, LEVELS))} (or {', '.join(SHORT)}), "
        f"{ARM64!r}, or this processor with a number of float32 lanes: {widths}; for WebGPU "
        f"{NATIVE!r} with features, as in '{NATIVE}+{COOPERATIVE_MATRIX}'.",
    )


def features_in(target: str | int) -> set[str]:
    """The features that a target asks for."""
    return set(str(target).split("+")[1:])
