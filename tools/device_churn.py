"""Many programs compiled, run and dropped in one process while two steps train beside them.

    python tools/device_churn.py --programs 500 --threads 3

The first half takes turns with the steps on one thread, as one user's loop does; the second half
is compiled by several threads while each step trains on a thread of its own. Programs are dropped
in reference cycles, so that Python collects them wherever it happens to. Every program is compared
with the oracle, and the losses of the two steps with the CPU's. Prints a summary; exits with 1 if
a number was wrong, anything was raised, a capture had to be made again, or the driver refused to
take something back.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

import treadle as td
from treadle import losses, nn, optim
from treadle.runtime.cuda.device import device as gpu

Function = Callable[..., td.Tensor]
Drawn = tuple[str, Function, list[np.ndarray]]
CLOSE, CLOSE_LOSS = 2e-3, 1e-3  # of the largest value; of the loss
PAUSE = 0.01  # seconds between steps that train beside others


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


def rows(rng: np.random.Generator) -> Drawn:
    m, n = rng.integers(1, 90, 2)
    x = normal(rng, m, n)
    return "rows", lambda x: td.softmax(td.gelu(x)) * td.logsumexp(x, -1)[:, None], [x]


def norms(rng: np.random.Generator) -> Drawn:
    m, n = rng.integers(2, 90, 2)
    given = [normal(rng, m, n), normal(rng, n), normal(rng, n)]
    return "norms", td.grad(lambda x, w, b: (td.layer_norm(x, w, b) ** 2).sum()), given


def products(rng: np.random.Generator) -> Drawn:
    m, n, k = rng.integers(1, 70, 3) * rng.choice([1, 1, 16])
    given = [normal(rng, m, k), normal(rng, k, n)]
    return "products", td.grad(lambda x, y: (td.tanh(x @ y / k)).sum(), (0, 1)), given


def images(rng: np.random.Generator) -> Drawn:
    n, c, o, size = (int(i) for i in rng.integers(2, 20, 4))
    given = [normal(rng, n, c, size, size), normal(rng, o, c, 3, 3)]
    total = td.grad(lambda x, w: (td.conv(x, w, padding=1) ** 2).mean(), (0, 1))
    return "images", total, given


def gathers(rng: np.random.Generator) -> Drawn:
    m, n, k = (int(i) for i in rng.integers(2, 60, 3))
    ids = rng.integers(0, m, k).astype(np.int32)
    given = [normal(rng, m, n), ids]
    return "gathers", td.grad(lambda x, i: (td.take(x, i) ** 2).sum()), given


def sums(rng: np.random.Generator) -> Drawn:
    m, n = rng.integers(2, 70, 2)
    return "sums", lambda x: td.cumsum(x, 1).max(1), [normal(rng, m, n)]


FAMILIES = [rows, norms, products, images, gathers, sums]


class Cycle:
    """What only a collection finds."""

    def __init__(self, held: object):
        self.held, self.own = held, self


def arrays(value: object) -> list[np.ndarray]:
    if isinstance(value, tuple | list):
        return [a for v in value for a in arrays(v)]
    return [np.asarray(value)]


class Churn:
    """What was found so far, by all threads."""

    def __init__(self, device: str, seed: int):
        self.device, self.seed = device, seed
        self.done: Counter[str] = Counter()
        self.trouble: Counter[str] = Counter()
        self.lock = threading.Lock()

    @contextmanager
    def noting(self, what: str) -> Iterator[None]:
        """Whatever is raised inside is counted, and the rest goes on."""
        try:
            yield
        except Exception as error:
            with self.lock:
                self.trouble[f"{what}: {type(error).__name__}: {str(error)[:160]}"] += 1

    def program(self, number: int) -> None:
        """Compile, run twice, compare, drop."""
        rng = np.random.default_rng([self.seed, number])
        family, function, given = FAMILIES[number % len(FAMILIES)](rng)
        with self.noting(family):
            specs = [td.Spec(a.shape, str(a.dtype)) for a in given]
            program = td.compile(function, *specs, device=self.device)
            Cycle(program)
            exact = arrays(td.compile(function, *specs, device="oracle")(*given))
            for _ in range(2):
                for ours, theirs in zip(arrays(program(*given)), exact, strict=True):
                    size = max(float(np.abs(theirs).max(initial=0)), 1e-2)
                    apart = float(np.abs(ours - theirs).max(initial=0)) / size
                    if not apart <= CLOSE:
                        raise ArithmeticError(f"case {number} is {apart:.2g} from the oracle")
        with self.lock:
            self.done[family] += 1


class Training:
    """A step that goes on for the whole time, and the losses it gave."""

    def __init__(self, name: str, device: str):
        self.name, self.step, self.losses = name, compiled(name, device), list[float]()

    def once(self) -> None:
        number = len(self.losses)
        self.losses.append(float(self.step(batch(self.name, number)).loss))
        if number % 50 == 49:
            assert all(np.isfinite(p).all() for p in self.step.params.values())

    def until(self, end: threading.Event, churn: Churn) -> None:
        while not end.is_set():
            with churn.noting(self.name):
                self.once()
            time.sleep(PAUSE)

    def from_the_cpu(self) -> float:
        """The largest difference to the same steps on the CPU, in parts of the loss."""
        other = Training(self.name, "cpu")
        for _ in self.losses:
            other.once()
        ours, theirs = np.array(self.losses), np.array(other.losses)
        return float((np.abs(ours - theirs) / np.maximum(np.abs(theirs), 1e-3)).max(initial=0))


def compiled(name: str, device: str) -> td.TrainStep:
    model = (
        nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 5))
        if name == "mlp"
        else nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(8 * 16, 5),
        )
    )  # fmt: skip
    example = batch(name, 0)
    specs = {n: td.Spec(a.shape, str(a.dtype)) for n, a in example.items()}
    return td.compile_step(
        model, lambda m, b: losses.cross_entropy(m(b["x"]), b["y"]), optim.sgd(1e-3), specs,
        device=device,
    )  # fmt: skip


def batch(name: str, number: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([number % 100, 1])
    shape = (32, 20) if name == "mlp" else (16, 3, 8, 8)
    return {"x": normal(rng, *shape), "y": rng.integers(0, 5, shape[0]).astype(np.int32)}


def free(churn: Churn) -> str:
    """What the device has left, when all that can be collected is."""
    gc.collect()
    if churn.device != "cuda":
        return "no device"
    gpu().enter()
    return f"{gpu().memory()[0] / 2**20:.0f} MiB free"


def in_turns(churn: Churn, trainings: list[Training], numbers: range) -> None:
    for number in numbers:
        churn.program(number)
        for training in trainings:
            with churn.noting(training.name):
                training.once()


def in_threads(churn: Churn, trainings: list[Training], numbers: range, count: int) -> None:
    end = threading.Event()
    beside = [threading.Thread(target=t.until, args=(end, churn)) for t in trainings]

    def some(first: int) -> None:
        for number in numbers[first::count]:
            churn.program(number)

    work = [threading.Thread(target=some, args=(i,)) for i in range(count)]
    for thread in [*beside, *work]:
        thread.start()
    for thread in work:
        thread.join()
    end.set()
    for thread in beside:
        thread.join()


def after(churn: Churn, trainings: list[Training]) -> None:
    """What is wrong in the end: losses, and what the driver said meanwhile."""
    for training in trainings:
        apart = training.from_the_cpu()
        print(f"{training.name}: {len(training.losses)} steps, {apart:.2g} from the CPU's losses")
        if not apart <= CLOSE_LOSS:
            churn.trouble[f"{training.name} is {apart:.2g} from the CPU"] += 1
    if churn.device == "cuda":
        for call, count in gpu().releases.refused.items():
            churn.trouble[f"the driver refused {call}"] += count
        if gpu().captured_again:
            churn.trouble["captures that were made again"] += gpu().captured_again
        if gpu().releases.waiting:
            churn.trouble["never given back"] += gpu().releases.waiting


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=500)
    parser.add_argument("--threads", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 10**6)
    given = parser.parse_args()
    os.environ["TREADLE_CACHE"] = "off"  # every program is compiled and chosen for anew
    gc.set_threshold(300, 5, 5)  # often, so that it happens anywhere
    churn = Churn(given.device, given.seed)
    trainings = [Training(name, given.device) for name in ("mlp", "cnn")]
    in_turns(churn, trainings, range(len(FAMILIES)))  # libraries load what they need
    start, half = free(churn), given.programs // 2
    in_turns(churn, trainings, range(half))
    middle = free(churn)
    in_threads(churn, trainings, range(half, given.programs), given.threads)
    print(f"memory: {start} first, {middle} after half of it, {free(churn)} in the end")
    after(churn, trainings)
    print(f"seed {given.seed}: {sum(churn.done.values())} programs on {given.device}: "
          f"{dict(churn.done)}; {sum(churn.trouble.values())} in trouble")  # fmt: skip
    for what, count in churn.trouble.most_common(20):
        print(f"  {count} × {what}")
    sys.exit(bool(churn.trouble))


if __name__ == "__main__":
    main()
