"""Losses of margins, regions, distributions and rules beside PyTorch's, exactly and natively."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import treadle as td
from refusals import refused
from sizes import Problem, check, rounded
from test_losses import THEIRS as OTHERS
from treadle import losses

REDUCTIONS = ("mean", "sum", "none")
rng = np.random.default_rng(5)


class Case(NamedTuple):
    """Arguments of a loss; floats have gradients."""

    name: str
    arguments: tuple[np.ndarray, ...]
    options: dict[str, Any]


def normal(*shape: int) -> np.ndarray:
    return rounded(rng.standard_normal(shape))


def chances(*shape: int) -> np.ndarray:
    return rounded(rng.uniform(0.05, 0.95, shape))


def signs(*shape: int) -> np.ndarray:
    return rng.choice([-1.0, 1.0], shape)


def flags(*shape: int) -> np.ndarray:
    return rng.integers(0, 2, shape).astype(np.float64)


def classes(n: int, *shape: int) -> np.ndarray:
    return rng.integers(0, n, shape)


def boxes(*shape: int) -> np.ndarray:
    low = rng.uniform(0, 5, (*shape, 2))
    return rounded(np.concatenate([low, low + rng.uniform(0.5, 4, (*shape, 2))], -1))


def tables(name: str, *draws: Callable[..., np.ndarray], options: Any = ({},)) -> list[Case]:
    """Arguments drawn for several shapes; the last axis fills lanes and leaves a rest."""
    shapes = [(7,), (5, 3), (2, 3, 4), (17, 5), (1, 1)]
    return [Case(name, tuple(d(*s) for d in draws), o) for o in options for s in shapes]


def rows(name: str, *makes: Callable[[int, int], np.ndarray], options: Any = ({},)) -> list[Case]:
    """Arguments drawn for several numbers of rows and columns."""
    sizes = [(5, 3), (17, 4), (1, 6), (33, 2), (8, 7)]
    return [Case(name, tuple(m(n, d) for m in makes), o) for o in options for n, d in sizes]


def labels_first(n: int, d: int) -> np.ndarray:
    """Distinct labels, then −1: as multilabel_margin wants them."""
    found = np.full((n, d), -1)
    for row in found:
        count = rng.integers(0, d + 1)
        row[:count] = rng.permutation(d)[:count]
    return found


def volume(n: int, d: int) -> np.ndarray:
    return normal(n, d, 3, 2)


def ctc_case(t: int, n: int, c: int, s: int, **options: Any) -> Case:
    blank = options.get("blank", 0)
    targets = rng.integers(0, c - 1, (n, s))
    targets = np.where(targets >= blank, targets + 1, targets)
    lengths = rng.integers(1, s + 1, n)
    times = np.minimum(t, rng.integers(2 * s + 1, t + 1, n)) if t > 2 * s else np.full(n, t)
    return Case("ctc", (normal(t, n, c), targets, times, lengths), options)


MARGINS = ({}, {"margin": 0.3})

TABLE = [
    *tables("smooth_l1", normal, normal, options=({}, {"beta": 0.3}, {"beta": 0.0})),
    *tables("log_cosh", normal, normal),
    *tables("poisson_nll", normal, lambda *s: classes(6, *s).astype(float), options=({}, {"full": True})),
    *tables("poisson_nll", chances, lambda *s: classes(6, *s).astype(float), options=({"log_input": False},)),
    *tables("gaussian_nll", normal, normal, chances, options=({}, {"full": True})),
    *tables("soft_margin", normal, signs),
    *tables("hinge", normal, signs, options=({}, {"margin": 0.5}, {"squared": True})),
    *tables("hinge_embedding", normal, signs, options=MARGINS),
    *tables("margin_ranking", normal, normal, signs, options=MARGINS),
    *tables("sigmoid_focal", normal, flags, options=({}, {"alpha": -1, "gamma": 1.5}, {"gamma": 0})),
    *rows("cosine_embedding", normal, normal, lambda n, d: signs(n), options=MARGINS),
    *rows("multi_margin", normal, lambda n, d: classes(d, n), options=({}, {"p": 2, "margin": 0.4})),
    *rows("multilabel_soft_margin", normal, flags),
    *rows("multilabel_margin", normal, labels_first),
    *rows("triplet_margin", normal, normal, normal, options=({}, {"p": 1.0, "swap": True}, {"margin": 0.2, "p": 3.0})),
    *rows("triplet_with_distance", normal, normal, normal, options=({}, {"swap": True})),
    *rows("contrastive", normal, normal, lambda n, d: flags(n), options=({}, {"margin": 3.0})),
    *rows("info_nce", normal, normal, options=({}, {"temperature": 0.5})),
    *rows("info_nce", normal, normal, lambda n, d: normal(6, d)),
    *rows("nt_xent", normal, normal, options=({}, {"temperature": 0.2})),
    *rows("focal", normal, lambda n, d: classes(d, n), options=({}, {"gamma": 0.5}, {"gamma": 0})),
    *rows("focal", volume, lambda n, d: classes(d, n, 3, 2)),
    *rows("poly", normal, lambda n, d: classes(d, n), options=({}, {"epsilon": 2.5})),
    *tables("giou", lambda *s: boxes(*s), lambda *s: boxes(*s)),
    *tables("diou", lambda *s: boxes(*s), lambda *s: boxes(*s)),
    *rows("feature_distillation", normal, normal, options=({}, {"kind": "l1"}, {"kind": "cosine"})),
    *rows("attention_distillation", volume, lambda n, d: volume(n, 4)),
    *rows("soft_target_cross_entropy", normal, chances),
    *rows("entropy", normal),
    *tables("satisfaction", chances),
    *tables("violation", chances, options=({}, {"p": 2.5})),
    *tables("at_most", normal, normal, options=({}, {"p": 1})),
    ctc_case(9, 3, 5, 3), ctc_case(9, 3, 5, 3, blank=4), ctc_case(12, 1, 3, 1), ctc_case(20, 17, 6, 5), ctc_case(7, 2, 4, 3),
]  # fmt: skip

# Losses that are one number in any case.
WHOLE = [
    *rows("dice", volume, lambda n, d: classes(d, n, 3, 2), options=({}, {"smooth": 0.1})),
    *tables("dice", normal, flags, options=({"mode": "binary"},)),
    *rows("tversky", volume, lambda n, d: classes(d, n, 3, 2), options=({"alpha": 0.3, "beta": 0.7},)),
    *tables("lovasz_hinge", normal, flags),
    *rows("lovasz_softmax", volume, lambda n, d: classes(d, n, 3, 2), options=({}, {"classes": "all"})),
    *rows("distillation", normal, normal, options=({}, {"temperature": 4.0})),
    *rows("distillation", normal, normal, lambda n, d: classes(d, n), options=({"alpha": 0.3},)),
    *tables("mean_truth", chances, options=({}, {"p": 2.0})),
]  # fmt: skip


def reduced(values: torch.Tensor, reduction: str) -> torch.Tensor:
    return values if reduction == "none" else getattr(values, reduction)()


def by_rows(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A loss of PyTorch's out of a function that gives one value a row."""

    def loss(*arguments: Any, reduction: str, **options: Any) -> torch.Tensor:
        return reduced(function(*arguments, **options), reduction)

    return loss


