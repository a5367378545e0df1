"""The museum: silent bugs of training systems that were reported in public, one test each.

Each exhibit says what went wrong there, without a word to the user, and shows that here it is right
or refused before the first step. `docs/museum.md` lists them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import treadle as td
from treadle import data, losses, nn, optim

EXHIBITS: dict[str, str] = {}  # references by test
PAGE = Path(__file__).resolve().parent.parent / "docs" / "museum.md"


def exhibit(reference: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def noted(test: Callable[[], None]) -> Callable[[], None]:
        EXHIBITS[test.__name__] = f"https://github.com/{reference}"
        return test

    return noted


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def native(function: Callable[..., Any], *arrays: np.ndarray) -> Any:
    return td.compile(function, *arrays, device="cpu")(*arrays)


def gradients(function: Callable[..., Any], *arrays: np.ndarray) -> list[np.ndarray]:
    """Compiled gradients of a function that gives a number."""
    wrt = tuple(range(len(arrays)))
    found = native(lambda *xs: td.grad(function, wrt)(*xs), *arrays)
    return [np.asarray(g) for g in (found if isinstance(found, (list, tuple)) else [found])]


def references(function: Callable[..., Any], *arrays: np.ndarray) -> list[np.ndarray]:
    """PyTorch's, eager."""
    given = [torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in arrays]
    function(*given).backward()
    return [t.grad.numpy() for t in given]  # type: ignore[union-attr]


def close(ours: Any, theirs: Any, tolerance: float = 1e-5) -> None:
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


# Gradients under a compiler


@exhibit("pytorch/pytorch/issues/136662")
def test_a_gradient_through_an_update_of_a_column() -> None:
    """Compiled `func.grad` of `y[:, 0] += x[:, 2].abs()` was the gradient of something else."""

    def ours(x: td.Tensor) -> td.Tensor:
        first = x[:, :1] * 0 + td.abs(x[:, 2:3])
        return td.concat([first, x[:, 1:]], 1).sum()

    def theirs(x: Any) -> Any:
        return torch.cat([x[:, :1] * 0 + x[:, 2:3].abs(), x[:, 1:]], 1).sum()

    x = drawn(2, 3)
    close(gradients(ours, x), references(theirs, x))


@exhibit("pytorch/pytorch/issues/185509")
def test_resized_convolved_pooled_and_chosen() -> None:
    """Gradients were off by up to 77 where the forward was right."""
    mask = drawn(1, 2, 6, 7, seed=3) > 0

    def ours(x: td.Tensor, w: td.Tensor, b: td.Tensor) -> td.Tensor:
        y = td.interpolate(x, scale_factor=(1.5, 1.25), mode="bilinear")[:, :, 1:7, 1:8]
        conv = td.conv(y, w, padding=1) + td.reshape(b, (1, 2, 1, 1))
        pool = td.max_pool(conv, 3, stride=1, padding=1)
        return (td.where(mask, conv, pool) ** 2).sum()

    def theirs(x: Any, w: Any, b: Any) -> Any:
        y = F.interpolate(x, scale_factor=(1.5, 1.25), mode="bilinear")[:, :, 1:7, 1:8]
        conv = F.conv2d(y, w, b, padding=1)
        pool = F.max_pool2d(conv, 3, 1, 1)
        return (torch.where(torch.tensor(mask), conv, pool) ** 2).sum()

    given = drawn(1, 1, 6, 8), drawn(2, 1, 3, 3, seed=1), drawn(2, seed=2)
    close(gradients(ours, *given), references(theirs, *given), 1e-3)


@exhibit("pytorch/pytorch/issues/180772")
def test_a_slice_that_is_overwritten() -> None:
    """The gradient of what was not overwritten came out as 0."""

    def ours(x: td.Tensor, y: td.Tensor) -> td.Tensor:
        return td.dynamic_update_slice(x, y, (0,)).sum()

    close(gradients(ours, drawn(5), drawn(2)), [[0, 0, 1, 1, 1], [1, 1]])


