"""The zoo: training steps of many families, Treadle beside PyTorch in turns, from equal weights.

usage: python bench/zoo.py [entry ...] [--peers eager,channels-last,compile] [--rounds 5]
                           [--threads 2] [--target v3] [--device cpu] [--clock process_time]
                           [--together 6] [--patience-compile 150] [--seconds 600]
                           [--json FILE] [--table]

The method is that of cpu.py: a process for each contender with empty caches, turns in one run, the
median ratio of the rounds. --together starts the contenders of several entries at once, because
compiling is work of processors; then entries are timed one after the other, everybody else standing
still. First steps are rough there. A contender that is not ready in time is left out, with a note.
Results are added to those that the file has, so that a run may be cut in parts; --table prints what
it has. --target restricts the peers' instructions too. On a GPU the larger sizes are trained in
bfloat16 (where an entry says so, in float32), images of the peers with channels last; batches are
on the device already.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from families import ZOO
from levels import add_target, restricted
from measurement import CLOSE, CLOSE_NARROW, TITLES, Measurement, missing, number, started
from turns import CLOCKS, Ratio, machine, use_threads
from zoo_peers import CONTENDERS, first_values
from zoo_rows import Row, added, first_figure, stored, summary

TITLES |= {"channels-last": "channels last", "reduce-overhead": "reduce-overhead"}
ON_CPU, ON_GPU = "eager,channels-last,compile", "eager,compile,reduce-overhead"


def contest(name: str, options: argparse.Namespace) -> Measurement:
    """An entry and the peers that apply to it."""
    peers = [p for p in options.peers if p != "channels-last" or ZOO[name].is_image]
    variables = options.environment | restricted(options.target)
    if options.together > 1:  # the compiler's own processes share the machine, too
        workers = max(1, len(os.sched_getaffinity(0)) // options.together)
        variables["TORCHINDUCTOR_COMPILE_THREADS"] = str(workers)
    is_narrow = ZOO[name].precision(options.device) != "float32"
    close = CLOSE_NARROW if is_narrow else CLOSE
    return Measurement(name, ["treadle", *peers], options, variables, "zoo_peers", close)


def measured(names: list[str], options: argparse.Namespace) -> Iterator[Row]:
    """Entries that are started together and timed one after the other."""
    contests = [contest(name, options) for name in names]
    for each in started(contests, lambda c, folder: prepare(c, folder, options.device)):
        facts = ("device", "target", "threads", "clock", "rounds", "together")
        yield each.finish() | {fact: getattr(options, fact) for fact in facts}


def prepare(each: Measurement, folder: Path, device: str) -> None:
    each.prepare(folder, first_values(each.workload, device), device=device)


def table(rows: list[Row]) -> None:
    """Figures of the best peer stand behind a slash."""
    names = [n for n in CONTENDERS if any(n in r["contenders"] for r in rows)]
    figure = first_figure(rows)
    rough = ", rough" if any(r.get("together", 1) > 1 for r in rows) else ""
    lines = [["ms a step", *names, "ratio to the best", f"first step s{rough}", "memory MiB"]]
    for row in rows:
        cells = [number(row["contenders"].get(n, {}).get("ms"), 4) for n in names]
        best = "–"
        if "ratio" in row:
            best = f"{Ratio(**row['ratios'][row['best_peer']])} {row['best_peer']}"
        mark = " LOSSES DIFFER" if row["agree"] is False else " (rough)" if row["is_rough"] else ""
        both = [row["contenders"].get(n, {}) for n in ("treadle", row.get("best_peer", ""))]
        others = [" / ".join(number(f.get(k), 3) for f in both) for k in (figure, "steps_mib")]
        lines.append([row["workload"] + mark, *cells, best, *others])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *cells in lines:
        shown = "  ".join(c.rjust(w) for c, w in zip(cells, widths[1:], strict=True))
        print(f"{first.ljust(widths[0])}  {shown}")


def conclude(rows: list[Row]) -> None:
    """What the rows of each device and target come to."""
    found = sorted(rows, key=place)
    for (device, target), some in itertools.groupby(found, key=place):
        group = list(some)
        facts = summary(group)
        print(f"{device}, {target}: {facts['entries']} entries")
        table(group)
        if facts["ratio"] is None:
            continue
        lines = [
            f"geometric mean of the ratio {facts['ratio']:.2f}, "
            f"the worst {facts['worst']} {facts['worst_ratio']:.2f}",
            f"slower than a peer: {', '.join(facts['slower']) or 'none'}",
            f"first step {number(facts['first_s'], 3)} s (geometric mean), "
            f"the best peer's {number(facts['first_peer_s'], 3)} s; "
            f"the slowest {facts['slowest_first'][0]} {number(facts['slowest_first'][1], 3)} s",
            f"memory over the best peer's {number(facts['memory'], 3)} (geometric mean)",
            *(f"losses differ: {name}" for name in facts["differ"]),
            *(f"left out: {who}: {why[:200]}" for who, why in facts["left_out"].items()),
        ]
        print("\n".join(lines), flush=True)


def place(row: Row) -> tuple[str, str]:
    return row["device"], row["target"]


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("entries", nargs="*", help=f"of {', '.join(ZOO)}; all if none")
    parser.add_argument("--peers", help=f"default {ON_CPU}; on a GPU {ON_GPU}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, help="default 2; on a GPU all")
    add_target(parser)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--clock", choices=list(CLOCKS), default="perf_counter")
    parser.add_argument("--patience", type=float, default=10, help="seconds until all is quiet")
    parser.add_argument("--together", type=int, default=1, help="entries started at once")
    parser.add_argument("--patience-compile", type=float, default=150, help="seconds until ready")
    parser.add_argument("--seconds", type=float, help="no further entries after so many")
    parser.add_argument("--missing", action="store_true", help="only what the file has not")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", action="store_true", help="only print what the file has")
    options = parser.parse_args(arguments)
    is_gpu = options.device == "cuda"
    options.peers = (options.peers or (ON_GPU if is_gpu else ON_CPU)).split(",")
    options.threads = options.threads or (len(os.sched_getaffinity(0)) if is_gpu else 2)
    for given, known in ((options.entries, ZOO), (options.peers, CONTENDERS)):
        unknown = [g for g in given if g not in known]
        if unknown:
            parser.error(f"{', '.join(unknown)}: use {', '.join(known)}")
    return options


def asked(options: argparse.Namespace) -> list[str]:
    """The entries to measure."""
    names = options.entries or list(ZOO)
    if not options.missing:
        return names
    rows = [r for r in stored(options.json) if place(r) == (options.device, options.target)]
    return [n for n in names if n not in {r["workload"] for r in rows}]


def graphics_card() -> str:
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def main(arguments: list[str] | None = None) -> None:
    options = options_of(arguments)
    if options.table:
        return conclude(stored(options.json))
    start = time.perf_counter()
    options.environment = use_threads(options.threads)
    options.peers = [p for p in options.peers if missing(p) is None]
    head: Row = machine() | {"date": datetime.date.today().isoformat()}
    head |= {"gpu": graphics_card()} if options.device == "cuda" else {}
    rows: list[Row] = []
    print(f"{head['processor']}, {options.threads} threads, load {head['load']:.2f} before")
    names = asked(options)
    for i in range(0, len(names), options.together):
        if options.seconds is not None and time.perf_counter() - start > options.seconds:
            print(f"time is up: {', '.join(names[i:])} left for another run")
            break
        for row in measured(names[i : i + options.together], options):
            rows.append(row | head)
            added(options.json, rows[-1])
            times = (f"{n} {number(f.get('ms'), 4)}" for n, f in row["contenders"].items())
            passed = time.perf_counter() - start
            print(f"{passed:4.0f} s  {row['workload']}: {', '.join(times)} ms", flush=True)
    return conclude(rows)


if __name__ == "__main__":
    main()