def focal(x: torch.Tensor, y: torch.Tensor, gamma: float = 2.0) -> torch.Tensor:
    p = torch.softmax(x, 1).gather(1, y.unsqueeze(1)).squeeze(1)
    return -((1 - p) ** gamma) * p.log()


def sigmoid_focal(x: torch.Tensor, y: torch.Tensor, alpha: float = 0.25, gamma: float = 2.0) -> Any:
    p = torch.sigmoid(x)
    ce = F.binary_cross_entropy_with_logits(x, y, reduction="none")
    found = ce * (1 - (p * y + (1 - p) * (1 - y))) ** gamma
    return found * (alpha * y + (1 - alpha) * (1 - y)) if alpha >= 0 else found


def poly(x: torch.Tensor, y: torch.Tensor, epsilon: float = 1.0) -> torch.Tensor:
    p = torch.softmax(x, 1).gather(1, y.unsqueeze(1)).squeeze(1)
    return -p.log() + epsilon * (1 - p)


def contrastive(a: Any, b: Any, y: Any, margin: float = 1.0) -> torch.Tensor:
    d = F.pairwise_distance(a, b)
    return y * d**2 + (1 - y) * torch.clamp(margin - d, min=0) ** 2


def info_nce(q: Any, p: Any, negatives: Any = None, temperature: float = 0.1) -> torch.Tensor:
    q, p = F.normalize(q), F.normalize(p)
    if negatives is None:
        return F.cross_entropy(q @ p.T / temperature, torch.arange(len(q)), reduction="none")
    scores = torch.cat([(q * p).sum(1, keepdim=True), q @ F.normalize(negatives).T], 1)
    return F.cross_entropy(
        scores / temperature, torch.zeros(len(q), dtype=torch.long), reduction="none"
    )