@exhibit("pytorch/pytorch/issues/182012")
def test_a_diagonal_that_is_overwritten() -> None:
    """The gradient of everything beside the diagonal came out as 0."""
    eye = np.eye(8, dtype=bool)

    def ours(x: td.Tensor, d: td.Tensor) -> td.Tensor:
        return td.where(eye, d[:, None], x).sum()

    close(gradients(ours, drawn(8, 8), drawn(8)), [1.0 - eye, np.ones(8)])


@exhibit("pytorch/pytorch/issues/138908")
def test_rows_at_equal_indices_are_added_once_each() -> None:
    """`y[x] += y[x]` gave four times the rows where twice was right."""
    y, index = drawn(3, 4), np.array([1, 2])
    found = native(lambda y: y + td.scatter_add(td.zeros((3, 4)), index, td.take(y, index, 0)), y)
    np.testing.assert_allclose(found, y * np.array([[1], [2], [2]]), rtol=1e-6)


@exhibit("pytorch/pytorch/issues/193061")
def test_norms_that_share_a_scale_and_shift() -> None:
    """Gradients of the shared parameters were never written: stale memory."""

    def ours(x: td.Tensor, table: td.Tensor) -> td.Tensor:
        parts = td.chunk(table, 4, 0)
        for i in (0, 2):
            x = td.layer_norm(x) * (1 + parts[i]) + parts[i + 1]
        return (x**2).sum()

    def theirs(x: Any, table: Any) -> Any:
        parts = torch.chunk(table, 4, 0)
        for i in (0, 2):
            x = F.layer_norm(x, (8,)) * (1 + parts[i]) + parts[i + 1]
        return (x**2).sum()

    close(
        gradients(ours, drawn(6, 8), drawn(4, 8)),
        references(theirs, drawn(6, 8), drawn(4, 8)),
        1e-3,
    )


@exhibit("jax-ml/jax/issues/347")
def test_a_branch_that_is_not_taken() -> None:
    """√0 in the branch beside it made a gradient NaN. `td.cond` keeps branches apart."""
    x = np.array([0.0, 4.0], np.float32)

    def chosen(x: td.Tensor) -> td.Tensor:
        return td.cond(x.sum() > 9, lambda: td.sqrt(x).sum(), lambda: (2 * x).sum())

    close(gradients(chosen, x), [[2, 2]])


@exhibit("jax-ml/jax/issues/3058")
def test_the_norm_of_nothing() -> None:
    """The gradient of a norm at 0 was NaN; 0 is one of its slopes, as PyTorch has it."""
    zero = np.zeros(3, np.float32)
    close(gradients(lambda x: td.norm(x), zero), references(lambda x: torch.norm(x), zero))


# Accumulation


def token_loss(model: nn.Module, batch: tuple[td.Tensor, td.Tensor]) -> Any:
    x, y = batch
    return losses.cross_entropy(model(x), y)


def rows(counts: list[int], width: int = 6) -> list[tuple[np.ndarray, np.ndarray]]:
    """Batches of which some labels count."""
    found = []
    for i, count in enumerate(counts):
        y = np.arange(width, dtype=np.int64) % 3
        y[count:] = -100
        found.append((drawn(width, 4, seed=i), y))
    return found


def trained(batches: list[Any], accumulate: int, **options: Any) -> dict[str, np.ndarray]:
    td_step = td.compile_step(
        nn.Linear(4, 3), token_loss, optim.sgd(0.5), batches[0], accumulate=accumulate,
        device="cpu", seed=1, **options,
    )  # fmt: skip
    for batch in batches:
        td_step(batch)
    return {n: np.array(v) for n, v in td_step.params.items()}


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray], tolerance: float = 1e-6) -> None:
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=tolerance, atol=tolerance)


@exhibit("huggingface/transformers/pull/34191")
def test_accumulated_means_are_those_of_all_tokens() -> None:
    """Means of micro-batches were averaged, whatever number of tokens each had."""
    batches = rows([6, 1, 3])
    together = tuple(np.concatenate(parts) for parts in zip(*batches, strict=True))
    same(trained(batches, 3), trained([together], 1))


