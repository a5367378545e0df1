"""Cross-entropy through a head, forward and backward: streamed, and with its logits in memory.

    python bench/linear_cross_entropy.py
    python bench/linear_cross_entropy.py --rows 2048 --width 768 --classes 50257 --rounds 5

Contenders take turns as in `turns.py`: `fused` is `losses.linear_cross_entropy`, `unfused` is
`losses.cross_entropy` of `td.linear`, `torch` is the same in eager PyTorch where it is installed.
Each gives the loss and the gradients of hidden states and weight.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from turns import Contender, Patience, Ratio, Running, Worker, machine, take_turns, use_threads

CLOSE = 1e-4  # relative distance of two contenders' losses
MIB = 1 << 20


@dataclass(frozen=True)
class Task:
    rows: int
    width: int
    classes: int

    @property
    def logits(self) -> int:
        """Their bytes."""
        return self.rows * self.classes * 4

    @property
    def results(self) -> int:
        """Bytes of the loss and the gradients, which no contender can do without."""
        return 4 * (1 + (self.rows + self.classes) * self.width)

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rng = np.random.default_rng(0)
        x = rng.standard_normal((self.rows, self.width), np.float32)
        weight = rng.standard_normal((self.classes, self.width), np.float32)
        weight /= np.float32(self.width**0.5)
        return x, weight, rng.integers(0, self.classes, self.rows).astype(np.int32)


# --- contenders -------------------------------------------------------------------------------


def compiled(task: Task, is_fused: bool) -> Any:
    import treadle as td
    from treadle import losses

    def fused(x: Any, weight: Any, target: Any) -> Any:
        return losses.linear_cross_entropy(x, weight, target).tensor()

    def unfused(x: Any, weight: Any, target: Any) -> Any:
        return losses.cross_entropy(td.linear(x, weight), target).tensor()

    types = [td.Spec((task.rows, task.width)), td.Spec((task.classes, task.width))]
    types.append(td.Spec((task.rows,), td.int32))
    both = td.value_and_grad(fused if is_fused else unfused, (0, 1))
    return td.compile(both, *types, device="cpu")


def treadle_start(task: Task, is_fused: bool) -> Running:
    arrays, program = task.arrays(), compiled(task, is_fused)
    found: list[Any] = []

    def step() -> None:
        found[:] = [program(*arrays)]

    return Running(step, lambda: None, lambda: float(found[0][0]))


def torch_start(task: Task) -> Running:
    import torch
    import torch.nn.functional as F

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    x, weight, target = map(torch.tensor, task.arrays())
    x.requires_grad_()
    weight.requires_grad_()
    indices, found = target.long(), [0.0]

    def step() -> None:
        x.grad = weight.grad = None
        loss = F.cross_entropy(F.linear(x, weight), indices)
        loss.backward()
        found[0] = loss.item()

    return Running(step, lambda: None, lambda: found[0])


def contender(name: str, modules: tuple[str, ...], start: Callable[[Task], Running]) -> Contender:
    def prepare(task: dict[str, Any]) -> Callable[[], Running]:
        return functools.partial(start, Task(**task))

    return Contender(name, modules, prepare)


CONTENDERS = {
    "fused": contender("fused", ("treadle",), functools.partial(treadle_start, is_fused=True)),
    "unfused": contender("unfused", ("treadle",), functools.partial(treadle_start, is_fused=False)),
    "torch": contender("torch", ("torch",), torch_start),
}


# --- measuring --------------------------------------------------------------------------------


def planned(task: Task, is_fused: bool) -> int:
    """Bytes that a program holds beside its arguments and results."""
    facts = compiled(task, is_fused).report.programs[0]
    return int(facts.nbytes - task.results)


def measure(
    task: Task, environment: dict[str, str], rounds: int, seconds: float, patience: float
) -> dict[str, Any]:
    names = [n for n in CONTENDERS if n != "torch" or importlib.util.find_spec("torch")]
    with ExitStack() as stack:
        workers = []
        answers: dict[str, dict[str, Any]] = {}
        for name in names:
            worker = Worker("linear_cross_entropy", name, environment)
            stack.callback(worker.close)
            workers.append(worker)
            answers[name] = worker.ask("build", task=asdict(task), memory=True)
        turns = take_turns(workers, rounds, seconds, Patience(patience))
    losses = {n: a["values"][0] for n, a in answers.items()}
    assert max(losses.values()) - min(losses.values()) <= CLOSE * max(losses.values()), losses
    ms = turns.ms
    return {
        "task": asdict(task),
        "logits_mib": task.logits / MIB,
        "ms": ms,
        "ratio_to_unfused": {n: asdict(Ratio.of(v, ms["unfused"])) for n, v in ms.items()},
        "steps_mib": {n: a.get("steps_mib") for n, a in answers.items()},
        "planned_mib": {n: planned(task, n == "fused") / MIB for n in ("fused", "unfused")},
        "disturbed_rounds": turns.disturbed,
        "is_rough": turns.are_rough,
        "best": turns.best,
    }


def table(row: dict[str, Any]) -> Table:
    found = Table("contender", "best ms", "ratio to unfused", "MiB beside results", "of the logits")
    for name, best in row["best"].items():
        ratio = str(Ratio(**row["ratio_to_unfused"][name]))
        extra = row["planned_mib"].get(name)
        memory = ["–", "–"]
        if extra is not None:
            memory = [f"{extra:.1f}", f"{extra / row['logits_mib']:.2%}"]
        found.add_row(name, f"{best:.0f}", ratio, *memory)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--classes", type=int, default=50257)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="of a turn; three steps at least"
    )
    parser.add_argument("--patience", type=float, default=300.0)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    environment = use_threads(given.threads)
    task, console = Task(given.rows, given.width, given.classes), Console()
    row = measure(task, environment, given.rounds, given.seconds, given.patience)
    console.print(table(row))
    if row["disturbed_rounds"]:
        rough = "the figures are rough" if row["is_rough"] else "they are left out"
        console.print(f"other processes were busy in {row['disturbed_rounds']} rounds: {rough}")
    if given.json:
        given.json.write_text(json.dumps(row | {"machine": machine()}, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