def nt_xent(a: Any, b: Any, temperature: float = 0.5) -> torch.Tensor:
    z = F.normalize(torch.cat([a, b]))
    s = (z @ z.T / temperature).masked_fill(torch.eye(len(z), dtype=torch.bool), -math.inf)
    n = len(a)
    return F.cross_entropy(s, torch.arange(2 * n).roll(-n), reduction="none")


def giou(a: Any, b: Any) -> torch.Tensor:
    iou, union, outer = overlap(a, b)
    area = (outer[..., 2] - outer[..., 0]) * (outer[..., 3] - outer[..., 1])
    return 1 - (iou - (area - union) / (area + 1e-7))


def diou(a: Any, b: Any) -> torch.Tensor:
    iou, _, outer = overlap(a, b)
    diagonal = ((outer[..., 2:] - outer[..., :2]) ** 2).sum(-1) + 1e-7
    centres = [(t[..., :2] + t[..., 2:]) / 2 for t in (a, b)]
    return 1 - iou + ((centres[0] - centres[1]) ** 2).sum(-1) / diagonal


def overlap(a: Any, b: Any) -> tuple[Any, Any, Any]:
    low, high = torch.maximum(a[..., :2], b[..., :2]), torch.minimum(a[..., 2:], b[..., 2:])
    sides = torch.clamp(high - low, min=0)
    inside = sides[..., 0] * sides[..., 1]
    areas = [(t[..., 2] - t[..., 0]) * (t[..., 3] - t[..., 1]) for t in (a, b)]
    union = areas[0] + areas[1] - inside
    outer = [torch.minimum(a[..., :2], b[..., :2]), torch.maximum(a[..., 2:], b[..., 2:])]
    return inside / (union + 1e-7), union, torch.cat(outer, -1)


def feature(x: Any, y: Any, kind: str = "mse") -> torch.Tensor:
    if kind == "cosine":
        return 1 - F.cosine_similarity(x, y.detach(), -1)
    return (x - y.detach()).abs() if kind == "l1" else (x - y.detach()) ** 2


def attention_maps(x: Any, y: Any) -> torch.Tensor:
    a, b = (F.normalize((t**2).mean(1).flatten(1)) for t in (x, y.detach()))
    return (a - b) ** 2


def hinge(x: Any, y: Any, margin: float = 1.0, squared: bool = False) -> torch.Tensor:
    found = torch.clamp(margin - y * x, min=0)
    return found**2 if squared else found


def at_most(x: Any, y: Any, p: int = 2) -> torch.Tensor:
    return torch.clamp(x - y, min=0) ** p


def onehot(x: Any, y: Any) -> Any:
    return torch.movedim(F.one_hot(y, x.shape[1]).to(x), -1, 1)


def tversky(
    x: Any,
    y: Any,
    alpha: float = 0.5,
    beta: float = 0.5,
    smooth: float = 1.0,
    mode: str = "multiclass",
) -> Any:
    if mode == "binary":
        p, t = torch.sigmoid(x).reshape(1, -1), y.reshape(1, -1)
    else:
        p, t = (torch.movedim(z, 1, 0).flatten(1) for z in (torch.softmax(x, 1), onehot(x, y)))
    tp, fp, fn = (p * t).sum(1), (p * (1 - t)).sum(1), ((1 - p) * t).sum(1)
    return (1 - (tp + smooth) / (tp + alpha * fp + beta * fn + smooth)).mean()