@exhibit("OpenNMT/OpenNMT-py/issues/2209")
def test_a_term_beside_the_loss_has_its_own_weight() -> None:
    """A loss was divided by the tokens of all micro-batches, and a second term was not."""

    def both(model: nn.Module, batch: Any) -> Any:
        x, y = batch
        return losses.cross_entropy(model(x), y) + 0.1 * (model.weight**2).sum()

    batches = rows([6, 6])
    found = []
    for some, accumulate in ((batches, 2), ([tuple(map(np.concatenate, zip(*batches)))], 1)):
        step = td.compile_step(
            nn.Linear(4, 3), both, optim.sgd(0.5), some[0], accumulate=accumulate, device="cpu"
        )
        for batch in some:
            step(batch)
        found.append({n: np.array(v) for n, v in step.params.items()})
    same(*found)


@exhibit("huggingface/accelerate/issues/641")
def test_the_accumulated_gradient_is_clipped_once() -> None:
    """Every micro-batch's gradient was clipped by itself."""
    batches = [(10 * x, y) for x, y in rows([6, 2])]
    together = tuple(np.concatenate(parts) for parts in zip(*batches, strict=True))
    same(trained(batches, 2, clip_norm=0.1), trained([together], 1, clip_norm=0.1))


@exhibit("milesial/Pytorch-UNet/issues/468")
def test_gradients_are_clipped_without_the_loss_scale() -> None:
    """Scaled gradients were clipped: at a scale of 65,536 nothing was left of them."""
    batches = rows([6])
    clipped = trained(batches, 1, clip_norm=0.05, precision="float16")
    same(clipped, trained(batches, 1, clip_norm=0.05), 2e-3)


# Random numbers


class Dropped(nn.Module):
    def __init__(self) -> None:
        self.scale, self.drop = nn.Parameter((1,), nn.init.ones), nn.Dropout(0.5)

    def forward(self, x: td.Tensor) -> td.Tensor:
        return self.drop(x * self.scale)


def masks(count: int, seed: int = 0) -> list[np.ndarray]:
    """Which elements were kept, call by call."""
    ones = np.ones((64, 64), np.float32)
    program = td.compile(lambda x: td.dropout(x, 0.5), ones, device="cpu", seed=seed)
    return [np.asarray(program(ones)) != 0 for _ in range(count)]


@exhibit("pytorch/xla/pull/1932")
def test_dropout_differs_from_step_to_step() -> None:
    """The seed was part of the compiled program: every step dropped the same elements."""
    first, second = masks(2)
    assert 0.4 < (first != second).mean() < 0.6


@exhibit("facebookresearch/xformers/issues/173")
def test_dropout_is_the_seed_s() -> None:
    """The address of the seed was used in place of the seed: nothing could be repeated."""
    assert all(
        np.array_equal(a, b) for a, b in zip(masks(2, seed=5), masks(2, seed=5), strict=True)
    )
    assert not np.array_equal(masks(1, seed=5)[0], masks(1, seed=6)[0])


