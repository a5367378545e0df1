"""Measures the errors of the elementary functions and writes the table of docs/mathematics.md.

    python tools/math_errors.py            every float32: a quarter of an hour on two cores
    python tools/math_errors.py --print    only prints the table
    python tools/math_errors.py --samples 1000000 --print

Functions of one operand are run for every float32 of each interval, pow and atan2 for random operands.
References are float64. A test measures again on a sample and compares with the page.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from vector_functions import compiled, exact, ulps

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "mathematics.md"
TABLE = re.compile(r"(?<=<!-- errors -->\n).*?(?=<!-- end -->)", re.DOTALL)
CHUNK = 1 << 22
POW_SAMPLES = 1 << 26
WIDTH = 8

Operands = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Interval:
    """Float32s of one function: from low to high, of one sign, in each of some pieces."""

    function: str
    text: str
    pieces: tuple[tuple[float, float], ...]

    def ranges(self) -> list[tuple[int, int]]:
        """The bit patterns of each piece: first, and one past the last."""
        ends = [np.array(piece, np.float32).view(np.uint32) for piece in self.pieces]
        return [(int(min(e)), int(max(e)) + 1) for e in ends]

    def all(self) -> Iterator[tuple[int, int]]:
        for start, stop in self.ranges():
            for first in range(start, stop, CHUNK):
                yield first, min(first + CHUNK, stop)

    def sample(self, count: int, rng: np.random.Generator) -> Operands:
        ranges = self.ranges()
        each = -(-count // len(ranges))
        bits = [rng.integers(start, stop, each, np.uint32) for start, stop in ranges]
        return (np.concatenate(bits).view(np.float32),)


@dataclass(frozen=True)
class Pairs:
    """Random operands of pow, or of atan2."""

    text: str
    draw: Callable[[np.random.Generator, int], Operands]
    function: str = "pow"

    def sample(self, count: int, rng: np.random.Generator) -> Operands:
        return self.draw(rng, count)


def _both(low: float, high: float) -> tuple[tuple[float, float], ...]:
    return (-high, -low), (low, high)


def _positive(rng: np.random.Generator, count: int) -> np.ndarray:
    largest = int(np.float32(np.inf).view(np.uint32))
    return rng.integers(1, largest, count, np.uint32).view(np.float32)


def _near_one(rng: np.random.Generator, count: int) -> np.ndarray:
    one = int(np.float32(1).view(np.uint32))
    return rng.integers(one - 2**14, one + 2**14, count, np.uint32).view(np.float32)


def _with_results(x: np.ndarray, low: float, high: float, rng: np.random.Generator) -> Operands:
    """Exponents that bring x to a power of two between 2^low and 2^high."""
    with np.errstate(all="ignore"):
        y = rng.uniform(low, high, x.size) / np.log2(x.astype(np.float64))
    return x, y.astype(np.float32)


def _normal_results(rng: np.random.Generator, count: int) -> Operands:
    return _with_results(_positive(rng, count), -126, 128.1, rng)


def _denormal_results(rng: np.random.Generator, count: int) -> Operands:
    return _with_results(_positive(rng, count), -151, -126, rng)


def _bases_near_one(rng: np.random.Generator, count: int) -> Operands:
    return _with_results(_near_one(rng, count), -151, 128.1, rng)


def _whole_powers(rng: np.random.Generator, count: int) -> Operands:
    x = -np.exp2(rng.uniform(-8, 8, count)).astype(np.float32)
    return x, rng.integers(-20, 21, count).astype(np.float32)


def _any_bits(rng: np.random.Generator, count: int) -> Operands:
    x, y = rng.integers(0, 2**32, (2, count), np.uint32).view(np.float32)
    return x, y


def _octants(rng: np.random.Generator, count: int) -> Operands:
    y, x = rng.choice([-1, 1], (2, count)) * np.exp2(rng.uniform(-4, 4, (2, count)))
    return y.astype(np.float32), x.astype(np.float32)


def _tangents(rng: np.random.Generator, count: int) -> Operands:
    """The operands of atan."""
    return _any_bits(rng, count)[0], np.ones(count, np.float32)


INF = math.inf
DENORMAL_END, NORMAL, LARGEST = 2.0**-126 - 2.0**-149, 2.0**-126, 3.4028235e38
EXP_NORMAL, EXP_END = 87.33654, 88.72284

REGIONS: tuple[Interval | Pairs, ...] = (
    Interval("exp", "−87.3 ≤ x ≤ 88.7", ((-EXP_NORMAL, -0.0), (0.0, EXP_END))),
    Interval("exp", "−104 ≤ x ≤ −87.3: denormal", ((-104.0, -EXP_NORMAL),)),
    Interval("exp", "beyond: 0 or ∞", ((-INF, -104.0), (EXP_END, INF))),
    Interval("log", "½ ≤ x ≤ 2", ((0.5, 2.0),)),
    Interval("log", "other normal x, ∞", ((NORMAL, 0.5), (2.0, INF))),
    Interval("log", "denormal x, 0", ((0.0, DENORMAL_END),)),
    Interval("log", "x < 0: NaN", ((-INF, -(2.0**-149)),)),
    Interval("tanh", "0 ≤ ±x ≤ ¼", _both(0.0, 0.25)),
    Interval("tanh", "±x ≥ ¼", _both(0.25, INF)),
    Interval("erf", "0 ≤ ±x ≤ ½", _both(0.0, 0.5)),
    Interval("erf", "±x ≥ ½", _both(0.5, INF)),
    Interval("sin", "0 ≤ ±x ≤ π/4", _both(0.0, math.pi / 4)),
    Interval("sin", "π/4 ≤ ±x ≤ 2¹⁵", _both(math.pi / 4, 2.0**15)),
    Interval("sin", "±x > 2¹⁵: libm; ∞: NaN", _both(2.0**15 + 2**-8, INF)),
    Interval("cos", "0 ≤ ±x ≤ π/4", _both(0.0, math.pi / 4)),
    Interval("cos", "π/4 ≤ ±x ≤ 2¹⁵", _both(math.pi / 4, 2.0**15)),
    Interval("cos", "±x > 2¹⁵: libm; ∞: NaN", _both(2.0**15 + 2**-8, INF)),
    Interval("rsqrt", "normal x, ∞", ((NORMAL, INF),)),
    Interval("rsqrt", "denormal x, ±0", ((0.0, DENORMAL_END), (-0.0, -0.0))),
    Interval("rsqrt", "x < 0: NaN", ((-INF, -(2.0**-149)),)),
    Pairs("x > 0, normal results", _normal_results),
    Pairs("x > 0, denormal results", _denormal_results),
    Pairs("x within 2⁻⁹ of 1, any results", _bases_near_one),
    Pairs("x < 0, whole y up to ±20", _whole_powers),
    Pairs("any two float32s", _any_bits),
    Pairs("of like size, every octant", _octants, "atan2"),
    Pairs("x = 1", _tangents, "atan2"),
    Pairs("any two float32s", _any_bits, "atan2"),
)


def largest_error(function: str, operands: Operands) -> float:
    got = compiled(function, WIDTH)(*operands)  # lanes are alike at every width
    return float(ulps(got, exact(function, *operands)).max())


def sampled_error(region: Interval | Pairs, count: int, seed: int = 0) -> float:
    return largest_error(region.function, region.sample(count, np.random.default_rng(seed)))


def _error_of_range(function: str, start: int, stop: int) -> float:
    return largest_error(function, (np.arange(start, stop, dtype=np.uint32).view(np.float32),))


def exhaustive_error(region: Interval | Pairs, pool: ProcessPoolExecutor) -> float:
    if isinstance(region, Pairs):
        turns = POW_SAMPLES // CHUNK
        jobs = [pool.submit(sampled_error, region, CHUNK, seed) for seed in range(turns)]
    else:
        jobs = [pool.submit(_error_of_range, region.function, *r) for r in region.all()]
    return max(job.result() for job in jobs)


def row(region: Interval | Pairs, error: float) -> str:
    """Rounded up: the page must not promise more than was found."""
    shown = f"{math.ceil(error * 100) / 100:.2f}" if math.isfinite(error) else "wrong"
    return f"| `{region.function}` | {region.text} | {shown} |\n"


def documented() -> dict[tuple[str, str], float]:
    """The errors that the page states, by function and interval."""
    found = TABLE.search(PAGE.read_text(encoding="utf-8"))
    assert found is not None, f"no table in {PAGE}"
    cells = re.findall(r"^\| `(\w+)` \| (.*) \| ([\d.]+) \|$", found[0], re.MULTILINE)
    return {(function, text): float(error) for function, text, error in cells}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, help="random operands per interval, not all")
    parser.add_argument("--print", action="store_true", help="leave the page as it is")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    table = "\n| function | operands | largest error, ulp |\n|---|---|---|\n"
    with ProcessPoolExecutor(arguments.processes) as pool:
        for region in REGIONS:
            if arguments.samples is None:
                error = exhaustive_error(region, pool)
            else:
                error = sampled_error(region, arguments.samples)
            print(row(region, error), end="", flush=True)
            table += row(region, error)
    if not arguments.print:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(TABLE.sub(table + "\n", page), encoding="utf-8")


if __name__ == "__main__":
    main()
