"""Losses beside PyTorch's in float64 at 0, at ties and far out: the table of test_points."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

import treadle as td
from point_rows import Array
from treadle import losses

Call = Callable[..., Any]
SUM = {"reduction": "sum"}


class LossRow(NamedTuple):
    ours: Call  # of the input and others, to one number
    theirs: Call
    arrays: tuple[Array, ...]
    relative: float = 1e-11
    absolute: float = 1e-13
    has_second: bool = True  # PyTorch has one


INPUTS = [0.0, 1.0, 0.5, 2.0, 1e-3, 1e-8, 1e-300, 0.1, 5.0, 20.0, 30.0, 50.0, 100.0, 750.0, 1e4]
INPUTS = [*INPUTS, *(-x for x in INPUTS)]


def grid(targets: list[float], inputs: list[float] = INPUTS) -> tuple[Array, Array]:
    x, y = np.meshgrid(inputs, targets)
    return x.ravel(), y.ravel()


def both(
    name: str, theirs: Call, arrays: tuple[Array, ...], relative: float = 1e-11, **options: Any
) -> LossRow:
    """A loss of one name's and of one meaning's options in both libraries."""
    ours = getattr(losses, name)
    return LossRow(
        lambda x, y: ours(x, y, **options, **SUM),
        lambda x, y: theirs(x, y, **options, **SUM),
        arrays,
        relative,
    )


DIFFERENCES = grid([0.0, 1.0, -1.0, 0.5, 2.0, 0.25])
SIGNS = grid([1.0, -1.0])
FLAGS = grid([0.0, 1.0, 0.5])
CHANCES = grid([0.0, 1.0, 0.5], [0.0, 1.0, 0.5, 1e-3, 0.999, 0.25, 1e-300, 1e-14])

ROWS = np.array(
    [[0, 0, 0], [1, 1, 1], [1, 2, 3], [0, 1, 0], [-1e4, 0, 1e4], [100, -100, 100.0], [1, 0, 0],
     [2, 1, 1], [-0.0, 0, -0.0], [800, 0, -800]]
)  # fmt: skip
CLASSES = np.array([0, 1, 2, 0, 1, 2, 0, 1, 2, 1])
LABELS = np.array([[0, 2, -1], [1, -1, 0], [-1, 0, 1], [2, 0, 1], [0, -1, -1]] * 2)
PLUS_MINUS = np.array([1.0, -1] * 5)
LEFT = np.array([[1.0, 0, 0], [0, 1, 0], [0, 0, 0], [1, 1, 1]])
RIGHT = np.array([[0.0, 1, 0], [0, 1, 0], [1, 0, 0], [1, 1, 1]])
BOXES = np.array([[0.0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 2, 2], [0, 0, 1, 3]])
OTHERS = np.array([[0.25, 0, 1, 2], [1, 0, 2, 1], [2, 2, 3, 3], [0.5, 0.5, 1, 1], [0, 0, 2, 2.5]])


def double(x: Any) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float64)


def of_classes(name: str, theirs: Call, has_second: bool = True, **options: Any) -> LossRow:
    ours = getattr(losses, name)
    return LossRow(
        lambda x, y: ours(x, CLASSES, **options, **SUM),
        lambda x, y: theirs(x, torch.tensor(CLASSES), **options, **SUM),
        (ROWS, ROWS),
        has_second=has_second,
    )


def rows_of(x: torch.Tensor, classes: Array = CLASSES) -> torch.Tensor:
    return F.cross_entropy(x, torch.tensor(classes), reduction="none")


def unit(x: torch.Tensor) -> torch.Tensor:
    return F.normalize(x, dim=-1)


def softplus(x: torch.Tensor) -> torch.Tensor:
    return -F.logsigmoid(-x)


def sigmoid_focal(x: torch.Tensor, y: torch.Tensor, gamma: float) -> torch.Tensor:
    p = x.sigmoid()
    missed = 1 - (p * y + (1 - p) * (1 - y))
    rows = F.binary_cross_entropy_with_logits(x, y, reduction="none") * missed**gamma
    return (rows * (0.25 * y + 0.75 * (1 - y))).sum()


def log_cosh(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    d = x - y
    return (torch.logaddexp(d, -d) - np.log(2)).sum()


def tversky(x: torch.Tensor, alpha: float, beta: float, smooth: float) -> torch.Tensor:
    p, y = x.softmax(1), F.one_hot(torch.tensor(CLASSES), 3).double()
    true, wrong, missed = (p * y).sum(0), (p * (1 - y)).sum(0), ((1 - p) * y).sum(0)
    return (1 - (true + smooth) / (true + alpha * wrong + beta * missed + smooth)).mean()


def overlap(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The intersection and the union of boxes."""
    low, high = torch.maximum(a[:, :2], b[:, :2]), torch.minimum(a[:, 2:], b[:, 2:])
    inside = (high - low).relu().prod(1)
    return inside, (a[:, 2:] - a[:, :2]).prod(1) + (b[:, 2:] - b[:, :2]).prod(1) - inside