@exhibit("NervanaSystems/ngraph/pull/3006")
def test_dropout_does_not_know_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads were seeded by their numbers: each drew the same, and machines differed."""
    found = []
    for threads in ("1", "2"):
        monkeypatch.setenv("TREADLE_THREADS", threads)
        found += masks(1)
    one, two = found
    np.testing.assert_array_equal(one, two)
    halves = one[:32], one[32:]
    assert not np.array_equal(*halves)


@exhibit("Lightning-AI/lightning-thunder/issues/114")
def test_dropout_is_the_same_in_the_backward() -> None:
    """Recomputed without its seed, the backward would drop other elements than the forward."""

    def loss(model: Dropped, x: td.Tensor) -> td.Tensor:
        return td.checkpoint(lambda x: model(x))(x).sum()

    ones = np.ones((8, 8), np.float32)
    step = td.compile_step(Dropped(), loss, optim.sgd(0.0), ones, device="cpu")
    (gradient,) = step.gradients(ones).values()
    assert float(step(ones).loss) == float(gradient[0]), "d(scale · Σ mask)/d scale at scale 1"


@exhibit("pytorch/pytorch/issues/5059")
def test_every_batch_of_a_loader_is_augmented_anew() -> None:
    """Workers inherited one seed: each batch had the augmentation of three others."""

    def loss(model: nn.Module, x: td.Tensor) -> td.Tensor:
        noise = td.random.normal(x.shape)
        td.metric("noise", noise.sum())
        return (model(x + noise) ** 2).mean()

    x = np.zeros((4, 2), np.float32)
    step = td.compile_step(nn.Linear(2, 1), loss, optim.sgd(0.1), x, device="cpu")
    assert len({float(step(x).metrics["noise"]) for _ in range(6)}) == 6


@exhibit("Lightning-AI/pytorch-lightning/issues/20412")
def test_every_epoch_is_shuffled_anew() -> None:
    """A seed of everything made every epoch the same."""
    loader = data.ArrayLoader({"x": np.arange(32)}, 8, shuffle=True)
    epochs = [np.concatenate([b["x"] for b in loader]) for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert not np.array_equal(*epochs)


# Checkpoints


def scheduled() -> td.TrainStep:
    batch = rows([6])[0]
    rate = optim.schedules.cosine(0.1, 8)
    return td.compile_step(nn.Linear(4, 3), token_loss, optim.adamw(rate), batch, device="cpu")


@exhibit("ultralytics/yolov5/issues/292")
def test_a_resumed_run_has_the_rate_it_had(tmp_path: Path) -> None:
    """The schedule began again with every resume."""
    batch, whole, first, second = rows([6])[0], scheduled(), scheduled(), scheduled()
    for _ in range(6):
        whole(batch)
    for _ in range(3):
        first(batch)
    first.save(tmp_path / "half")
    second.load(tmp_path / "half")
    for _ in range(3):
        second(batch)
    for name, value in whole.params.items():
        np.testing.assert_array_equal(value, second.params[name])


@exhibit("PolymathicAI/the_well/issues/77")
def test_a_resumed_run_has_its_loss_scale(tmp_path: Path) -> None:
    """The scaler was not saved: its first steps after a resume were skipped, or overflowed."""
    batch = rows([6])[0]
    steps = [
        td.compile_step(
            nn.Linear(4, 3), token_loss, optim.sgd(0.1), batch, precision="float16", device="cpu"
        )
        for _ in range(2)
    ]
    steps[0]((np.full_like(batch[0], 1e30), batch[1]))  # it overflows: the scale is halved
    assert steps[0].loss_scale != steps[1].loss_scale
    steps[0].save(tmp_path / "run")
    steps[1].load(tmp_path / "run")
    assert steps[1].loss_scale == steps[0].loss_scale


@exhibit("pytorch/pytorch/issues/188346")
def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    """Loaded one by one they were two: an optimizer moved the weight twice."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            self.embed = nn.Embedding(5, 3)
            self.out = nn.Linear(3, 5, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, x: td.Tensor) -> td.Tensor:
            return self.out(self.embed(x))

    batch = np.array([0, 2, 4])
    steps = [
        td.compile_step(
            Tied(), lambda m, x: losses.cross_entropy(m(x), x), optim.sgd(0.5), batch, device="cpu"
        )
        for _ in range(2)
    ]
    steps[0](batch)
    steps[0].save(tmp_path / "tied")
    steps[1].load(tmp_path / "tied")
    assert len(steps[1].params) == 1
    for step in steps:
        step(batch)
    (one,), (two,) = (list(s.params.values()) for s in steps)
    np.testing.assert_array_equal(one, two)


# Losses


@exhibit("pytorch/pytorch/issues/73205")
def test_smoothed_labels_of_ignored_rows() -> None:
    """The uniform part of a smoothed loss counted rows that were ignored."""
    z, y = drawn(4, 3), np.array([0, -100, 2, 1])

    def smooth(z: td.Tensor, y: np.ndarray) -> td.Tensor:
        return losses.cross_entropy(z, y, label_smoothing=0.2).tensor()

    found = native(lambda z: smooth(z, y), z)
    np.testing.assert_allclose(found, native(lambda z: smooth(z, y[y >= 0]), z[y >= 0]), rtol=1e-5)


