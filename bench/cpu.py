"""Whole training steps on the CPU, float32, AdamW: Treadle and its peers in turns.

usage: python bench/cpu.py [workload ...] [--rounds 7] [--threads 2] [--peers eager,compile,jax]
                           [--no-cold] [--no-memory] [--patience 60] [--clock process_time]
                           [--target v3] [--json FILE]

ms      median over the rounds; in each round every contender has a turn of about 0.3 s. Turns
        wait until other processes are done, for --patience seconds in all; a turn that was
        disturbed is taken again; rounds that stay disturbed are left out, unless they are the most
ratio   Treadle's time over a peer's, lower is faster: the median of the rounds' ratios, and its
        quartiles; the best peer is the one with the smallest ms
cold    seconds from building the model to the first step's result in a fresh process with empty
        caches; imports are not counted, what is imported on the way is
warm    the same with the caches that the cold start filled
memory  growth of the process in MiB from after the imports: the peak with building (warm, if cold
        starts are measured), and the peak of later steps
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from levels import add_target, restricted
from measurement import PEERS, TITLES, Measurement, missing, number
from rich.console import Console
from rich.table import Table
from turns import CLOCKS, Ratio, machine, use_threads

from models import FOR_GPUS, WORKLOADS

console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)


def tables(rows: list[dict[str, Any]], names: list[str], options: argparse.Namespace) -> None:
    peers = [n for n in names if n != "treadle"]
    speed = Table(
        "workload", title="ms a step, and Treadle's time over the peer's (lower is faster)"
    )
    for name in names:
        speed.add_column(f"{TITLES[name]} ms", justify="right")
    for name in peers:
        speed.add_column(f"/ {TITLES[name]}", justify="right")
    speed.add_column("/ best peer", justify="right")
    for row in rows:
        cells = [number(row["contenders"][n].get("ms"), 4) for n in names]
        ratios = [str(Ratio(**row["ratios"][n])) if n in row["ratios"] else "–" for n in peers]
        best = f"{row['ratio']:.2f} ({row['best_peer']})" if "ratio" in row else "–"
        mark = " LOSSES DIFFER" if row["agree"] is False else " (rough)" if row["is_rough"] else ""
        speed.add_row(row["workload"] + mark, *cells, *ratios, best)
    console.print(speed)
    if options.cold:
        console.print(pairs(rows, names, "first step, s: cold / warm", "first_cold_s first_warm_s"))
    if options.memory:
        console.print(pairs(rows, names, "memory, MiB: peak / of steps", "peak_mib steps_mib"))


def pairs(rows: list[dict[str, Any]], names: list[str], title: str, keys: str) -> Table:
    table = Table("workload", title=title)
    for name in names:
        table.add_column(TITLES[name], justify="right")
    for row in rows:
        found = [row["contenders"][n] for n in names]
        cells = [" / ".join(number(f.get(key), 3) for key in keys.split()) for f in found]
        table.add_row(row["workload"], *cells)
    return table


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("workloads", nargs="*", help=f"of {', '.join(WORKLOADS)}; all if none")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peers", default=",".join(PEERS), help="of those installed; may be empty")
    parser.add_argument("--no-cold", dest="cold", action="store_false", help="no first steps")
    parser.add_argument("--no-memory", dest="memory", action="store_false")
    parser.add_argument(
        "--patience",
        type=float,
        default=60,
        help="seconds a workload may wait for other processes (60)",
    )
    parser.add_argument(
        "--clock",
        choices=list(CLOCKS),
        default="perf_counter",
        help="process_time, with --threads 1, is for a machine that others use",
    )
    add_target(parser)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    options.workloads = options.workloads or [n for n in WORKLOADS if n not in FOR_GPUS]
    options.peers = [p for p in options.peers.split(",") if p]
    for given, known in ((options.workloads, WORKLOADS), (options.peers, PEERS)):
        unknown = [g for g in given if g not in known]
        if unknown:
            parser.error(f"{', '.join(unknown)}: use {', '.join(known)}")
    if options.rounds < 1 or options.threads < 1:
        parser.error("--rounds and --threads are at least 1")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = options_of(arguments)
    variables = use_threads(options.threads) | restricted(options.target)
    variables["JAX_PLATFORMS"] = "cpu"  # it would take a GPU that is there
    reasons = {p: missing(p) for p in options.peers}
    for peer, reason in reasons.items():
        if reason:
            console.print(f"{TITLES[peer]} is left out: {reason}")
    names = ["treadle", *(p for p, reason in reasons.items() if reason is None)]
    head = machine() | {"threads": options.threads, "rounds": options.rounds}
    head["target"] = options.target
    console.print(f"{head['processor']}, {options.threads} threads, load {head['load']:.2f} before")
    rows: list[dict[str, Any]] = []
    for workload in options.workloads:
        first_values = WORKLOADS[workload].make().init(0)
        row = Measurement(workload, names, options, variables).run(first_values)
        rows.append(row)
        times = ", ".join(f"{n} {number(f.get('ms'), 4)}" for n, f in row["contenders"].items())
        console.print(f"{workload}: {times} ms")
        if options.json:  # after each, so that what was measured is kept
            text = json.dumps(head | {"workloads": rows}, indent=1)
            options.json.write_text(text, encoding="utf-8")
    tables(rows, names, options)


if __name__ == "__main__":
    main()
