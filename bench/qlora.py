"""Memory of fine-tuning a 135M model: all weights, LoRA on float32 ones, LoRA on 8 and 4 bits.

Each is a process of its own, run twice: what it takes to compile is not what it takes to train.
The forecast is what the step holds (parameters, moments) and the arena of its buffers; measured is
the process's resident memory after some steps, and its highest, above that before the model.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

import numpy as np

import treadle as td
from treadle import losses, models, nn, optim

KINDS = ("full", "lora", "q8_0", "q4_0")


def resident(field: str = "VmRSS") -> int:
    """Bytes of this process that are in memory, or that were at most."""
    with open("/proc/self/status") as lines:
        found = next(line for line in lines if line.startswith(f"{field}:"))
    return int(found.split()[1]) * 1024


def made(kind: str, layers: int) -> Any:
    model = models.llama("smollm2-135m", num_hidden_layers=layers)
    if kind.startswith("q"):
        nn.quantize(model, kind, "layers.*")
        nn.quantize(model, "q8_0", "embed_tokens")
    if kind != "full":
        nn.lora(model, r=8, alpha=16, targets="layers.*")
    return model


def loss(model: Any, batch: Any) -> Any:
    logits = model(batch["tokens"][:, :-1])
    return losses.cross_entropy(logits, batch["tokens"][:, 1:], axis=-1)


def measure(given: argparse.Namespace) -> dict[str, float]:
    before, batch, length = resident(), given.batch, given.length
    spec = {"tokens": td.Spec((batch, length + 1), td.int32)}
    model = made(given.only, given.layers)
    where = {"device": given.device, "precision": given.precision}
    step = td.compile_step(model, loss, optim.adamw(1e-3), spec, **where)
    rng = np.random.default_rng(0)
    tokens = {"tokens": rng.integers(0, 49152, (batch, length + 1)).astype(np.int32)}
    history = [float(step(tokens).loss)]
    start = time.perf_counter()
    history += [float(step(tokens).loss) for _ in range(given.steps)]
    seconds = (time.perf_counter() - start) / given.steps
    view = step.memory
    assert view is not None
    return {
        "held": view.held / 1e6,
        "arena": view.arena / 1e6,
        "forecast": (view.held + view.arena) / 1e6,
        "resident": (resident() - before) / 1e6,
        "highest": (resident("VmHWM") - before) / 1e6,
        "seconds": seconds,
        "first": history[0],
        "last": history[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--steps", type=int, default=3, help="behind the first")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--kinds", nargs="*", default=KINDS)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only:
        print(json.dumps(measure(given)))
        return
    rows: dict[str, dict[str, float]] = {}
    for kind in given.kinds:
        command = [sys.executable, __file__, "--only", kind]
        for name in ("batch", "length", "layers", "steps", "device", "precision"):
            command += [f"--{name}", str(getattr(given, name))]
        for _ in range(2):  # the second finds what the first compiled
            done = subprocess.run(command, check=True, capture_output=True, text=True)
        rows[kind] = json.loads(done.stdout.splitlines()[-1])
    print("| | held MB | arena MB | forecast MB | resident MB | highest MB | s a step | loss |")
    print("|---|---|---|---|---|---|---|---|")
    for kind, row in rows.items():
        cells = [f"{row[n]:,.0f}" for n in ("held", "arena", "forecast", "resident", "highest")]
        for at, name in ((2, "forecast"), (3, "resident"), (4, "highest")):
            if "full" in rows and kind != "full":
                cells[at] += f" ({row[name] / rows['full'][name]:.0%})"
        cells += [f"{row['seconds']:.2f}", f"{row['first']:.3f} → {row['last']:.3f}"]
        print(f"| {kind} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
