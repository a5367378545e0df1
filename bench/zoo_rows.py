"""The zoo's results in a file, and what they come to."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def key(row: Row) -> tuple[Any, ...]:
    """What a row is a measurement of: a second one replaces the first."""
    return tuple(row[k] for k in ("workload", "device", "target", "threads", "clock"))


def stored(path: Path | None) -> list[Row]:
    """The rows of a file, if there is one."""
    if path is None or not path.exists():
        return []
    return list(json.loads(path.read_text(encoding="utf-8"))["rows"])


def added(path: Path | None, *rows: Row) -> None:
    """Write rows into a file that may have others, a line each."""
    if path is None:
        return
    new = {key(row) for row in rows}
    every = [*(r for r in stored(path) if key(r) not in new), *rows]
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in every)
    path.write_text(f'{{"rows": [\n{lines}\n]}}\n', encoding="utf-8")


def geomean(values: Iterable[float]) -> float | None:
    found = [v for v in values if v > 0]
    return statistics.geometric_mean(found) if found else None


def ours(row: Row, figure: str) -> float | None:
    return row["contenders"].get("treadle", {}).get(figure)


def of_peers(row: Row, figure: str, choose: Callable[[list[float]], float] = min) -> float | None:
    found = [f[figure] for n, f in row["contenders"].items() if n != "treadle" and figure in f]
    return choose(found) if found else None


def of_best(row: Row, figure: str) -> float | None:
    """A figure of the fastest peer."""
    return row["contenders"].get(row.get("best_peer"), {}).get(figure)


def over(row: Row, figure: str) -> float | None:
    """Our figure over that of the fastest peer."""
    a, b = ours(row, figure), of_best(row, figure)
    return a / b if a and b and a > 0 and b > 0 else None


def given(values: Iterable[float | None]) -> list[float]:
    return [v for v in values if v is not None]


def first_figure(rows: list[Row]) -> str:
    """Where others use the machine, the first step is counted in seconds of processors."""
    is_shared = any(r["clock"] == "process_time" for r in rows)
    return "first_processor_s" if is_shared else "first_s"


def summary(rows: list[Row]) -> dict[str, Any]:
    """Geometric means, and the worst."""
    ratios = {r["workload"]: r["ratio"] for r in rows if "ratio" in r}
    first = first_figure(rows)
    found: dict[str, Any] = {
        "entries": len(rows),
        "ratio": geomean(ratios.values()),
        "slower": sorted((n for n in ratios if ratios[n] > 1), key=lambda n: -ratios[n]),
        "first_s": geomean(given(ours(r, first) for r in rows)),
        "first_peer_s": geomean(given(of_best(r, first) for r in rows)),
        "memory": geomean(given(over(r, "steps_mib") for r in rows)),
        "differ": [r["workload"] for r in rows if r["agree"] is False],
        "left_out": {
            f"{r['workload']} {n}": f["error"]
            for r in rows
            for n, f in r["contenders"].items()
            if "error" in f
        },
    }
    if ratios:
        found["worst"] = max(ratios, key=lambda n: ratios[n])
        found["worst_ratio"] = ratios[found["worst"]]
    slowest = max(rows, key=lambda r: ours(r, first) or 0, default=None)
    if slowest is not None:
        found["slowest_first"] = slowest["workload"], ours(slowest, first)
    return found
