"""Accumulation: in the compiled step and on the host, against the big batch."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import treadle as td
from treadle import losses, nn, optim

Spec = td.Spec
TOKENS, FEATURES, CLASSES = 6, 4, 3


class Net(nn.Module):
    def __init__(self):
        self.fc1, self.fc2 = nn.Linear(FEATURES, 5), nn.Linear(5, CLASSES)

    def forward(self, x):
        return self.fc2(td.tanh(self.fc1(x)))


def token_loss(model, batch):
    """The mean over the tokens that are not masked, which may be none of a micro-batch."""
    scores, mask = td.log_softmax(model(batch["x"])), batch["mask"]
    each = -(td.one_hot(batch["y"], CLASSES) * scores).sum(-1) * mask
    td.metric("loss", each.sum() / mask.sum(), mask.sum())
    return td.Mean(each.sum(), mask.sum())


def specs(tokens: int):
    return {
        "x": Spec((tokens, FEATURES)),
        "y": Spec((tokens,), td.int32),
        "mask": Spec((tokens,)),
    }


def tokens_of(counts: list[int], seed: int) -> list[dict[str, np.ndarray]]:
    """Micro-batches with so many tokens each."""
    rng = np.random.default_rng(seed)
    return [
        {
            "x": rng.normal(size=(TOKENS, FEATURES)),
            "y": rng.integers(0, CLASSES, TOKENS).astype(np.int32),
            "mask": (np.arange(TOKENS) < count).astype(np.float64),
        }
        for count in counts
    ]


def joined(batches: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {key: np.concatenate([b[key] for b in batches]) for key in batches[0]}


@lru_cache(maxsize=16)
def steps(k: int, device: str, clip_norm: float | None) -> tuple[td.TrainStep, td.TrainStep]:
    """A step on the big batch and one that accumulates k micro-batches."""
    keywords = {"device": device, "clip_norm": clip_norm}
    big = td.compile_step(Net(), token_loss, optim.adamw(1e-2), specs(k * TOKENS), **keywords)
    small = td.compile_step(
        Net(), token_loss, optim.adamw(1e-2), specs(TOKENS), accumulate=k, **keywords
    )
    return big, small


def windows(k: int):
    """Token counts of two windows; each has a token somewhere."""
    window = st.lists(st.integers(0, TOKENS), min_size=k, max_size=k).filter(any)
    return st.tuples(st.just(k), window, window)


def compare_with_big_batch(device: str, k: int, counts, seed: int, clip_norm, tolerance: float):
    big, small = steps(k, device, clip_norm)
    big.reset()
    small.reset()
    for number, window in enumerate(counts):
        batches = tokens_of(window, seed + number)
        expected = big(joined(batches))
        for i, micro in enumerate(batches):
            assert small.micro_step == i
            out = small(micro)
            assert out.updated == (i == k - 1)
        assert small.micro_step == 0
        assert out.loss == pytest.approx(expected.loss, rel=tolerance)
        assert out.metrics["loss"] == pytest.approx(expected.metrics["loss"], rel=tolerance)
        assert out.grad_norm == pytest.approx(expected.grad_norm, rel=tolerance)
        for name, value in big.params.items():
            np.testing.assert_allclose(
                small.params[name], value, rtol=tolerance, atol=tolerance, err_msg=name
            )


@given(
    st.integers(1, 4).flatmap(windows), st.integers(0, 10**6), st.sampled_from([None, 0.05, 100.0])
)
@example((3, [0, 1, 6], [6, 0, 0]), 0, 0.05)
@settings(max_examples=40, deadline=None)
def test_unequal_token_counts_equal_the_big_batch(counts, seed: int, clip_norm) -> None:
    k, *window = counts
    compare_with_big_batch("oracle", k, window, seed, clip_norm, 1e-11)


@given(st.just(3).flatmap(windows), st.integers(0, 10**6))
@settings(max_examples=10, deadline=None)
def test_unequal_token_counts_equal_the_big_batch_natively(counts, seed: int) -> None:
    k, *window = counts
    compare_with_big_batch("cpu", k, window, seed, 0.05, 2e-5)


def test_micro_batches_of_unequal_shapes_equal_the_big_batch() -> None:
    """Rows are dropped rather than masked: one program a shape, one set of accumulators."""
    micro = tokens_of([TOKENS] * 3, 4)
    cut = [{key: a[:n] for key, a in b.items()} for b, n in zip(micro, (6, 2, 3), strict=True)]
    small = td.compile_step(
        Net(),
        token_loss,
        optim.sgd(0.1),
        specs(TOKENS),
        accumulate=3,
        device="oracle",
        options=td.CompileOptions(on_new_shape="specialise"),
    )
    big = td.compile_step(Net(), token_loss, optim.sgd(0.1), specs(11), device="oracle")
    expected = big(joined(cut))
    out = [small(b) for b in cut][-1]
    assert out.loss == pytest.approx(expected.loss, rel=1e-12)
    for name, value in big.params.items():
        np.testing.assert_allclose(small.params[name], value, rtol=1e-12)


# Sums


def plain_loss(model, batch):
    return losses.cross_entropy(model(batch["x"]), batch["y"])


def plain(counts: int, seed: int = 0) -> list[dict[str, np.ndarray]]:
    return [{k: b[k] for k in ("x", "y")} for b in tokens_of([TOKENS] * counts, seed)]


PLAIN = {k: v for k, v in specs(TOKENS).items() if k != "mask"}


@pytest.mark.parametrize("device", ["oracle", "cpu"])
def test_summed_gradients_are_the_sum(device: str) -> None:
    step = td.compile_step(
        Net(),
        plain_loss,
        optim.sgd(0.1),
        PLAIN,
        device=device,
        accumulate=3,
        accumulation="sum",
    )
    mean = td.compile_step(Net(), plain_loss, optim.sgd(0.1), PLAIN, device=device, accumulate=3)
    batches, before = plain(3), step.params
    gradients = [step.gradients(b) for b in batches]
    for b, g in zip(batches, gradients, strict=True):
        for name, value in mean.gradients(b).items():
            np.testing.assert_allclose(g[name], value, rtol=1e-5, atol=1e-7)
    outs, expected = [step(b) for b in batches], [mean(b) for b in batches]
    assert [o.loss for o in outs] == pytest.approx([o.loss for o in expected], rel=1e-6)
    assert outs[-1].grad_norm == pytest.approx(3 * expected[-1].grad_norm, rel=1e-5)
    for name, value in step.params.items():
        total = sum(g[name] for g in gradients)
        np.testing.assert_allclose(value, before[name] - 0.1 * total, rtol=2e-5, atol=1e-6)


def test_sums_are_clipped_after_accumulating() -> None:
    step = td.compile_step(
        Net(),
        plain_loss,
        optim.sgd(1.0),
        PLAIN,
        accumulate=2,
        accumulation="sum",
        clip_norm=0.01,
    )
    before = step.params
    outs = [step(b) for b in plain(2)]
    change = np.sqrt(sum(((v - before[n]) ** 2).sum() for n, v in step.params.items()))
    assert outs[-1].grad_norm > 0.01
    assert change == pytest.approx(0.01, rel=1e-3)


def test_means_of_different_weights_can_be_summed() -> None:
    def two(model, batch):
        scores = model(batch["x"])
        return losses.cross_entropy(scores, batch["y"]) + losses.mse(scores, td.zeros((6, 3)))

    with pytest.raises(td.GradientError, match='accumulation="sum"'):
        td.compile_step(Net(), two, optim.sgd(0.1), PLAIN, accumulate=2)
    step = td.compile_step(Net(), two, optim.sgd(0.1), PLAIN, accumulate=2, accumulation="sum")
    batches, before = plain(2), step.params
    gradients = [step.gradients(b) for b in batches]
    for b in batches:
        step(b)
    for name, value in step.params.items():
        total = sum(g[name] for g in gradients)
        np.testing.assert_allclose(value, before[name] - 0.1 * total, rtol=1e-5, atol=1e-7)


def test_a_backward_of_your_own_is_summed_too() -> None:
    def forward(model, batch):
        return ((model["w"] * batch["x"]).sum(), None)

    def backward(model, batch, kept):
        return {"w": batch["x"]}

    step = td.compile_manual_step(
        {"w": np.zeros(2, np.float32)},
        forward,
        backward,
        optim.sgd(1.0),
        {"x": Spec((2,))},
        accumulate=2,
        accumulation="sum",
    )
    step({"x": np.array([1.0, 2.0])})
    step({"x": np.array([10.0, 20.0])})
    np.testing.assert_allclose(step.params["w"], [-11.0, -22.0])


def test_other_ways_to_accumulate_are_refused() -> None:
    with pytest.raises(td.ArgumentError, match="accumulation is 'max'"):
        td.compile_step(Net(), plain_loss, optim.sgd(0.1), PLAIN, accumulation="max")


# On the host


SHAPES = {"w": (2, 3), "b": ()}


def accumulator(steps: int = 2, **keywords) -> td.GradientAccumulator:
    found = td.GradientAccumulator(steps, **keywords)
    for name, shape in SHAPES.items():
        found.register(name, shape)
    return found


def gradients_of(seed: int, dtype=np.float64) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {n: np.asarray(rng.normal(size=s), dtype) for n, s in SHAPES.items()}


weights = st.lists(st.integers(0, 50), min_size=1, max_size=6)


@given(weights, st.integers(0, 10**6), st.booleans(), st.sampled_from([None, 0.1, 1e6]))
@settings(max_examples=60, deadline=None)
def test_the_host_gives_weighted_means_and_sums(weights, seed, normalize, bound) -> None:
    found = accumulator(len(weights), normalize=normalize, max_grad_norm=bound)
    parts = [gradients_of(seed + i) for i in range(len(weights))]
    for part, weight in zip(parts, weights, strict=True):
        found.accumulate(part, weight)
    if normalize and not any(weights):
        with pytest.raises(td.NothingAccumulatedError, match="weight 0"):
            found.gradients()
        return
    divisor = sum(weights) if normalize else 1
    expected = {
        n: sum(w * p[n] for w, p in zip(weights, parts, strict=True)) / divisor for n in SHAPES
    }
    norm = np.sqrt(sum((g**2).sum() for g in expected.values()))
    scale = 1.0 if bound is None else min(1.0, bound / (norm + 1e-6))
    assert found.should_update
    before = found.gradients()
    after = found.step()
    for name, value in expected.items():
        np.testing.assert_allclose(after[name], value * scale, rtol=1e-12, atol=1e-15)
        np.testing.assert_array_equal(before[name], after[name])
    assert found.stats.grad_norm == pytest.approx(norm, rel=1e-12)
    assert found.stats.clipped == (bound is not None and norm > bound)
    assert not found.should_update


@given(st.integers(1, 4).flatmap(windows), st.integers(0, 10**6))
@settings(max_examples=20, deadline=None)
def test_the_host_equals_the_big_batch(counts, seed: int) -> None:
    k, window, _ = counts
    big, small = steps(k, "oracle", None)
    big.reset()
    small.reset()
    batches = tokens_of(window, seed)
    found = td.GradientAccumulator(k)
    for name, value in small.params.items():
        found.register(name, value.shape)
    for batch, count in zip(batches, window, strict=True):
        if count:  # a step's own gradients of no tokens are 0 / 0
            found.accumulate(small.gradients(batch), weight=count)
    expected = big.gradients(joined(batches))
    for name, value in found.gradients().items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-11, atol=1e-14)


def test_the_host_equals_the_compiled_step_with_clipping() -> None:
    batches = plain(2)
    step = td.compile_step(Net(), plain_loss, optim.sgd(0.5), PLAIN, accumulate=2, clip_norm=0.05)
    found = td.GradientAccumulator(2, max_grad_norm=0.05)
    before = step.params
    for name, value in before.items():
        found.register(name, value.shape)
    for batch in batches:
        found.accumulate(step.gradients(batch))
    for batch in batches:
        step(batch)
    for name, gradient in found.step().items():
        expected = before[name] - 0.5 * gradient
        np.testing.assert_allclose(step.params[name], expected, rtol=1e-5, atol=1e-7)


def test_a_gradient_of_another_shape_is_named() -> None:
    found = accumulator()
    good, bad = gradients_of(0), gradients_of(0) | {"w": np.zeros((3, 2))}
    found.accumulate(good)
    with pytest.raises(td.GradientShapeError) as caught:
        found.accumulate(bad)
    error = caught.value
    assert (error.parameter, error.expected, error.got) == ("w", (2, 3), (3, 2))
    assert "the gradient of w has the shape (3, 2), expected (2, 3)" in str(error)
    assert isinstance(error, td.ShapeError)
    assert found.stats.accumulated == 1
    np.testing.assert_array_equal(found.gradients()["b"], good["b"])


def test_nothing_accumulated_is_an_error() -> None:
    for call in (accumulator().gradients, accumulator().step):
        with pytest.raises(td.NothingAccumulatedError, match="0 of 2 micro-batches"):
            call()
    found = accumulator()
    found.accumulate(gradients_of(0))
    found.reset()
    with pytest.raises(td.NothingAccumulatedError, match="Call accumulate first"):
        found.step()


def test_a_full_accumulator_takes_no_more() -> None:
    found = accumulator(2)
    found.accumulate(gradients_of(0))
    found.accumulate(gradients_of(1))
    with pytest.raises(td.AccumulatorFullError, match="2 of 2 micro-batches are there"):
        found.accumulate(gradients_of(2))
    expected = {n: (gradients_of(0)[n] + gradients_of(1)[n]) / 2 for n in SHAPES}
    np.testing.assert_allclose(found.step()["w"], expected["w"], rtol=1e-15)
    found.accumulate(gradients_of(2))


def test_unknown_parameters_are_named() -> None:
    with pytest.raises(
        td.UnknownParameterError, match="there is no parameter 'v'.*registered: w, b"
    ):
        accumulator().accumulate({"v": np.zeros(2)})
    with pytest.raises(td.UnknownParameterError, match="registered: none"):
        td.GradientAccumulator(1).accumulate({"w": np.zeros(2)})


def test_a_mistake_adds_nothing() -> None:
    found = accumulator(3)
    found.accumulate(gradients_of(0))
    before = found.gradients()
    for bad in ({"b": 1.0, "v": 1.0}, {"b": 1.0, "w": np.zeros(3)}, {"b": "one"}, {}):
        with pytest.raises(td.TreadleError):
            found.accumulate(bad)
    with pytest.raises(td.ArgumentError, match="weight = -1"):
        found.accumulate(gradients_of(1), weight=-1)
    after = found.gradients()
    assert all(np.array_equal(before[n], after[n]) for n in SHAPES)
    assert found.stats.accumulated == 1


def test_a_window_may_be_cut_short() -> None:
    found = accumulator(4)
    found.accumulate(gradients_of(0))
    found.accumulate(gradients_of(1))
    assert not found.should_update
    mean = (gradients_of(0)["w"] + gradients_of(1)["w"]) / 2
    np.testing.assert_allclose(found.step()["w"], mean, rtol=1e-15)


def test_left_out_parameters_have_no_gradient() -> None:
    found = accumulator(2)
    found.accumulate({"b": np.float32(4)})
    found.accumulate({"b": np.float32(2)})
    result = found.step()
    assert result["b"] == 3
    assert result["w"].shape == (2, 3)
    assert not result["w"].any()


def test_narrow_gradients_are_added_wide() -> None:
    found = accumulator(4096, normalize=False)
    for _ in range(4096):
        found.accumulate({"b": np.float16(1)})
    assert found.step()["b"] == 4096  # float16 counts to 2048


def test_what_was_given_is_not_changed() -> None:
    found, given_ = accumulator(2), gradients_of(0)
    kept = {n: g.copy() for n, g in given_.items()}
    found.accumulate(given_)
    found.gradients()["w"][:] = 7
    found.accumulate(given_)
    result = found.step()
    assert all(np.array_equal(given_[n], kept[n]) for n in SHAPES)
    np.testing.assert_allclose(result["w"], kept["w"], rtol=1e-15)


def test_statistics() -> None:
    found = accumulator(2, max_grad_norm=1.0)
    assert found.effective_batch_size(16) == 32
    found.accumulate({"b": 3.0}, weight=2)
    found.accumulate({"b": 3.0}, weight=3)
    assert found.stats.weight == 5
    found.step()
    found.accumulate({"b": 0.5})
    found.step()
    found.accumulate({"b": 0.5})
    stats = found.stats
    assert (stats.steps, stats.accumulated, stats.micro_batches, stats.updates) == (2, 1, 4, 2)
    assert (stats.clipped, stats.grad_norm, stats.parameters, stats.elements) == (1, 0.5, 2, 7)
    assert repr(found) == "GradientAccumulator(1 of 2, mean)"


@pytest.mark.parametrize(
    "call",
    [
        lambda: td.GradientAccumulator(0),
        lambda: td.GradientAccumulator(2.5),  # type: ignore[arg-type]
        lambda: td.GradientAccumulator(2, max_grad_norm=0.0),
        lambda: accumulator().effective_batch_size(0),
        lambda: accumulator().register("w", (2, 3)),
    ],
)
def test_bad_arguments(call) -> None:
    with pytest.raises((td.ArgumentError, td.NameTakenError)):
        call()