def dice(x: Any, y: Any, smooth: float = 1.0, mode: str = "multiclass") -> Any:
    if mode == "binary":
        p, t = torch.sigmoid(x).reshape(1, -1), y.reshape(1, -1)
    else:
        p, t = (torch.movedim(z, 1, 0).flatten(1) for z in (torch.softmax(x, 1), onehot(x, y)))
    return (1 - (2 * (p * t).sum(1) + smooth) / (p.sum(1) + t.sum(1) + smooth)).mean()


def lovasz_gradient(truth: Any) -> Any:
    """As the authors' code has it: the difference of 1 − IoU as pixels are added."""
    total = truth.sum()
    jaccard = 1 - (total - truth.cumsum(0)) / (total + (1 - truth).cumsum(0))
    return torch.cat([jaccard[:1], jaccard[1:] - jaccard[:-1]])


def lovasz_hinge(x: Any, y: Any) -> Any:
    errors = 1 - x.flatten() * (2 * y.flatten() - 1)
    ordered, index = torch.sort(errors, descending=True, stable=True)
    return torch.dot(F.relu(ordered), lovasz_gradient(y.flatten()[index]))


def lovasz_softmax(x: Any, y: Any, classes: str = "present") -> Any:
    p = torch.movedim(torch.softmax(x, 1), 1, 0).flatten(1)
    found = []
    for c in range(x.shape[1]):
        truth = (y.flatten() == c).to(x)
        if classes == "present" and truth.sum() == 0:
            continue
        ordered, index = torch.sort((truth - p[c]).abs(), descending=True, stable=True)
        found.append(torch.dot(ordered, lovasz_gradient(truth[index])))
    return torch.stack(found).mean()


def distillation(
    x: Any, t: Any, y: Any = None, temperature: float = 2.0, alpha: float = 0.5
) -> Any:
    soft = torch.log_softmax(t.detach() / temperature, -1)
    kl = F.kl_div(
        torch.log_softmax(x / temperature, -1), soft, reduction="batchmean", log_target=True
    )
    taught = kl * temperature**2
    return taught if y is None else alpha * taught + (1 - alpha) * F.cross_entropy(x, y)


THEIRS: dict[str, Callable[..., Any]] = {
    "smooth_l1": F.smooth_l1_loss,
    "log_cosh": by_rows(lambda x, y: torch.log(torch.cosh(x - y))),
    "poisson_nll": F.poisson_nll_loss,
    "gaussian_nll": F.gaussian_nll_loss,
    "soft_margin": F.soft_margin_loss,
    "hinge": by_rows(hinge),
    "hinge_embedding": F.hinge_embedding_loss,
    "margin_ranking": F.margin_ranking_loss,
    "sigmoid_focal": by_rows(sigmoid_focal),
    "cosine_embedding": F.cosine_embedding_loss,
    "multi_margin": F.multi_margin_loss,
    "multilabel_soft_margin": F.multilabel_soft_margin_loss,
    "multilabel_margin": F.multilabel_margin_loss,
    "triplet_margin": F.triplet_margin_loss,
    "triplet_with_distance": F.triplet_margin_with_distance_loss,
    "contrastive": by_rows(contrastive),
    "info_nce": by_rows(info_nce),
    "nt_xent": by_rows(nt_xent),
    "focal": by_rows(focal),
    "poly": by_rows(poly),
    "giou": by_rows(giou),
    "diou": by_rows(diou),
    "feature_distillation": by_rows(feature),
    "attention_distillation": by_rows(attention_maps),
    "soft_target_cross_entropy": by_rows(lambda x, y: -(y * torch.log_softmax(x, -1)).sum(-1)),
    "entropy": by_rows(lambda x: -(torch.softmax(x, -1) * torch.log_softmax(x, -1)).sum(-1)),
    "satisfaction": by_rows(lambda x: -torch.log(torch.clamp(x, min=1e-7))),
    "violation": by_rows(lambda x, p=1.0: (1 - x) ** p),
    "at_most": by_rows(at_most),
    "ctc": lambda *given, **options: ctc(*given, **options),
    "dice": dice,
    "tversky": tversky,
    "lovasz_hinge": lovasz_hinge,
    "lovasz_softmax": lovasz_softmax,
    "distillation": distillation,
    "mean_truth": lambda x, p=1.0: 1 - ((1 - x) ** p).mean() ** (1 / p),
}