@exhibit("pytorch/pytorch/issues/69339")
def test_weights_smoothing_and_ignored_rows_together() -> None:
    """The three together read the weight of class −100."""
    z, y, w = drawn(4, 3), np.array([0, -100, 2, 1]), np.array([1.0, 4.0, 0.5], np.float32)
    found = native(lambda z: losses.cross_entropy(z, y, weight=w, label_smoothing=0.2).tensor(), z)
    expected = F.cross_entropy(
        torch.tensor(z), torch.tensor(y), torch.tensor(w), label_smoothing=0.2
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@exhibit("pytorch/pytorch/issues/116349")
def test_a_batch_of_which_nothing_counts() -> None:
    """0 / 0 made the loss NaN, and a step of NaN the parameters."""
    (batch,) = rows([0])
    step = td.compile_step(nn.Linear(4, 3), token_loss, optim.sgd(0.5), batch, device="cpu")
    before = {n: np.array(v) for n, v in step.params.items()}
    step(batch)
    for name, value in step.params.items():
        assert np.isfinite(value).all()
        np.testing.assert_array_equal(value, before[name])


@exhibit("pytorch/pytorch/issues/12670")
def test_a_class_that_there_is_not() -> None:
    """A label of −4 was read from beside the logits: a loss of anything."""
    x, y = rows([6])[0]
    step = td.compile_step(nn.Linear(4, 3), token_loss, optim.sgd(0.5), (x, y), device="cpu")
    for label in (-4, 3):
        with pytest.raises(td.TreadleError, match=str(label)):
            step((x, np.where(y == 0, label, y)))
    assert step.count == 0


@exhibit("tensorflow/tensorflow/issues/3638")
def test_a_row_that_a_table_has_not() -> None:
    """On a GPU rows out of range were zeros."""
    batch = np.array([0, 1])
    step = td.compile_step(
        nn.Embedding(3, 2), lambda m, x: (m(x) ** 2).sum(), optim.sgd(0.5), batch, device="cpu"
    )
    with pytest.raises(td.TreadleError, match="3"):
        step(np.array([0, 3]))
    assert step.count == 0


# Attention and norms


def attended(mask: np.ndarray) -> Callable[..., td.Tensor]:
    bias = np.where(mask, np.float32(0), np.float32(-np.inf))
    return lambda q, k, v: (td.attention(q, k, v, bias) ** 2).sum()


@exhibit("pytorch/pytorch/issues/41508")
def test_a_query_that_sees_nothing() -> None:
    """One such row made the gradients of the whole batch NaN."""
    mask = np.ones((1, 1, 4, 4), bool)
    mask[0, 0, 2] = False
    given = [drawn(1, 1, 4, 8, seed=i) for i in range(3)]
    found = gradients(attended(mask), *given)
    assert all(np.isfinite(g).all() for g in found)
    assert not found[0][0, 0, 2].any()


@exhibit("pytorch/pytorch/issues/109517")
def test_masks_by_the_least_number() -> None:
    """Blocks that the least float masked out came out as NaN in a fused kernel."""
    bias = np.zeros((1, 1, 21, 21), np.float32)
    bias[..., :16] = np.finfo(np.float32).min
    given = [drawn(1, 1, 21, 8, seed=i) for i in range(3)]
    found = gradients(lambda q, k, v: (td.attention(q, k, v, bias) ** 2).sum(), *given)
    theirs = references(
        lambda q, k, v: (
            (torch.softmax(q @ k.mT / 8**0.5 + torch.tensor(bias).double(), -1) @ v) ** 2
        ).sum(),
        *given,
    )
    close(found, theirs, 1e-4)


@exhibit("tinygrad/tinygrad/pull/807")
def test_the_running_variance_is_unbiased() -> None:
    """The variance of the batch itself was kept, n − 1 over n of what evaluation needs."""
    x = drawn(4, 3)
    step = td.compile_step(
        nn.BatchNorm1d(3), lambda m, x: (m(x) ** 3).sum(), optim.sgd(0.0), x, device="cpu"
    )
    step(x)
    expected = 0.9 + 0.1 * x.var(0, ddof=1)
    np.testing.assert_allclose(step.params["running_var"], expected, rtol=1e-5)


# The page


def test_the_page_lists_every_exhibit() -> None:
    text = PAGE.read_text(encoding="utf-8")
    listed = set(re.findall(r"https://github\.com/[\w./-]+/(?:issues|pull)/\d+", text))
    assert listed == set(EXHIBITS.values())
    assert len(EXHIBITS) >= 25
