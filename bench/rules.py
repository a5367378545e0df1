"""What the rules of the e-graph are worth: steps of the zoo with and without them, in turns.

usage: python bench/rules.py [entry or workload ...] [--device cpu] [--rounds 7] [--threads 1]
                             [--clock process_time] [--together 1] [--seconds 240] [--json FILE]

Both graphs of each entry are built. Where the rules change nothing the programs are the same, and
the ratio is 1 without a measurement; so it is where the program of the changed graph is not leaner,
so that it is not taken, and where both graphs come to the same kernels. The others are timed, each
side in a process of its own. Of workloads of models.py only the search is.
On a GPU: in bfloat16 where the zoo is, by the clock, several entries prepared at once (--together);
programs are loaded one at a time, as loading times the algorithms of libraries. After --seconds no
further entries are begun. Results are added to those that the file has: the last lines are of all.

time    with rules over without: the median of the rounds' ratios, and its quartiles
memory  the forecast of both programs, likewise
search  seconds of the e-graph, and its part of building the graph

The last lines have geometric means over all entries, and how many applications of rules were of
which set: those of rules.txt can be proved for all sizes.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import json
import os
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from families import ZOO
from families.entry import Entry
from measurement import CLOSE, CLOSE_NARROW, Measurement, started
from peers import BETAS, DECAY, EPSILON, RATE
from same_programs import likeness, load_in_turn, step_digests, target_without_device
from turns import CLOCKS, Contender, Ratio, Running, machine, use_threads
from zoo_peers import first_values, on_device, prepare, specs

import treadle as td
from models import FOR_GPUS, WORKLOADS
from models import loss as workload_loss
from treadle import optim
from treadle.backends.scheduling import is_leaner
from treadle.egraph.language import own_rules
from treadle.egraph.optimize import optimise
from treadle.nn.tracing import Inputs
from treadle.optim.append import Mode
from treadle.pipeline import CompileReport, StepRecipe, build_step, choose_precision, target_of

SIDES = {"with": True, "without": False}


@dataclass
class Found:
    """What the rules do to an entry's graph."""

    seconds: float
    part: float
    fired: dict[str, int]
    cost: float  # modelled, after over before
    rules: dict[str, int]
    refused: dict[str, int]  # what would have been applied, had its program been leaner
    ratio: Ratio = field(default_factory=lambda: Ratio(1.0, 1.0, 1.0))
    memory: float = 1.0
    is_same: bool = False  # the same kernels, or the same graph
    failed: str = ""  # why there is no ratio


def step_of(entry: Entry, device: str, rewrite: bool) -> td.TrainStep:
    side = importlib.import_module("families.with_treadle")
    return td.compile_step(
        entry.make(side, **entry.sizes(device)),
        lambda model, batch: model(batch),
        optim.adamw(RATE, BETAS, EPSILON, DECAY),
        specs(entry.arrays(device)),
        device=device,
        precision=entry.precision(device),
        seed=0,
        options=td.CompileOptions(rewrite=rewrite),
    )


def start(rewrite: bool, entry: Entry, device: str, values: Any) -> Running:
    if device == "cuda":
        load_in_turn()
    step, batch = step_of(entry, device, rewrite), on_device(entry, device)
    last: list[Any] = [None]

    def run() -> None:
        last[0] = step(batch)

    def forecast() -> float:
        return step.report.peak_bytes / 2**20

    return Running(
        run,
        lambda: last[0].loss,
        lambda: float(last[0].loss),
        forecast,
        lambda: {"digests": step_digests(step)},
    )


CONTENDERS = {
    name: Contender(name, (), functools.partial(prepare, functools.partial(start, rewrite)))
    for name, rewrite in SIDES.items()
}


