"""What the rules of the e-graph are worth: steps of the zoo with and without them, in turns.

usage: python bench/rules.py [entry or workload ...] [--device cpu] [--rounds 7] [--threads 1]
                             [--clock process_time] [--json FILE]

Both graphs of each entry are built. Where the rules change nothing the programs are the same, and
the ratio is 1 without a measurement; the others are timed, each side in a process of its own. Of
workloads of models.py only the search is.

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
import statistics
import time
import warnings
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from families import ZOO
from families.entry import Entry
from peers import BETAS, DECAY, EPSILON, RATE
from turns import (
    CLOCKS,
    Contender,
    Patience,
    Ratio,
    Running,
    Worker,
    machine,
    take_turns,
    use_threads,
)
from zoo_peers import first_values, on_device, prepare, specs

import treadle as td
from models import FOR_GPUS, WORKLOADS
from models import loss as workload_loss
from treadle import optim
from treadle.egraph.language import own_rules
from treadle.egraph.optimize import optimise
from treadle.nn.tracing import Inputs
from treadle.optim.append import Mode
from treadle.pipeline import CompileReport, StepRecipe, build_step, choose_precision, target_of

TURN = 0.3  # seconds
SIDES = {"with": True, "without": False}


@dataclass
class Found:
    """What the rules do to an entry's graph."""

    seconds: float
    part: float
    fired: dict[str, int]
    cost: float  # modelled, after over before
    rules: Counter[str]
    ratio: Ratio = field(default_factory=lambda: Ratio(1.0, 1.0, 1.0))
    memory: float = 1.0


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
    step, batch = step_of(entry, device, rewrite), on_device(entry, device)
    last: list[Any] = [None]

    def run() -> None:
        last[0] = step(batch)

    def forecast() -> float:
        return step.report.peak_bytes / 2**20

    return Running(run, lambda: last[0].loss, lambda: float(last[0].loss), forecast)


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
    rules = report.rules + result.fired
    return Found(seconds, seconds / (seconds + built), dict(result.fired), cost, rules)


def timed(name: str, found: Found, given: argparse.Namespace) -> None:
    """Both sides of an entry, in turns."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(given.folder()))
        values = folder / "values.npz"
        np.savez(values, **first_values(name, given.device))  # type: ignore[arg-type]
        task = {"workload": name, "values": str(values), "device": given.device}
        workers, memory, losses = [], [], []
        for side in SIDES:
            worker = Worker("rules", side, {**given.environment, "TREADLE_CACHE": "off"})
            stack.callback(worker.close)
            answer = worker.ask("build", task=task, memory=True)
            memory.append(answer["steps_mib"])
            losses.append(answer["values"])
            workers.append(worker)
        np.testing.assert_allclose(
            losses[0], losses[1], rtol=3e-2 if given.is_narrow(name) else 1e-3
        )
        turns = take_turns(workers, given.rounds, TURN, Patience(0), given.clock)
        found.ratio = Ratio.of(turns.ms["with"], turns.ms["without"])
        found.memory = memory[0] / memory[1]


def told(name: str, found: Found) -> str:
    r = found.ratio
    time_ = f"{r.median:.3f} ({r.low:.3f}–{r.high:.3f})" if found.fired else "same program"
    rules = ", ".join(f"{rule} {n}" for rule, n in found.fired.items())
    search = f"search {found.seconds:.3f} s, {found.part:.0%}"
    costs = f"memory {found.memory:.3f}  cost {found.cost:.3f}"
    return f"{name:<16}time {time_:<22}{costs}  {search}  {rules}"


def conclude(every: dict[str, Found]) -> dict[str, Any]:
    mean = statistics.geometric_mean
    rules: Counter[str] = sum((f.rules for f in every.values()), Counter())
    names = {rule.name for rule in own_rules()}
    data = sum(n for rule, n in rules.items() if rule in names)
    facts = {
        "entries": len(every),
        "changed": sum(bool(f.fired) for f in every.values()),
        "time": mean([f.ratio.median for f in every.values()]),
        "worst": max((f.ratio.median, name) for name, f in every.items()),
        "memory": mean([f.memory for f in every.values()]),
        "search_s": max((f.seconds, name) for name, f in every.items()),
        "applications": rules.total(),
        "of_rules_txt": data,
    }
    print(
        f"{facts['entries']} entries, {facts['changed']} with another program: geometric mean of "
        f"time {facts['time']:.4f} and memory {facts['memory']:.4f}, the slowest "
        f"{facts['worst'][1]} {facts['worst'][0]:.3f}; longest search {facts['search_s'][0]:.3f} s "
        f"({facts['search_s'][1]})\n{data:,} of {rules.total():,} applications are of rules.txt"
    )
    return facts


def main() -> None:
    import tempfile

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("entries", nargs="*", default=[], metavar="entry")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", default="process_time", choices=CLOCKS)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    given.environment = use_threads(given.threads)
    given.folder = tempfile.TemporaryDirectory
    given.is_narrow = lambda name: ZOO[name].precision(given.device) != "float32"
    warnings.simplefilter("ignore")
    every: dict[str, Found] = {}
    for name in given.entries or ZOO:
        every[name] = searched(name, given.device)
        if every[name].fired and name in ZOO:
            timed(name, every[name], given)
        print(told(name, every[name]), flush=True)
    facts = conclude(every)
    if given.json:
        given.json.write_text(json.dumps({"machine": machine(), **facts}, indent=1))


if __name__ == "__main__":
    main()