# Arguments for which PyTorch has no gradient, or none at 0.
FIXED = {"poisson_nll": (1,), "soft_margin": (1,)}


def ctc(logits: Any, *given: Any, **options: Any) -> Any:
    """PyTorch's gradient is right behind a log_softmax alone."""
    return F.ctc_loss(torch.log_softmax(logits, -1), *given, **options)


def problem(c: Case, reduction: str | None) -> Problem:
    named = {f"argument {i}": a for i, a in enumerate(c.arguments)}
    fixed = [f"argument {i}" for i in FIXED.get(c.name, ())]
    floats = {n: a for n, a in named.items() if a.dtype.kind == "f" and n not in fixed}
    constants = {n: a for n, a in named.items() if n not in floats}
    options = c.options if reduction is None else {**c.options, "reduction": reduction}

    def ours(given: Any, fixed: Any) -> Any:
        both = {**given, **fixed}
        given = [both[n] for n in named]
        if c.name == "ctc":
            given[0] = td.log_softmax(given[0])
        found = getattr(losses, c.name)(*given, **options)
        return td.add(found, 0) if isinstance(found, td.Mean) else found

    def theirs(given: Any, fixed: Any) -> Any:
        both = {**given, **fixed}
        return THEIRS[c.name](*(both[n] for n in named), **options)

    return Problem(ours, theirs, floats, constants)


def cases_of(name: str) -> list[tuple[Case, str | None]]:
    # Each configuration with one reduction, and each reduction with some.
    own = [c for c in TABLE if c.name == name]
    found: list[tuple[Case, str | None]] = [(c, REDUCTIONS[i % 3]) for i, c in enumerate(own)]
    return found + [(c, None) for c in WHOLE if c.name == name]


NAMES = sorted({c.name for c in (*TABLE, *WHOLE)})


# Every other one by default: a program of five configurations takes a second to compile.
LATER = [pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1::2]]


@pytest.mark.parametrize("name", [*NAMES[::2], *LATER])
def test_natively(name: str) -> None:
    found = cases_of(name)
    assert len(found) >= 5
    check({f"{name} {i} {r}": problem(c, r) for i, (c, r) in enumerate(found)})


# What PyTorch has no counterpart of


def test_every_loss_has_rows() -> None:
    public = {n for n, v in vars(losses).items() if callable(v) and not n.startswith("_")}
    own = {"weighted", "Logic", "box_iou", "supervised_contrastive", "linear_cross_entropy"}
    own |= {"uncertainty"}  # test_multitask.py
    assert set(NAMES) | OTHERS.keys() | own == public


def test_supervised_contrastive() -> None:
    x, y = normal(9, 4), np.array([0, 1, 0, 2, 1, 0, 3, 2, 1])
    z = x / np.linalg.norm(x, axis=1, keepdims=True)
    scores = z @ z.T / 0.1
    expected = []
    for i in range(9):
        others = [j for j in range(9) if j != i]
        same = [j for j in others if y[j] == y[i]]
        total = np.log(np.exp(scores[i, others]).sum())
        if same:
            expected.append(np.mean([total - scores[i, j] for j in same]))
    found = losses.supervised_contrastive(td.tensor(x), td.tensor(y))
    np.testing.assert_allclose(float(found), np.mean(expected), rtol=1e-10)


def test_ctc_of_what_cannot_be_said() -> None:
    """Too few steps for the labels: infinite, or 0 if asked for; its gradient is then 0 too."""
    x = np.log(np.full((2, 1, 3), 1 / 3))
    given = td.tensor(np.array([[1, 1]])), td.tensor([2]), td.tensor([2])
    assert float(losses.ctc(td.tensor(x), *given)) == math.inf
    assert float(losses.ctc(td.tensor(x), *given, zero_infinity=True)) == 0
    gradient = td.grad(lambda x: losses.ctc(x, *given, zero_infinity=True))(x).numpy()
    assert not gradient.any()


