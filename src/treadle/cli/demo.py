"""`treadle demo`: a small convolutional network learns handwritten digits, natively."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType

import numpy as np

import treadle as td
from treadle import losses, nn, optim
from treadle.base.terminal import Line, Terminal, grey
from treadle.cli.console import Sections
from treadle.data.digits import load_digits
from treadle.runtime.cpu.processors import default_threads

Batch = dict[str, np.ndarray]

SIDE, CLASSES = 8, 10
STEPS, BATCH, RATE = 800, 32, 1e-2
HELD_OUT, SPLIT_SEED = 360, 0  # of 1,797; the split is always the same
TARGET = 0.98
ORACLE_STEPS = 6  # enough for a median; each takes as long as many native ones
TOLERANCE = 1e-3  # between their losses, which float32 moves by far less
LINES = 8  # printed while training
REFRESH = 0.1  # seconds between pictures of the bar
DRAWN = 4  # images that are not recognised
INK = " .:-=+*#%@"


class Network(nn.Module):
    """Images to scores of the ten digits."""

    def __init__(self) -> None:
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.fc = nn.Linear(64 * 2 * 2, CLASSES)

    def forward(self, x: td.Tensor) -> td.Tensor:
        x = td.max_pool(td.relu(self.conv1(x)), (2, 2))  # (N, 32, 4, 4)
        x = td.max_pool(td.relu(self.conv2(x)), (2, 2))  # (N, 64, 2, 2)
        scores: td.Tensor = self.fc(x.reshape(len(x), -1))
        return scores


def loss(model: Network, batch: dict[str, td.Tensor]) -> td.Tensor | td.Mean:
    scores = model(batch["x"])
    is_right = scores.argmax(-1) == batch["y"]
    td.metric("accuracy", is_right.astype(td.float32).mean())
    return losses.cross_entropy(scores, batch["y"])


@dataclass(frozen=True, slots=True)
class Digits:
    """Images of one channel, and which digit each is."""

    x: np.ndarray
    y: np.ndarray

    def __len__(self) -> int:
        return len(self.y)

    def take(self, rows: np.ndarray) -> Batch:
        return {"x": self.x[rows], "y": self.y[rows]}


def split_digits() -> tuple[Digits, Digits]:
    """What is trained on, and what is held out."""
    images, labels = load_digits()
    order = np.random.default_rng(SPLIT_SEED).permutation(len(labels))
    x, y = images[order, None], labels[order]
    return Digits(x[HELD_OUT:], y[HELD_OUT:]), Digits(x[:HELD_OUT], y[:HELD_OUT])


def batches(digits: Digits, steps: int, seed: int) -> Iterator[Batch]:
    """Shuffled for each epoch; the incomplete batch at its end is left out."""
    rng = np.random.default_rng(seed)
    an_epoch = len(digits) // BATCH
    for i in range(steps):
        if i % an_epoch == 0:
            order = rng.permutation(len(digits))
        start = i % an_epoch * BATCH
        yield digits.take(order[start : start + BATCH])


@dataclass(slots=True)
class Calls:
    """The losses of a step's calls, and how long each took."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def of(self, step: td.TrainStep, batch: Batch) -> td.StepResult:
        start = time.perf_counter()
        out = step(batch)
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(out.loss)
        return out


def run_demo(steps: int = STEPS, seed: int = 0) -> int:
    """Train and evaluate. 0, or 1 where a check failed."""
    show = Sections()
    trained_on, held_out = split_digits()
    show.say(f"Treadle {td.__version__}: a small convolutional network learns handwritten digits.")
    show.say(
        f"{len(trained_on)} images of {SIDE} x {SIDE} pixels to train on, {len(held_out)} held out "
        "(Alpaydin and Kaynak, UCI, CC BY 4.0)."
    )
    show.section("The model")
    show.say(td.summary(Network()))
    step = show_compiling(show, trained_on, steps, seed)
    show.section(f"Training: cross-entropy, AdamW, {steps} steps of {BATCH} images")
    calls = Calls()
    with Display(show.terminal, steps) as display:
        for batch in batches(trained_on, steps, seed):
            display.advance(calls.of(step, batch))
    show_held_out(show, step, held_out)
    show_oracle(show, calls, trained_on, steps, seed)
    show.section("What was compiled, and how long each stage took")
    show.say(str(step.report))
    return 1 if show.failed else 0


def compile_network(device: str, steps: int, seed: int) -> td.TrainStep:
    spec = {"x": td.Spec((BATCH, 1, SIDE, SIDE)), "y": td.Spec((BATCH,), td.int32)}
    optimizer = optim.adamw(optim.cosine(RATE, max(steps, 1)))
    return td.compile_step(Network(), loss, optimizer, spec, device=device, seed=seed)


def show_compiling(show: Sections, trained_on: Digits, steps: int, seed: int) -> td.TrainStep:
    """The step, called once so that nothing is left to compile, with its first values again."""
    show.section("Compiling: forward, loss, backward and update as one native program")
    start = time.perf_counter()
    step = compile_network("cpu", steps, seed)
    step(trained_on.take(np.arange(BATCH)))
    seconds = time.perf_counter() - start
    step.reset()
    threads = default_threads()
    show.figure(f"{seconds:.2f} s from the model to its first step")
    show.say(f"For the CPU, {threads} thread{'' if threads == 1 else 's'}.")
    return step