def recipe_of(name: str, device: str) -> tuple[StepRecipe, Inputs]:
    """Of an entry of the zoo, or of a workload of models.py."""
    optimizer, off = optim.adamw(RATE, BETAS, EPSILON, DECAY), td.CompileOptions(rewrite=False)
    if name in ZOO:
        entry, side = ZOO[name], importlib.import_module("families.with_treadle")
        model, precision = entry.make(side, **entry.sizes(device)), entry.precision(device)
        loss: Any = lambda model, batch: model(batch)  # noqa: E731
        types, clip = specs(entry.arrays(device)), None
    else:
        work = WORKLOADS[name]
        precision = "bfloat16" if device == "cuda" and name in FOR_GPUS else "float32"
        model, loss, types, clip = work.make(), workload_loss, work.specs(), work.clip
    narrow = choose_precision(precision)
    return StepRecipe(model, loss, optimizer, "step0:", 1, clip, narrow, off), Inputs.of(types)


def searched(name: str, device: str) -> Found:
    """The e-graph on an entry's graph."""
    recipe, inputs = recipe_of(name, device)
    report = CompileReport(device, recipe.precision.name)
    begin = time.process_time()
    graph = build_step(recipe, recipe.plan(), inputs, report)[Mode.UPDATE]
    built = time.process_time() - begin
    gc.disable()
    begin = time.process_time()
    result = optimise(graph, target_of(device))
    seconds = time.process_time() - begin
    gc.enable()
    cost = result.after / result.before if result.before else 1.0
    part, fired, refused = seconds / (seconds + built), result.fired, dict[str, int]()
    if fired and not is_leaner(result.graph, graph, recipe.options, target_without_device(device)):
        fired, refused, cost = Counter(), dict(fired), 1.0
    rules = dict(report.rules + fired)
    return Found(seconds, part, dict(fired), cost, rules, refused, is_same=not fired)


def timed(every: dict[str, Found], given: argparse.Namespace) -> Iterator[str]:
    """Both sides of some entries, in turns; the entries that are done."""

    def prepared(each: Measurement, folder: Path) -> None:
        each.prepare(folder, first_values(each.workload, given.device), device=given.device)

    contests = [contest(name, given) for name in every]
    for each in started(contests, prepared):
        found, sides = every[each.workload], [each.found[s] for s in SIDES]
        errors = [s["error"] for s in sides if "error" in s]
        found.failed = "; ".join(errors)
        if not errors:
            found.memory = sides[0]["steps_mib"] / sides[1]["steps_mib"]
            found.is_same = likeness(*(s["digests"] for s in sides)) == "same program"
        if not errors and not found.is_same:
            each.finish()
            found.failed = "" if each.agree else "the losses differ"
            found.ratio = Ratio.of(sides[0]["round_ms"], sides[1]["round_ms"])
        yield each.workload


def contest(name: str, given: argparse.Namespace) -> Measurement:
    is_narrow = ZOO[name].precision(given.device) != "float32"
    close = CLOSE_NARROW if is_narrow else CLOSE
    return Measurement(name, list(SIDES), given, given.environment, "rules", close)


def told(name: str, found: Found) -> str:
    r = found.ratio
    time_ = f"{r.median:.3f} ({r.low:.3f}–{r.high:.3f})"
    if found.is_same:
        time_ = "same kernels" if found.fired else "same program"
    rules = ", ".join(f"{rule} {n}" for rule, n in (found.fired or found.refused).items())
    rules = f"not leaner: {rules}" if found.refused else rules
    search = f"search {found.seconds:.3f} s, {found.part:.0%}"
    costs = f"memory {found.memory:.3f}  cost {found.cost:.3f}"
    failed = f"  FAILED: {found.failed[:300]}" if found.failed else ""
    return f"{name:<16}time {time_:<22}{costs}  {search}  {rules}{failed}"


