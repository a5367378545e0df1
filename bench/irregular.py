"""Irregular ops on an NVIDIA GPU beside PyTorch's: sums at indices, scans, sorts, arg-reductions.

    python bench/irregular.py                          # every row, both sides
    python bench/irregular.py --only cumsum --json rows.json
    python bench/irregular.py --deterministic          # both sides with one order of sums

Runs of both are captured, five to a graph; medians of turns. Each row says how far Treadle is from
NumPy's result in float64, as a part of the largest element.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import treadle as td
from treadle.backends.compiled import compiled_part
from treadle.frontend.scopes import bind1
from treadle.ir.ops.indexing import SCATTER_ADD, ScatterAdd

TOGETHER, LEAST = 5, 0.02  # runs in a graph; seconds of a turn
F32, BF16 = "float32", "bfloat16"
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Row:
    """An op: the same function of the same arrays on both sides, and the bytes it must move."""

    name: str
    ours: Callable[..., Any]
    torch: Callable[[Any], Callable[..., Any]]
    arrays: Callable[[np.random.Generator], list[np.ndarray]]
    exact: Callable[..., np.ndarray] | None = None
    narrow: bool = False


PLACES: dict[str, Callable[[np.random.Generator, tuple[int, ...], int], np.ndarray]] = {
    "uniform": lambda rng, shape, n: rng.integers(0, n, shape),
    "sorted": lambda rng, shape, n: np.sort(rng.integers(0, n, shape).reshape(-1)).reshape(shape),
    "skewed": lambda rng, shape, n: (n * rng.random(shape) ** 8).astype(np.int64),
    "equal": lambda rng, shape, n: np.full(shape, n // 2),
}


def scatter(
    count: tuple[int, ...], width: int, size: int, where: str = "uniform", narrow: bool = False
) -> Row:
    """Rows added along the first axis, at indices of one axis or several."""

    def ours(x: td.Tensor, at: td.Tensor) -> td.Tensor:
        return bind1(SCATTER_ADD, ScatterAdd(0, size), x, at)

    def peer(torch: Any) -> Callable[..., Any]:
        out = torch.zeros(size, width, device="cuda", dtype=torch.bfloat16 if narrow else None)

        def run(x: Any, at: Any) -> Any:
            return out.zero_().index_add_(0, at.reshape(-1), x.reshape(-1, width))

        return run

    def arrays(rng: np.random.Generator) -> list[np.ndarray]:
        x = rng.standard_normal((*count, width), np.float32)
        return [x, PLACES[where](rng, count, size).astype(np.int32)]

    def exact(x: np.ndarray, at: np.ndarray) -> np.ndarray:
        found, wide = np.zeros((size, width)), x.reshape(-1, width).astype(np.float64)
        for c in range(width):
            found[:, c] = np.bincount(at.reshape(-1), wide[:, c], size)
        return found

    kind = " bfloat16" if narrow else ""
    name = f"scatter_add {count} x {width} into {size}{kind}, {where}"
    return Row(name, ours, peer, arrays, exact if not narrow else None, narrow)


def last_axis(rows: int, count: int, size: int) -> Row:
    """Elements added along the last axis, at one list of indices."""

    def ours(x: td.Tensor, at: td.Tensor) -> td.Tensor:
        return bind1(SCATTER_ADD, ScatterAdd(1, size), x, at)

    def peer(torch: Any) -> Callable[..., Any]:
        out = torch.zeros(rows, size, device="cuda")
        return lambda x, at: out.zero_().index_add_(1, at, x)

    def arrays(rng: np.random.Generator) -> list[np.ndarray]:
        x = rng.standard_normal((rows, count), np.float32)
        return [x, rng.integers(0, size, count).astype(np.int32)]

    return Row(f"scatter_add last axis {rows} x {count} into {size}", ours, peer, arrays)


def batched(batch: int, count: int, width: int, size: int) -> Row:
    """Rows added in each element of a batch, at indices of its own: neighbours of points."""

    def ours(x: td.Tensor, at: td.Tensor) -> td.Tensor:
        return bind1(SCATTER_ADD, ScatterAdd(1, size, 1), x, at)

    def peer(torch: Any) -> Callable[..., Any]:
        out = torch.zeros(batch, size, width, device="cuda")

        def run(x: Any, at: Any) -> Any:
            return out.zero_().scatter_add_(1, at.long()[..., None].expand(-1, -1, width), x)

        return run

    def arrays(rng: np.random.Generator) -> list[np.ndarray]:
        x = rng.standard_normal((batch, count, width), np.float32)
        return [x, rng.integers(0, size, (batch, count)).astype(np.int32)]

    return Row(f"scatter_add batch {batch} x {count} x {width} into {size}", ours, peer, arrays)


def along(
    name: str,
    shape: tuple[int, ...],
    axis: int,
    ours: Callable[[td.Tensor, int], Any],
    peer: Callable[[Any, Any, int], Any],
    exact: Callable[[np.ndarray, int], np.ndarray] | None = None,
) -> Row:
    """An op of one tensor along an axis."""
    return Row(
        f"{name} {shape} axis {axis}",
        lambda x: ours(x, axis),
        lambda torch: lambda x: peer(torch, x, axis),
        lambda rng: [rng.standard_normal(shape, np.float32)],
        None if exact is None else lambda x: exact(x.astype(np.float64), axis),
    )


def rows() -> Iterator[Row]:
    yield scatter((1 << 21,), 2, 1 << 18)
    yield scatter((1 << 18, 8), 2, 1 << 18)
    yield scatter((1 << 16, 4, 8), 2, 1 << 18)
    yield scatter((1 << 20,), 1, 1 << 12)
    yield scatter((1 << 20,), 64, 16)
    for where in ("uniform", "sorted", "skewed", "equal"):
        yield scatter((97280,), 128, 16384, where)
    yield scatter((16384,), 1024, 32000, narrow=True)
    yield scatter((401408,), 64, 16384)
    yield scatter((1000,), 32, 500)
    yield scatter((10_000_000,), 1, 1 << 20, "skewed")
    yield scatter((1 << 20,), 3, 1 << 16)
    yield last_axis(1024, 4096, 512)
    yield batched(32, 12288, 64, 1024)
    scans = ((1 << 20,), 0), ((1 << 24,), 0), ((32768, 128), 1), ((16384, 8), 0)
    scans = (*scans, ((1024, 1024, 16), 1), ((64, 65536), 1))
    for shape, axis in scans:
        yield along("cumsum", shape, axis, td.cumsum, lambda t, x, a: t.cumsum(x, a), np.cumsum)
    for shape, axis in (((1 << 20,), 0), ((32768, 128), 1), ((64, 65536), 1)):
        yield along("sort", shape, axis, lambda x, a: td.sort(x, a), lambda t, x, a: t.sort(x, a))
    yield along(
        "topk 32", (32768, 128), 1, lambda x, a: td.topk(x, 32, a), lambda t, x, a: t.topk(x, 32, a)
    )
    for shape, axis in (((1024, 1024, 16), 1), ((32768, 128), 1), ((65536, 32), 1)):
        yield along("argmax", shape, axis, td.argmax, lambda t, x, a: t.argmax(x, a), np.argmax)
    yield along("sum", (97280, 128), 0, lambda x, a: x.sum(a), lambda t, x, a: x.sum(a), np.sum)


def ours_of(row: Row, arrays: list[np.ndarray], options: td.CompileOptions) -> Callable[[], float]:
    """What a run takes, in seconds."""
    program = td.compile(row.ours, *[td.Spec(a.shape, str(a.dtype)) for a in arrays],
                         device="cuda", options=options)  # fmt: skip
    if row.exact is not None:
        found = program(*arrays)
        found = np.asarray(found[0] if isinstance(found, (tuple, list)) else found, np.float64)
        expected = row.exact(*arrays)
        error = np.abs(found - expected).max() / max(1e-9, np.abs(expected).max())
        assert error < 1e-4, f"{row.name}: {error:.2g} from NumPy"
    forward = program._forward
    built, given = forward._programs.get("bench", tuple(arrays))
    part = compiled_part(built.program)
    assert part is not None
    return lambda: part.seconds(given, LEAST, TOGETHER)


def peer_of(row: Row, arrays: list[np.ndarray], torch: Any) -> Callable[[], float]:
    given = [torch.tensor(a, device="cuda") for a in arrays]
    if row.narrow:
        given[0] = given[0].bfloat16()
    run = row.torch(torch)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run(*given)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(TOGETHER):
            run(*given)

    def seconds() -> float:
        count = 1
        while True:
            start, end = torch.cuda.Event(True), torch.cuda.Event(True)
            start.record()
            for _ in range(count):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            taken = start.elapsed_time(end) / 1e3
            if taken >= LEAST:
                return taken / (count * TOGETHER)
            count *= 4

    return seconds


def narrowed(row: Row, arrays: list[np.ndarray]) -> list[np.ndarray]:
    return [arrays[0].astype(td.bfloat16.numpy), *arrays[1:]] if row.narrow else arrays


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--alone", action="store_true", help="without PyTorch")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch = None
    if not given.alone:
        import torch

        torch.use_deterministic_algorithms(given.deterministic)
    options, found = td.CompileOptions(deterministic=given.deterministic), []
    for row in rows():
        if given.only not in row.name:
            continue
        arrays = row.arrays(np.random.default_rng(0))
        about: dict[str, Any] = {"name": row.name}
        try:
            sides = {"ours": ours_of(row, narrowed(row, arrays), options)}
            if torch is not None:
                sides["torch"] = peer_of(row, arrays, torch)
            times = {name: [] for name in sides}
            for _ in range(given.rounds):
                for name, side in sides.items():
                    times[name].append(side())
            about |= {name: 1e6 * statistics.median(t) for name, t in times.items()}
            if "torch" in about:
                about["ratio"] = about["torch"] / about["ours"]
        except Exception as error:
            about["error"] = f"{type(error).__name__}: {error}"[:300]
        found.append(about)
        shown = [
            f"{k} {v:10.1f}" if k != "ratio" else f"{k} {v:6.2f}"
            for k, v in about.items()
            if isinstance(v, float)
        ]
        print(f"{row.name:58}", *shown, about.get("error", ""), flush=True)
    ratios = [row["ratio"] for row in found if "ratio" in row]
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(f"geometric mean {mean:.2f} of {len(ratios)}, least {min(ratios):.2f}")
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