def show_held_out(show: Sections, step: td.TrainStep, held_out: Digits) -> None:
    """Count what is recognised, and draw some of what is not."""
    show.section("Held out: images that the network has not seen")
    predict = step.attach(guess, {"x": held_out.x})
    guesses: np.ndarray = predict({"x": held_out.x})
    share = float(np.mean(guesses == held_out.y))
    what = f"{share:.1%} of {len(held_out)} recognised, at least {TARGET:.0%} wanted"
    show.check(what, share >= TARGET)
    wrong = np.flatnonzero(guesses != held_out.y)[:DRAWN]
    if len(wrong):
        show.say("Some that it takes for another:")
        captions = [f"{held_out.y[i]} taken for {guesses[i]}" for i in wrong]
        draw = shaded if show.terminal.has_colours else drawn
        show.say(draw(held_out.x[wrong], captions))


def show_oracle(show: Sections, calls: Calls, trained_on: Digits, steps: int, seed: int) -> None:
    """The first steps once more, interpreted: are they the same, and how long do they take?"""
    count = min(ORACLE_STEPS, steps)
    if not count:
        return
    show.section(f"Against the oracle: the first {count} steps again, in float64 with NumPy")
    oracle, exact = compile_network("oracle", steps, seed), Calls()
    for batch in batches(trained_on, count, seed):
        exact.of(oracle, batch)
    medians = [float(np.median(c.seconds)) for c in (calls, exact)]
    rows = [
        [device, str(len(c.seconds)), f"{1e3 * median:.2f}", f"{1 / median:.1f}"]
        for device, c, median in zip(("cpu", "oracle"), (calls, exact), medians, strict=True)
    ]
    show.table(["device", "steps timed", "median ms", "steps/s"], rows)
    show.figure(f"A native step is {medians[1] / medians[0]:.1f} times as fast as the oracle's")
    apart = np.abs(np.divide(calls.losses[:count], exact.losses) - 1).max()
    what = f"losses within {apart:.1e} of the oracle's, at most {TOLERANCE:g} wanted"
    show.check(what, bool(apart <= TOLERANCE))


def guess(model: Network, batch: dict[str, td.Tensor]) -> td.Tensor:
    scores: td.Tensor = model(batch["x"])
    return scores.argmax(-1)


def drawn(images: np.ndarray, captions: list[str]) -> str:
    """Images side by side in letters, two for a pixel, each over its caption."""
    levels = np.rint(images.reshape(-1, SIDE, SIDE) * (len(INK) - 1)).astype(int)
    lines = [
        "  ".join("".join(INK[v] * 2 for v in image[row]) for image in levels).rstrip()
        for row in range(SIDE)
    ]
    return "\n".join([*lines, _side_by_side(captions)])


def shaded(images: np.ndarray, captions: list[str]) -> str:
    """The same in shades of grey, for a terminal that has colours."""
    shades = images.reshape(-1, SIDE, SIDE)
    lines = [
        "  ".join("".join(grey(float(v)) for v in image[row]) for image in shades)
        for row in range(SIDE)
    ]
    return "\n".join([*lines, _side_by_side(captions)])


def _side_by_side(captions: list[str]) -> str:
    return "  ".join(f"{c:^{2 * SIDE}}" for c in captions).rstrip()


class Display:
    """A progress bar on a terminal, and a few lines in any case."""

    def __init__(self, terminal: Terminal, steps: int):
        self.line, self.steps, self.count = Line(terminal), steps, 0
        self.start = time.perf_counter()
        self.next = self.start if terminal.is_live else float("inf")  # when the bar is drawn
        self.milestones = {round(i * steps / LINES) for i in range(1, LINES + 1)}
        self.recent: list[td.StepResult] = []  # since the last line

    def __enter__(self) -> Display:
        self.line.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.line.stop(keep=False)

    def advance(self, out: td.StepResult) -> None:
        """Take note of one step."""
        self.count += 1
        self.recent.append(out)
        if self.count in self.milestones:
            self.line.say(self._line())
            self.recent.clear()
        now = time.perf_counter()
        if now >= self.next:
            self.next = now + REFRESH
            described = self._described([out], self._rate())
            self.line.draw(f"{self.count}/{self.steps}", self.count / self.steps, described)

    def _line(self) -> str:
        rate = self._rate()
        left = (self.steps - self.count) / rate
        width = len(str(self.steps))
        described = self._described(self.recent, rate)
        return f"step {self.count:>{width}} of {self.steps}  {described}  {left:4.1f} s left"

    def _rate(self) -> float:
        return self.count / max(time.perf_counter() - self.start, 1e-9)

    def _described(self, results: list[td.StepResult], rate: float) -> str:
        """Means over some steps."""
        mean_loss = np.mean([r.loss for r in results])
        share = np.mean([r.metrics["accuracy"] for r in results])
        return f"loss {mean_loss:.4f}  accuracy {share:6.1%}  {rate:5.0f} steps/s"