def conclude(every: dict[str, Found]) -> dict[str, Any]:
    mean = statistics.geometric_mean
    rules: Counter[str] = sum((Counter(f.rules) for f in every.values()), Counter())
    names = {rule.name for rule in own_rules()}
    data = sum(n for rule, n in rules.items() if rule in names)
    right = {n: f for n, f in every.items() if not f.failed}
    facts = {
        "entries": len(every),
        "failed": sorted(every.keys() - right.keys()),
        "changed": sorted(n for n, f in every.items() if not f.is_same),
        "time": mean([f.ratio.median for f in right.values()]),
        "worst": max((f.ratio.median, name) for name, f in right.items()),
        "memory": mean([f.memory for f in right.values()]),
        "search_s": max((f.seconds, name) for name, f in every.items()),
        "applications": rules.total(),
        "of_rules_txt": data,
    }
    print(
        f"{facts['entries']} entries, {len(facts['changed'])} with another program: geometric mean "
        f"of time {facts['time']:.4f} and memory {facts['memory']:.4f}, the slowest "
        f"{facts['worst'][1]} {facts['worst'][0]:.3f}; longest search {facts['search_s'][0]:.3f} s "
        f"({facts['search_s'][1]}); failed: {', '.join(facts['failed']) or 'none'}\n"
        f"{data:,} of {rules.total():,} applications are of rules.txt"
    )
    return facts


def stored(path: Path | None) -> dict[str, dict[str, Found]]:
    """What a file has, by device and entry."""
    if path is None or not path.exists():
        return {}
    devices: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["entries"]
    return {
        device: {n: Found(**{**f, "ratio": Ratio(**f["ratio"])}) for n, f in every.items()}
        for device, every in devices.items()
    }


def searched_at_once(names: list[str], given: argparse.Namespace) -> Iterator[tuple[str, Found]]:
    """The search of each entry: several processes where entries are prepared at once."""
    if given.together == 1:
        yield from ((name, searched(name, given.device)) for name in names)
        return
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        yield from zip(names, pool.map(searched, names, [given.device] * len(names)), strict=True)


def measured(given: argparse.Namespace) -> Iterator[tuple[str, Found]]:
    """Entries as they are done."""
    begin, names = time.perf_counter(), given.entries or list(ZOO)
    changed: dict[str, Found] = {}
    for name, found in searched_at_once(names, given):
        if found.fired and name in ZOO:
            changed[name] = found
        else:
            yield name, found
    left = list(changed)
    while left and time.perf_counter() - begin < given.seconds:
        now, left = left[: given.together], left[given.together :]
        yield from ((n, changed[n]) for n in timed({n: changed[n] for n in now}, given))
    if left:
        print(f"time is up: {', '.join(left)} left for another run")


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("entries", nargs="*", default=[], metavar="entry")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, help="default 1; on a GPU all")
    parser.add_argument("--clock", choices=CLOCKS, help="default process_time; on a GPU the clock")
    parser.add_argument("--together", type=int, help="entries prepared at once: 1; on a GPU 8")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="no entries after so many"
    )
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    is_gpu = given.device == "cuda"
    given.threads = given.threads or (len(os.sched_getaffinity(0)) if is_gpu else 1)
    given.clock = given.clock or ("perf_counter" if is_gpu else "process_time")
    given.together = given.together or (8 if is_gpu else 1)
    # Of what other benchmarks ask: nobody waits for a quiet machine, or for a compiler for ever.
    given.patience, given.patience_compile = 0.0, 150.0
    given.environment = use_threads(given.threads)
    return given


def main() -> None:
    given = options_of()
    warnings.simplefilter("ignore")
    devices = stored(given.json)
    every = devices.setdefault(given.device, {})
    for name, found in measured(given):
        every[name] = found
        print(told(name, found), flush=True)
        if given.json:
            tables = {d: {n: asdict(f) for n, f in e.items()} for d, e in devices.items()}
            text = json.dumps({"machine": machine(), "entries": tables}, indent=1)
            given.json.write_text(text + "\n", encoding="utf-8")
    conclude(every)


if __name__ == "__main__":
    main()
