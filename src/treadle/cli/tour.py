"""`treadle tour`: a small classifier from its code to descent by hand, each stage checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np

import treadle as td
from treadle.autodiff.backward import differentiate
from treadle.cli.console import Sections
from treadle.domains.domain import evaluate
from treadle.domains.dual import Dual, DualNumber
from treadle.domains.field import equal_graphs
from treadle.domains.float64 import Float64, evaluate_float64, lift
from treadle.ir.graph import OutputKind
from treadle.ir.text import to_text
from treadle.ir.verify import verify

Arrays = dict[str, np.ndarray]

CLASSES, HIDDEN, POINTS = 3, 8, 20  # points a class
MODEL_FILE = "classifier.py"
STEP = 1e-6  # of central differences
TOLERANCE = 1e-6
RATE = 0.5


@dataclass(frozen=True, slots=True)
class Model:
    """The functions of classifier.py."""

    source: str
    loss: Callable[..., td.Tensor]
    accuracy: Callable[..., td.Tensor]
    graph: Callable[..., td.Graph]


@dataclass(frozen=True, slots=True)
class Problem:
    """Three clouds of points in the plane, their classes, and parameters to start from."""

    x: np.ndarray
    y: np.ndarray
    params: Arrays


def run_tour(steps: int = 30, seed: int = 0, full: bool = False) -> int:
    """The whole tour. 0, or 1 where a check failed."""
    tour, model, problem = Sections(), load_model(), make_problem(seed)
    tour.say(f"Treadle {td.__version__}: a small classifier, from its code to descent by hand.")
    tour.section(f"The model: {MODEL_FILE}")
    tour.code(model.source)
    graph = show_trace(tour, model, problem)
    differentiated = show_gradient_graph(tour, graph, full)
    gradients = show_values(tour, differentiated, problem)
    show_forward_mode(tour, graph, problem, gradients, seed)
    show_finite_field(tour)
    show_descent(tour, model, problem, steps)
    tour.say("\nAll of this ran in the float64 oracle. `treadle demo` trains natively.")
    return 1 if tour.failed else 0


def load_model() -> Model:
    """The model, run as a file of the user's own, so that nodes point at its lines."""
    source = resources.files("treadle.cli").joinpath(MODEL_FILE).read_text(encoding="utf-8")
    namespace: dict[str, Any] = {"__name__": "classifier"}
    exec(compile(source, MODEL_FILE, "exec"), namespace)
    functions = (namespace[name] for name in ("loss", "accuracy", "graph"))
    return Model(source.rstrip(), *functions)


def make_problem(seed: int) -> Problem:
    rng = np.random.default_rng(seed)
    y = np.repeat(np.arange(CLASSES), POINTS)
    angle = 2 * np.pi * y / CLASSES
    centres = 2 * np.stack([np.cos(angle), np.sin(angle)], axis=-1)
    x = centres + 0.7 * rng.normal(size=centres.shape)
    params = {
        "w1": rng.normal(size=(HIDDEN, 2)) / np.sqrt(2),
        "b1": np.zeros(HIDDEN),
        "w2": rng.normal(size=(CLASSES, HIDDEN)) / np.sqrt(HIDDEN),
        "b2": np.zeros(CLASSES),
    }
    narrow = {name: value.astype(np.float32) for name, value in params.items()}
    return Problem(x.astype(np.float32), y.astype(np.int32), narrow)


def leaves(problem: Problem, params: Arrays) -> Arrays:
    """Arrays by the names that the leaves of the traced loss have."""
    named = {f"params.{name}": value for name, value in params.items()}
    return named | {"x": problem.x, "y": problem.y}


def show_trace(tour: Sections, model: Model, problem: Problem) -> td.Graph:
    tour.section("Traced: one line a node, with the line of the model it came from")
    graph = verify(model.graph(problem.params, problem.x, problem.y))
    tour.say(to_text(graph, origins=True))
    return graph


def show_gradient_graph(tour: Sections, graph: td.Graph, full: bool) -> td.Graph:
    tour.section("Differentiated: the gradients are ops of the same graph")
    wrt = [name for name in graph.leaves if name.startswith("params.")]
    result = verify(differentiate(graph, wrt).graph)
    added = len(result.nodes) - len(graph.nodes)
    tour.say(f"{len(graph.nodes)} nodes before, {len(result.nodes)} after ({added} added)")
    lines = to_text(result, origins=True).split("\n")
    tour.say("\n".join(lines if full else shortened(lines, len(graph.nodes) + 1)))
    return result