def test_box_iou() -> None:
    a = np.array([[0.0, 0.0, 2.0, 2.0], [0.0, 0.0, 1.0, 1.0]])
    b = np.array([[1.0, 1.0, 3.0, 3.0], [2.0, 2.0, 3.0, 3.0]])
    np.testing.assert_allclose(losses.box_iou(a, b).numpy(), [1 / 7, 0])


@pytest.mark.parametrize("kind", ["product", "godel", "lukasiewicz"])
def test_connectives_are_classical_at_0_and_1(kind: str) -> None:
    logic = losses.Logic(kind)
    a, b = np.array([0.0, 0.0, 1.0, 1.0]), np.array([0.0, 1.0, 0.0, 1.0])
    p, q = a > 0, b > 0
    for found, expected in (
        (logic.conjunction(a, b), p & q),
        (logic.disjunction(a, b), p | q),
        (logic.implication(a, b), ~p | q),
        (logic.equivalence(a, b), p == q),
        (logic.negation(a), ~p),
    ):
        np.testing.assert_array_equal(found.numpy(), expected.astype(float))
    rows = np.stack([a, b, np.ones(4)], 1)
    np.testing.assert_array_equal(logic.every(rows, 1).numpy(), (p & q).astype(float))
    np.testing.assert_array_equal(logic.some(np.stack([a, b], 1), 1).numpy(), (p | q).astype(float))


@pytest.mark.parametrize("kind", ["product", "godel", "lukasiewicz"])
def test_the_residuum_belongs_to_the_conjunction(kind: str) -> None:
    """a ∧ c ≤ b exactly where c ≤ (a → b), and de Morgan's law."""
    logic = losses.Logic(kind)
    a, b, c = (chances(200) for _ in range(3))
    left = logic.conjunction(a, c).numpy() <= b + 1e-12
    right = c <= logic.implication(a, b).numpy() + 1e-12
    np.testing.assert_array_equal(left, right)
    both = 1 - logic.conjunction(1 - a, 1 - b).numpy()
    np.testing.assert_allclose(logic.disjunction(a, b).numpy(), both)


def test_weighted_reports_its_parts() -> None:
    model = td.nn.Linear(3, 1)

    def loss(m: Any, batch: Any) -> Any:
        out = m(batch["x"])
        near = losses.mse(out, batch["y"])
        return losses.weighted(near=near, small=(0.1, losses.l1(out, out * 0)))

    batch = {"x": normal(5, 3).astype(np.float32), "y": normal(5, 1).astype(np.float32)}
    step = td.compile_step(model, loss, td.optim.sgd(0.0), batch, device="cpu")
    result = step(batch)
    out = batch["x"] @ step.params["weight"].T + step.params["bias"]
    near, small = ((out - batch["y"]) ** 2).mean(), np.abs(out).mean()
    np.testing.assert_allclose(result.metrics["near"], near, rtol=1e-5)
    np.testing.assert_allclose(result.metrics["small"], small, rtol=1e-5)
    np.testing.assert_allclose(result.loss, near + 0.1 * small, rtol=1e-5)


def test_refusals() -> None:
    x = td.tensor(normal(4, 3))
    rows, one = td.tensor([0, 1, 2, 0]), td.tensor([1])
    times = td.tensor(normal(4, 2, 3))
    refused(lambda: losses.multi_margin(x, rows, p=3), td.ArgumentError, "multi_margin", "p is 3")
    refused(lambda: losses.ctc(times, td.tensor([[1]]), one, one), td.ShapeError, "ctc", "targets")
    refused(lambda: losses.Logic("godot"), td.ArgumentError, "Logic", "godot")
    refused(lambda: losses.weighted(), td.ArgumentError, "weighted", "no losses")
    refused(lambda: losses.giou(x, x), td.ShapeError, "giou", "boxes")
