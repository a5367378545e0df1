"""The zoo: training steps of many families, Treadle beside PyTorch in turns, from equal weights.

usage: python bench/zoo.py [entry ...] [--peers eager,channels-last,compile] [--rounds 5]
                           [--threads 2] [--target v3] [--device cpu] [--clock process_time]
                           [--cold] [--memory] [--json FILE] [--table]

The method is that of cpu.py: a process for each contender, turns in one run, the median ratio of
the rounds. Results are added to those that the file has, so that a run may be cut in parts;
--table prints what it has. --target restricts the peers' instructions too. On a GPU the larger
sizes are trained in bfloat16, images of the peers with channels last.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from cpu import TITLES, Measurement, console, missing, number, pairs
from families import ZOO
from levels import add_target, restricted
from rich.table import Table
from turns import CLOCKS, Ratio, machine, use_threads
from zoo_peers import CONTENDERS, first_values

TITLES |= {"channels-last": "channels last", "reduce-overhead": "reduce-overhead"}
ON_CPU, ON_GPU = "eager,channels-last,compile", "eager,compile,reduce-overhead"


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """What a row is a measurement of: a second one replaces the first."""
    return tuple(row[k] for k in ("workload", "device", "target", "threads", "clock"))


def added(path: Path | None, row: dict[str, Any], head: dict[str, Any]) -> None:
    """Write a row into a file that may have others."""
    if path is None:
        return
    rows = [r for r in stored(path) if key(r) != key(row)]
    text = json.dumps(head | {"rows": [*rows, row]}, indent=1)
    path.write_text(text, encoding="utf-8")


def stored(path: Path | None) -> list[dict[str, Any]]:
    if path is None or not path.exists():
        return []
    return list(json.loads(path.read_text(encoding="utf-8"))["rows"])


def measured(name: str, peers: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """One entry, beside the peers that apply to it."""
    names = [p for p in peers if p != "channels-last" or ZOO[name].is_image]
    variables = options.environment | restricted(options.target)
    measurement = Measurement(name, ["treadle", *names], options, variables, "zoo_peers")
    row = measurement.run(first_values(name, options.device), device=options.device)
    facts = ("device", "target", "threads", "clock", "rounds")
    return row | {fact: getattr(options, fact) for fact in facts}


def table(rows: list[dict[str, Any]], names: list[str]) -> None:
    speed = Table("entry", title="ms a step, and Treadle's time over the best peer's")
    for name in names:
        speed.add_column(f"{TITLES[name]} ms", justify="right")
    speed.add_column("ratio to the best", justify="right")
    for row in rows:
        cells = [number(row["contenders"].get(n, {}).get("ms"), 4) for n in names]
        best = "–"
        if "ratio" in row:
            best = f"{Ratio(**row['ratios'][row['best_peer']])} {row['best_peer']}"
        mark = " LOSSES DIFFER" if row["agree"] is False else " (rough)" if row["is_rough"] else ""
        speed.add_row(row["workload"] + mark, *cells, best)
    console.print(speed)
    ratios = {r["workload"]: r["ratio"] for r in rows if "ratio" in r}
    if ratios:
        worst = max(ratios, key=lambda n: ratios[n])
        mean = statistics.geometric_mean(ratios.values())
        console.print(f"geometric mean {mean:.2f}, the worst {worst} {ratios[worst]:.2f}")


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("entries", nargs="*", help=f"of {', '.join(ZOO)}; all if none")
    parser.add_argument("--peers", help=f"default {ON_CPU}; on a GPU {ON_GPU}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    add_target(parser)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--clock", choices=list(CLOCKS), default="perf_counter")
    parser.add_argument("--patience", type=float, default=10)
    parser.add_argument("--cold", action="store_true", help="first steps, too")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", action="store_true", help="only print what the file has")
    options = parser.parse_args(arguments)
    default = ON_GPU if options.device == "cuda" else ON_CPU
    options.peers = (options.peers or default).split(",")
    for given, known in ((options.entries, ZOO), (options.peers, CONTENDERS)):
        unknown = [g for g in given if g not in known]
        if unknown:
            parser.error(f"{', '.join(unknown)}: use {', '.join(known)}")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = options_of(arguments)
    if options.table:
        rows = stored(options.json)
        return table(rows, [n for n in CONTENDERS if any(n in r["contenders"] for r in rows)])
    options.environment = use_threads(options.threads)
    peers = [p for p in options.peers if missing(p) is None]
    head, rows = machine(), []
    console.print(f"{head['processor']}, {options.threads} threads, load {head['load']:.2f} before")
    for name in options.entries or ZOO:
        rows.append(measured(name, peers, options))
        added(options.json, rows[-1], head)
        times = (f"{n} {number(f.get('ms'), 4)}" for n, f in rows[-1]["contenders"].items())
        console.print(f"{name}: {', '.join(times)} ms")
    table(rows, ["treadle", *peers])
    every = ["treadle", *peers]
    for row in rows:
        row["contenders"] = {n: row["contenders"].get(n, {}) for n in every}
    if options.cold:
        console.print(pairs(rows, every, "first step, s: cold / warm", "first_cold_s first_warm_s"))
    if options.memory:
        console.print(pairs(rows, every, "memory, MiB: peak / of steps", "peak_mib steps_mib"))
    return None


if __name__ == "__main__":
    main()