def shortened(lines: list[str], first: int, shown: int = 6) -> list[str]:
    """The first line, a few from position `first` on, and the end."""
    tail = len(lines) - shown - 5
    if tail <= first + shown:
        return lines
    dots = "  ... {} lines left out; --full shows them ..."
    start = [lines[0], dots.format(first - 1), *lines[first : first + shown]]
    return [*start, dots.format(tail - first - shown), *lines[tail:]]


def show_values(tour: Sections, differentiated: td.Graph, problem: Problem) -> Arrays:
    """Evaluate loss and gradients; compare each gradient with central differences of the loss."""
    tour.section("Evaluated by the float64 oracle, and compared with central differences")
    values = evaluate_float64(differentiated, leaves(problem, problem.params))
    outputs = list(zip(differentiated.outputs, values, strict=True))
    gradients = {
        o.name.removeprefix("params."): v for o, v in outputs if o.kind is OutputKind.GRADIENT
    }

    def loss_at(params: Arrays) -> float:
        return float(evaluate_float64(differentiated, leaves(problem, params))[0])

    tour.say(f"loss = {values[0]:.6f}")
    rows, worst = [], 0.0
    for name, gradient in gradients.items():
        expected = central_differences(loss_at, problem.params, name)
        error = float(np.abs(gradient - expected).max() / np.abs(expected).max())
        worst = max(worst, error)
        rows.append([name, str(gradient.shape), f"{np.linalg.norm(gradient):.6f}", f"{error:.1e}"])
    tour.table(["gradient of", "shape", "norm", "relative error"], rows)
    tour.check(f"every gradient within {TOLERANCE:g} of central differences", worst < TOLERANCE)
    return gradients


def central_differences(
    loss_at: Callable[[Arrays], float], params: Arrays, name: str
) -> np.ndarray:
    """(f(w + h) - f(w - h)) / 2h for each entry of one parameter, in float64."""
    base = params[name].astype(np.float64)
    slopes = np.zeros_like(base)
    for place in np.ndindex(base.shape):
        sides = []
        for move in (STEP, -STEP):
            moved = base.copy()
            moved[place] += move
            sides.append(loss_at(params | {name: moved}))
        slopes[place] = (sides[0] - sides[1]) / (2 * STEP)
    return slopes


def show_forward_mode(
    tour: Sections, graph: td.Graph, problem: Problem, gradients: Arrays, seed: int
) -> None:
    tour.section("Forward mode equals reverse mode: two sets of rules, one derivative")
    rng = np.random.default_rng(seed + 1)
    direction = {name: rng.normal(size=g.shape) for name, g in gradients.items()}
    inputs = {}
    for name, value in leaves(problem, problem.params).items():
        type_ = graph.nodes[graph.leaves[name]].types[0]
        tangent = direction.get(name.removeprefix("params."))
        inputs[name] = DualNumber(lift(value, type_), tangent)
    (slope,) = evaluate(graph, inputs, Dual(Float64()))
    assert slope.tangent is not None
    forward = float(slope.tangent)
    reverse = sum(float((gradients[name] * direction[name]).sum()) for name in gradients)
    tour.say(f"along a random direction: forward {forward:.12f}, reverse {reverse:.12f}")
    tour.check("they agree to 1e-12", abs(forward - reverse) <= 1e-12 * max(1.0, abs(reverse)))


def show_finite_field(tour: Sections) -> None:
    tour.section("Exact equality over a finite field: no rounding, no tolerance")
    examples = np.zeros((4, 3), np.float32), np.zeros((4, 1), np.float32)
    plain = td.trace(lambda x, c: td.softmax(x), *examples)
    shifted = td.trace(lambda x, c: td.softmax(x + c), *examples)
    doubled = td.trace(lambda x, c: td.softmax(2 * x), *examples)
    tour.check("softmax(x) = softmax(x + c) is accepted", equal_graphs(plain, shifted))
    tour.check("softmax(x) = softmax(2x) is rejected", not equal_graphs(plain, doubled))


def show_descent(tour: Sections, model: Model, problem: Problem, steps: int) -> None:
    tour.section(f"Gradient descent by hand: w <- w - {RATE} dw, {steps} steps")
    x, y = td.tensor(problem.x), td.tensor(problem.y)
    params = {name: td.tensor(value) for name, value in problem.params.items()}
    step = td.value_and_grad(model.loss)
    shown = {round(i * steps / 5) for i in range(6)}
    rows, losses = [], []
    for count in range(steps + 1):
        value, gradient = step(params, x, y)
        losses.append(value.item())
        if count in shown:
            share = model.accuracy(params, x, y).item()
            rows.append([str(count), f"{losses[-1]:.6f}", f"{share:.3f}"])
        params = {name: w - RATE * gradient[name] for name, w in params.items()}
    tour.table(["step", "loss", "accuracy"], rows)
    if steps:
        tour.check("the loss fell", losses[-1] < losses[0])
