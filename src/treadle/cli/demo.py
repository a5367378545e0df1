"""`treadle demo`: a small network learns handwritten digits, through one compiled step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

import treadle as td
from treadle import losses, nn, optim
from treadle.cli.console import Sections
from treadle.data.digits import load_digits

Batch = dict[str, np.ndarray]

PIXELS, HIDDEN, CLASSES = 64, 64, 10
BATCH, RATE = 64, 3e-3
HELD_OUT, SPLIT_SEED = 360, 0  # of 1,797; the split is always the same
TARGET = 0.95
LINES = 8  # printed while training
DRAWN = 4  # images that are not recognised
INK = " .:-=+*#%@"


class Network(nn.Module):
    """Pixels to scores of the ten digits."""

    def __init__(self) -> None:
        self.fc1 = nn.Linear(PIXELS, HIDDEN)
        self.fc2 = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: td.Tensor) -> td.Tensor:
        scores: td.Tensor = self.fc2(td.relu(self.fc1(x)))
        return scores


def loss(model: Network, batch: dict[str, td.Tensor]) -> td.Tensor | td.Mean:
    scores = model(batch["x"])
    is_right = scores.argmax(-1) == batch["y"]
    td.metric("accuracy", is_right.astype(td.float32).mean())
    return losses.cross_entropy(scores, batch["y"])


@dataclass(frozen=True, slots=True)
class Digits:
    """Images as rows of pixels, and which digit each is."""

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
    x, y = images.reshape(-1, PIXELS)[order], labels[order]
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


def run_demo(steps: int = 1000, seed: int = 0) -> int:
    """Train and evaluate. 0, or 1 where the accuracy is below the target."""
    show = Sections()
    trained_on, held_out = split_digits()
    show.say(f"Treadle {td.__version__}: a small network learns handwritten digits.")
    show.say(
        f"{len(trained_on)} images of 8 x 8 pixels to train on, {len(held_out)} held out "
        "(Alpaydin and Kaynak, UCI, CC BY 4.0)."
    )
    show.section("The model")
    model = Network()
    show.say(td.summary(model))
    spec = {"x": td.Spec((BATCH, PIXELS)), "y": td.Spec((BATCH,), td.int32)}
    step = td.compile_step(model, loss, optim.adamw(RATE), spec, device="oracle", seed=seed)
    show.section(f"Training: cross-entropy, AdamW, {steps} steps of {BATCH} images")
    with Display(show.console, steps) as display:
        for batch in batches(trained_on, steps, seed):
            display.advance(step(batch))
    show_held_out(show, step, held_out)
    show.section("What was compiled, and how long each stage took")
    show.say(str(step.report))
    show.say(
        "\nEverything ran in the float64 oracle, which interprets the graph of the step with "
        "NumPy.\nIt is the reference that later backends are compared with; no speed is claimed."
    )
    return 1 if show.failed else 0


def show_held_out(show: Sections, step: td.TrainStep, held_out: Digits) -> None:
    """Count what is recognised, and draw some of what is not."""
    show.section("Held out: images that the network has not seen")
    everything = held_out.take(np.arange(len(held_out)))
    share = step.evaluate(everything).metrics["accuracy"]
    what = f"{share:.1%} of {len(held_out)} recognised, at least {TARGET:.0%} wanted"
    show.check(what, share >= TARGET)
    predict = step.attach(guess, {"x": everything["x"]})
    guesses: np.ndarray = predict({"x": everything["x"]})
    wrong = np.flatnonzero(guesses != held_out.y)[:DRAWN]
    if len(wrong):
        show.say("Some that it takes for another:")
        captions = [f"{held_out.y[i]} taken for {guesses[i]}" for i in wrong]
        show.say(drawn(held_out.x[wrong], captions))


def guess(model: Network, batch: dict[str, td.Tensor]) -> td.Tensor:
    scores: td.Tensor = model(batch["x"])
    return scores.argmax(-1)


def drawn(images: np.ndarray, captions: list[str]) -> str:
    """Images side by side in letters, two for a pixel, each over its caption."""
    levels = np.rint(images.reshape(-1, 8, 8) * (len(INK) - 1)).astype(int)
    lines = [
        "  ".join("".join(INK[v] * 2 for v in image[row]) for image in levels).rstrip()
        for row in range(8)
    ]
    under = "  ".join(f"{c:^16}" for c in captions).rstrip()
    return "\n".join([*lines, under])


class Display:
    """A progress bar on a terminal, and a few lines in any case."""

    def __init__(self, console: Console, steps: int):
        self.console, self.steps, self.count = console, steps, 0
        self.start = time.perf_counter()
        self.milestones = {round(i * steps / LINES) for i in range(1, LINES + 1)}
        self.recent: list[td.StepResult] = []  # since the last line
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task("", total=steps)

    def __enter__(self) -> Display:
        self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.bar.stop()

    def advance(self, out: td.StepResult) -> None:
        """Take note of one step."""
        self.count += 1
        self.recent.append(out)
        if self.count in self.milestones:
            self.console.print(self._line(), markup=False, soft_wrap=True)
            self.recent.clear()
        described = self._described([out], self._rate())
        self.bar.update(self.task, completed=self.count, description=described)

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