def around(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.maximum(a[:, 2:], b[:, 2:]) - torch.minimum(a[:, :2], b[:, :2])


def giou(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    inside, union = overlap(a, b)
    area = around(a, b).prod(1)
    return (1 - inside / (union + 1e-7) + (area - union) / (area + 1e-7)).sum()


def diou(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    inside, union = overlap(a, b)
    apart = (a[:, :2] + a[:, 2:] - b[:, :2] - b[:, 2:]) / 2
    diagonal = (around(a, b) ** 2).sum(1) + 1e-7
    return (1 - inside / (union + 1e-7) + (apart**2).sum(1) / diagonal).sum()


def contrastive(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    d, y = F.pairwise_distance(a, b), double([1, 0, 0, 1])
    return (y * d**2 + (1 - y) * (1 - d).relu() ** 2).sum()


def nt_xent(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    z = unit(torch.cat([a, b]))
    scores = (z @ z.T / 0.5).masked_fill(torch.eye(len(z)).bool(), -np.inf)
    return rows_of(scores, np.roll(np.arange(len(z)), -len(a))).sum()


def supervised(x: torch.Tensor, classes: Array) -> torch.Tensor:
    z, n = unit(x), len(x)
    scores = (z @ z.T / 0.1).masked_fill(torch.eye(n).bool(), -np.inf)
    log_p = scores - scores.logsumexp(1, keepdim=True)
    total = double(0.0)
    for i in range(n):
        others = [j for j in range(n) if j != i and classes[i] == classes[j]]
        total = total - (log_p[i, others].mean() if others else 0)
    return total


def lovasz(errors: torch.Tensor, truth: torch.Tensor, of: Call = torch.abs) -> torch.Tensor:
    """Of errors in a row: each by what its pixel adds to 1 − IoU."""
    order = errors.detach().argsort(descending=True, stable=True)
    t = truth[order]
    lost = 1 - (t.sum() - t.cumsum(0)) / (t.sum() + (1 - t).cumsum(0))
    return (of(errors[order]) * torch.diff(lost, prepend=double([0.0]))).sum()


def lovasz_softmax(x: torch.Tensor) -> torch.Tensor:
    p, y = x.softmax(1), F.one_hot(torch.tensor(CLASSES), 3).double()
    return torch.stack([lovasz((y[:, c] - p[:, c]).abs(), y[:, c]) for c in range(3)]).mean()


def distilled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    soft = (y / 2).log_softmax(-1).detach()
    return F.kl_div((x / 2).log_softmax(-1), soft, reduction="batchmean", log_target=True) * 4


def maps(x: torch.Tensor) -> torch.Tensor:
    return unit((x.reshape(1, 2, 2, -1) ** 2).mean(1).reshape(1, -1))


def ctc(x: torch.Tensor) -> torch.Tensor:
    return F.ctc_loss(
        x.log_softmax(-1), torch.tensor([[1, 1], [1, 2]]), torch.tensor([4, 3]),
        torch.tensor([2, 1]), reduction="sum",
    )  # fmt: skip


KINDS = ("product", "godel", "lukasiewicz")


def connectives(x: td.Tensor, y: td.Tensor) -> list[Call]:
    return [
        lambda logic: logic.conjunction(x, y),
        lambda logic: logic.disjunction(x, y),
        lambda logic: logic.implication(x, y),
        lambda logic: logic.negation(x),
    ]


def written_out(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The connectives of the three logics, added up."""
    one, zero, holds = torch.ones_like(x), torch.zeros_like(x), x <= y
    product = x * y + (x + y - x * y) + torch.where(holds, one, y / torch.where(holds, one, x))
    godel = torch.minimum(x, y) + torch.maximum(x, y) + torch.where(holds, one, y)
    both = torch.maximum(x + y - 1, zero), torch.minimum(x + y, one)
    return product + godel + sum(both) + torch.minimum(1 - x + y, one) + 3 * (1 - x)


FRAMES = np.zeros((4, 2, 3))
FRAMES[1, 0] = [30, 0, -30]
FRAMES[2, 1] = [0, 750, 0]
TRUTHS = grid([0.0], [0.0, 1.0, 0.5, 0.25, 1e-7, 1e-12])

LOSSES: dict[str, LossRow] = {
    "mse": both("mse", F.mse_loss, DIFFERENCES),
    "l1": both("l1", F.l1_loss, DIFFERENCES),
    "huber": both("huber", F.huber_loss, DIFFERENCES),
    "huber ½": both("huber", F.huber_loss, DIFFERENCES, delta=0.5),
    "smooth_l1": both("smooth_l1", F.smooth_l1_loss, DIFFERENCES),
    "smooth_l1 ½": both("smooth_l1", F.smooth_l1_loss, DIFFERENCES, beta=0.5),
    "smooth_l1 0": both("smooth_l1", F.smooth_l1_loss, DIFFERENCES, beta=0.0),
    "log_cosh": LossRow(lambda x, y: losses.log_cosh(x, y, **SUM), log_cosh, DIFFERENCES),
    "bce_with_logits": both("bce_with_logits", F.binary_cross_entropy_with_logits, FLAGS),
    "bce_with_logits weighted": LossRow(
        lambda x, y: losses.bce_with_logits(x, y, pos_weight=3.0, **SUM),
        lambda x, y: F.binary_cross_entropy_with_logits(x, y, pos_weight=double(3.0), **SUM),
        FLAGS,
    ),
    # PyTorch's second derivative has an ε of 1e-12, and its first one is rounded to float32.
    "bce": both("bce", F.binary_cross_entropy, CHANCES, 1e-7),
    "kl_div": both("kl_div", F.kl_div, grid([0.0, 1.0, 0.5, 1e-300])),
    "kl_div of logarithms": both("kl_div", F.kl_div, grid([0.0, -1.0, -800.0]), log_target=True),
    "poisson_nll": both("poisson_nll", F.poisson_nll_loss, grid([0.0, 1.0, 2.0])),
    "poisson_nll of rates": both(
        "poisson_nll", F.poisson_nll_loss, grid([0.0, 1.0, 2.0, 5.0], [0.0, 1e-9, 1.0, 5.0]),
        log_input=False, full=True,
    ),
    "gaussian_nll": LossRow(
        lambda x, y: losses.gaussian_nll(x, y * 0, y, **SUM),
        lambda x, y: F.gaussian_nll_loss(x, y * 0, y, **SUM),
        grid([0.0, 1.0, 1e-6, 1e-8, 2.0]),
    ),
    # PyTorch's own overflows from 710 on: log(1 + e^(−y x)) as it stands.
    "soft_margin": LossRow(
        lambda x, y: losses.soft_margin(x, y, **SUM), lambda x, y: softplus(-x * y).sum(), SIGNS
    ),
    "hinge": LossRow(
        lambda x, y: losses.hinge(x, y, **SUM), lambda x, y: (1 - x * y).relu().sum(), SIGNS
    ),
    "hinge squared": LossRow(
        lambda x, y: losses.hinge(x, y, squared=True, **SUM),
        lambda x, y: ((1 - x * y).relu() ** 2).sum(),
        SIGNS,
    ),
    "hinge_embedding": both("hinge_embedding", F.hinge_embedding_loss, SIGNS),
    **{
        f"margin_ranking {sign} {margin}": LossRow(
            lambda x, y, s=sign, m=margin: losses.margin_ranking(x, y, y * 0 + s, margin=m, **SUM),
            lambda x, y, s=sign, m=margin: F.margin_ranking_loss(
                x, y, torch.full_like(y, s), margin=m, **SUM
            ),
            grid([0.0, 1.0, -1.0]),
        )
        for sign in (1.0, -1.0)
        for margin in (0.0, 1.0)
    },
    "multilabel_soft_margin": LossRow(
        lambda x, y: losses.multilabel_soft_margin(x.reshape(-1, 1), y.reshape(-1, 1), **SUM),
        lambda x, y: F.multilabel_soft_margin_loss(x.reshape(-1, 1), y.reshape(-1, 1), **SUM),
        FLAGS,
    ),
    "multi_margin": of_classes("multi_margin", F.multi_margin_loss, False),
    "multi_margin squared": of_classes("multi_margin", F.multi_margin_loss, False, p=2),
    "multilabel_margin": LossRow(
        lambda x, y: losses.multilabel_margin(x, LABELS, **SUM),
        lambda x, y: F.multilabel_margin_loss(x, torch.tensor(LABELS), **SUM),
        (ROWS, ROWS),
        has_second=False,
    ),
    "cross_entropy": of_classes("cross_entropy", F.cross_entropy),
    "cross_entropy smoothed": of_classes("cross_entropy", F.cross_entropy, label_smoothing=0.1),
    "cross_entropy of chances": both("cross_entropy", F.cross_entropy, (ROWS, np.eye(3)[CLASSES])),
    "nll": of_classes("nll", F.nll_loss),
    "linear_cross_entropy": LossRow(
        lambda x, y: losses.linear_cross_entropy(x, np.eye(3), CLASSES, **SUM),
        lambda x, y: rows_of(x).sum(),
        (ROWS, ROWS),
    ),
    "cosine_embedding": LossRow(
        lambda x, y: losses.cosine_embedding(x, y, PLUS_MINUS, **SUM),
        lambda x, y: F.cosine_embedding_loss(x, y, double(PLUS_MINUS), **SUM),
        (ROWS / 10, ROWS[::-1] / 10),
        1e-6,  # an ε of PyTorch's is rounded to float32
    ),
    **{
        f"cosine_embedding {margin}": LossRow(
            lambda x, y, m=margin: losses.cosine_embedding(x, y, [-1.0] * 4, margin=m, **SUM),
            lambda x, y, m=margin: F.cosine_embedding_loss(x, y, double([-1] * 4), margin=m, **SUM),
            (LEFT, RIGHT),
            1e-6,
        )
        for margin in (0.0, 0.5, 1.0)
    },
    "triplet_margin": LossRow(
        lambda x, y: losses.triplet_margin(x, y, x * 0 + 1, **SUM),
        lambda x, y: F.triplet_margin_loss(x, y, x * 0 + 1, **SUM),
        (LEFT, RIGHT),
    ),
    "triplet_margin at the margin": LossRow(
        lambda x, y: losses.triplet_margin(x, y, y, margin=1e-300, **SUM),
        lambda x, y: F.triplet_margin_loss(x, y, y, margin=1e-300, **SUM),
        (LEFT, RIGHT),
    ),
    "triplet_margin swapped": LossRow(
        lambda x, y: losses.triplet_margin(x, y, y, swap=True, **SUM),
        lambda x, y: F.triplet_margin_loss(x, y, y, swap=True, **SUM),
        (LEFT, RIGHT),
    ),
    "triplet_with_distance": LossRow(
        lambda x, y: losses.triplet_with_distance(x, y, y, margin=1e-300, **SUM),
        lambda x, y: F.triplet_margin_with_distance_loss(x, y, y, margin=1e-300, **SUM),
        (LEFT, RIGHT),
    ),
    "contrastive": LossRow(
        lambda x, y: losses.contrastive(x, y, [1.0, 0, 0, 1], **SUM), contrastive, (LEFT, RIGHT)
    ),
    "info_nce": LossRow(
        lambda x, y: losses.info_nce(x, y, **SUM),
        lambda x, y: rows_of(unit(x) @ unit(y).T / 0.1, np.arange(4)).sum(),
        (LEFT, RIGHT),
    ),
    "nt_xent": LossRow(lambda x, y: losses.nt_xent(x, y, **SUM), nt_xent, (LEFT, RIGHT)),
    "supervised_contrastive": LossRow(
        lambda x, y: losses.supervised_contrastive(x, [0, 0, 1, 1], **SUM) * 4,
        lambda x, y: supervised(x, np.array([0, 0, 1, 1])) * 4,
        (LEFT, RIGHT),
    ),
    "sigmoid_focal": LossRow(
        lambda x, y: losses.sigmoid_focal(x, y, **SUM),
        lambda x, y: sigmoid_focal(x, y, 2.0),
        (FLAGS[0], FLAGS[1].round()),
    ),
    "focal": LossRow(
        lambda x, y: losses.focal(x, CLASSES, **SUM),
        lambda x, y: (rows_of(x) * (1 - (-rows_of(x)).exp()) ** 2).sum(),
        (ROWS, ROWS),
    ),
    "poly": LossRow(
        lambda x, y: losses.poly(x, CLASSES, **SUM),
        lambda x, y: (rows_of(x) + 1 - (-rows_of(x)).exp()).sum(),
        (ROWS, ROWS),
    ),
    "dice": LossRow(
        lambda x, y: losses.dice(x, CLASSES),
        lambda x, y: tversky(x, 0.5, 0.5, 0.5),
        (ROWS, ROWS),
    ),
    "tversky": LossRow(
        lambda x, y: losses.tversky(x, CLASSES, 0.3, 0.7),
        lambda x, y: tversky(x, 0.3, 0.7, 1.0),
        (ROWS, ROWS),
    ),
    "lovasz_hinge": LossRow(
        lambda x, y: losses.lovasz_hinge(x, y),
        lambda x, y: lovasz(1 - x * (2 * y - 1), y, torch.relu),
        (np.array([0.0, 0.5, -0.5, 3.0, -3.0, 750.0]), np.array([0.0, 1, 0, 1, 1, 0])),
    ),
    "lovasz_softmax": LossRow(
        lambda x, y: losses.lovasz_softmax(x, CLASSES), lambda x, y: lovasz_softmax(x),
        (ROWS + np.arange(30).reshape(10, 3) / 100, ROWS),
    ),
    "box_iou": LossRow(
        lambda x, y: losses.box_iou(x, y).sum(),
        lambda x, y: (overlap(x, y)[0] / overlap(x, y)[1]).sum(),
        (BOXES, OTHERS),
    ),
    "giou": LossRow(lambda x, y: losses.giou(x, y, **SUM), giou, (BOXES, OTHERS)),
    "diou": LossRow(lambda x, y: losses.diou(x, y, **SUM), diou, (BOXES, OTHERS)),
    "distillation": LossRow(lambda x, y: losses.distillation(x, y), distilled, (ROWS / 10, ROWS[::-1] / 10)),
    "feature_distillation": LossRow(
        lambda x, y: losses.feature_distillation(x, y, "l1", **SUM),
        lambda x, y: F.l1_loss(x, y.detach(), **SUM),
        DIFFERENCES,
    ),
    "feature_distillation of squares": LossRow(
        lambda x, y: losses.feature_distillation(x, y, **SUM),
        lambda x, y: F.mse_loss(x, y.detach(), **SUM),
        DIFFERENCES,
    ),
    "attention_distillation": LossRow(
        lambda x, y: losses.attention_distillation(
            x.reshape(1, 2, 2, -1), y.reshape(1, 2, 2, -1), **SUM
        ),
        lambda x, y: F.mse_loss(maps(x), maps(y).detach(), **SUM),
        (LEFT, RIGHT),
    ),
    "soft_target_cross_entropy": LossRow(
        lambda x, y: losses.soft_target_cross_entropy(x, y, **SUM),
        lambda x, y: F.cross_entropy(x, y, **SUM),
        (ROWS, np.eye(3)[CLASSES]),
    ),
    "entropy": LossRow(
        lambda x, y: losses.entropy(x, **SUM),
        lambda x, y: -(x.softmax(-1) * x.log_softmax(-1)).sum(),
        (ROWS, ROWS),
    ),
    "ctc": LossRow(
        lambda x, y: losses.ctc(
            td.log_softmax(x), np.array([[1, 1], [1, 2]]), [4, 3], [2, 1], **SUM
        ),
        lambda x, y: ctc(x),
        (FRAMES, FRAMES),
        has_second=False,
    ),
    "satisfaction": LossRow(
        lambda x, y: losses.satisfaction(x, **SUM),
        lambda x, y: -torch.maximum(x, double(1e-7)).log().sum(),
        TRUTHS,
    ),
    "violation": LossRow(
        lambda x, y: losses.violation(x, 2.0, **SUM), lambda x, y: ((1 - x) ** 2).sum(), TRUTHS
    ),
    "at_most": LossRow(
        lambda x, y: losses.at_most(x, y, **SUM),
        lambda x, y: (torch.maximum(x - y, double(0.0)) ** 2).sum(),
        DIFFERENCES,
    ),
    "mean_truth": LossRow(
        lambda x, y: losses.mean_truth(x, p=2.0),
        lambda x, y: 1 - ((1 - x) ** 2).mean().sqrt(),
        TRUTHS,
    ),
    "Logic": LossRow(
        lambda x, y: sum((f(losses.Logic(k)) for k in KINDS for f in connectives(x, y)), 0 * x).sum(),
        lambda x, y: written_out(x, y).sum(),
        grid([0.0, 1.0, 0.5, 0.25], [0.0, 1.0, 0.5, 0.25]),
    ),
    "weighted": LossRow(
        lambda x, y: losses.weighted(a=(2.0, losses.l1(x, y, **SUM)), b=losses.mse(x, y, **SUM)),
        lambda x, y: 2 * F.l1_loss(x, y, **SUM) + F.mse_loss(x, y, **SUM),
        DIFFERENCES,
    ),
    "uncertainty": LossRow(
        lambda x, y: losses.uncertainty(x, c=y.sum(), d=(y * y).sum()),
        lambda x, y: (x + torch.exp(-x) * torch.stack([y.sum(), (y * y).sum()])).sum(),
        (np.array([0.0, 20.0]), np.array([0.0, 2.0])),
    ),
}  # fmt: skip
