"""Random numbers: known answers of Philox, distributions, and who gets which bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import scipy.stats

import treadle as td
from refusals import refused
from treadle.base.dtypes import FLOATS, DType
from treadle.domains.float64 import evaluate_float64
from treadle.domains.philox import make_key, philox4x32, random_bits
from treadle.frontend.scopes import EAGER

ONES = 0xFFFFFFFF
# Counter, key and words, from the authors' reference implementation.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    td.random.seed(0)
    yield
    td.random.seed(0)


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_known_answers(counter: Any, key: Any, words: Any) -> None:
    found = philox4x32(tuple(np.array([c], np.uint64) for c in counter), key)
    assert tuple(int(w[0]) for w in found) == words


def test_bits_are_philox_blocks() -> None:
    """Element i is word i mod 4 of block i div 4; the key is the seed."""
    seed, step, micro, site = (7 << 32) + 5, 3, 2, 9
    found = random_bits(make_key(seed, step, micro), site, (2, 3))
    zero = np.zeros(2, np.uint64)
    counter = (np.arange(2, dtype=np.uint64), zero, zero + step, zero + (micro << 16) + site)
    words = np.stack(philox4x32(counter, (5, 7)), -1).reshape(-1)
    np.testing.assert_array_equal(found.reshape(-1), words[:6])


def draw(function: Callable[..., Any], seed: int = 0, step: int = 0, micro: int = 0) -> Any:
    """The results of a traced function without arguments."""
    graph = td.trace(function)
    return evaluate_float64(graph, {"random:key": make_key(seed, step, micro)})


SAMPLERS: dict[str, Callable[..., td.Tensor]] = {
    "bits": td.random.bits,
    "uniform": td.random.uniform,
    "normal": td.random.normal,
    "bernoulli": lambda shape: td.random.bernoulli(0.3, shape),
    "categorical": lambda shape: td.random.categorical(td.zeros((*shape, 5))),
}
DTYPES = {"bits": td.uint32, "bernoulli": td.bool_, "categorical": td.int32}


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("shape", [(), (7,), (2, 3, 5), (0,), (3, 0)], ids=str)
def test_shapes_and_dtypes(name: str, shape: tuple[int, ...]) -> None:
    x = SAMPLERS[name](shape)
    assert x.shape == shape
    assert x.dtype is DTYPES.get(name, td.float32)
    assert draw(lambda: SAMPLERS[name](shape))[0].shape == shape


N = 40_000


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_uniform(dtype: DType) -> None:
    x = td.random.uniform((N,), dtype=dtype)
    assert x.dtype is dtype
    values = x.numpy().astype(np.float64)
    assert values.min() >= 0
    assert values.max() < 1
    assert abs(values.mean() - 0.5) < 0.01
    assert abs(values.var() - 1 / 12) < 0.005
    scaled = td.random.uniform((N,), -3.0, 5.0).numpy()
    assert scaled.min() >= -3
    assert scaled.max() <= 5
    assert abs(scaled.mean() - 1) < 0.05


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_normal(dtype: DType) -> None:
    x = td.random.normal((N,), dtype=dtype).numpy().astype(np.float64)
    assert np.isfinite(x).all()
    assert abs(x.mean()) < 0.02
    assert abs(x.std() - 1) < 0.02
    assert abs(scipy.stats.kurtosis(x)) < 0.1
    assert scipy.stats.kstest(x, "norm").pvalue > 1e-3
    scaled = td.random.normal((N,), 5.0, 0.1).numpy()
    assert abs(scaled.mean() - 5) < 0.01
    assert abs(scaled.std() - 0.1) < 0.01


@pytest.mark.parametrize("p", [0, 0.0, 0.25, 0.9, 1, 1.0])
def test_bernoulli(p: float) -> None:
    x = td.random.bernoulli(p, (N,)).numpy()
    assert abs(x.mean() - p) < 0.01
    if p in (0, 1):
        assert (x == bool(p)).all()


def test_bernoulli_of_tensors() -> None:
    p = np.linspace(0, 1, 5)
    x = td.random.bernoulli(td.tensor(p), (N, 5)).numpy()
    np.testing.assert_allclose(x.mean(0), p, atol=0.01)
    assert td.random.bernoulli(p).shape == (5,)


def test_categorical_frequencies() -> None:
    logits = np.log([0.1, 0.2, 0.3, 0.4])
    x = td.random.categorical(td.expand(td.tensor(logits), (N, 4))).numpy()
    np.testing.assert_allclose(np.bincount(x, minlength=4) / N, np.exp(logits), atol=0.01)
    columns = td.random.categorical(td.expand(td.tensor(logits[:, None]), (4, N)), axis=0).numpy()
    np.testing.assert_allclose(np.bincount(columns, minlength=4) / N, np.exp(logits), atol=0.01)


def test_categorical_never_takes_what_is_forbidden() -> None:
    logits = td.where(td.iota((N, 3)) == 1, -np.inf, 0.0)
    assert set(td.random.categorical(logits).numpy()) == {0, 2}


def test_different_sites_differ() -> None:
    a, b = draw(lambda: (td.random.bits((64,)), td.random.bits((64,))))
    assert (a != b).all()


def test_same_seed_same_bits() -> None:
    def draws() -> tuple[td.Tensor, ...]:
        return tuple(sample((6,)) for sample in SAMPLERS.values())

    for a, b in zip(draw(draws, 5), draw(draws, 5), strict=True):
        np.testing.assert_array_equal(a, b)
    bits = [draw(draws, *place)[0] for place in ((5,), (6,), (5, 1), (5, 0, 1), (5 << 32,))]
    assert len({b.tobytes() for b in bits}) == len(bits)


def test_random_needs_the_random_state() -> None:
    graph = td.trace(lambda x: x * td.random.uniform((3,)), td.Spec((3,)))
    assert list(graph.leaves) == ["x", "random:key"]
    with pytest.raises(td.ArgumentError, match="no value for random"):
        evaluate_float64(graph, {"x": np.ones(3)})


# The eager stream --------------------------------------------------------------------------------


def noisy(x: td.Tensor) -> td.Tensor:
    return (x * td.random.uniform((4,))).sum()


def test_seed_starts_the_eager_stream_again() -> None:
    first = [td.random.bits((4,)).numpy() for _ in range(3)]
    td.random.seed(0)
    again = [td.random.bits((4,)).numpy() for _ in range(3)]
    np.testing.assert_array_equal(first, again)
    td.random.seed(1)
    assert (td.random.bits((4,)).numpy() != first[0]).all()


def test_the_eager_stream_never_repeats() -> None:
    x = np.ones(4)
    draws = [
        td.random.uniform((4,)),
        td.grad(noisy)(x),
        td.grad(noisy)(x),
        td.random.uniform((4,)),
        td.vjp(noisy, x)[1](np.float64(1))[0],
        td.jvp(lambda x: x * td.random.uniform((4,)), (x,), (x,))[1],
        td.grad(td.checkpoint(noisy))(x),
        td.random.uniform((4,)),
    ]
    rounded = {tuple(np.float32(d.numpy()).tolist()) for d in draws}
    assert len(rounded) == len(draws)


def test_the_eager_stream_goes_on_beyond_its_sites() -> None:
    first = td.random.bits((4,)).numpy()
    EAGER.sites = 2**16
    assert (td.random.bits((4,)).numpy() != first).all()


def test_value_and_gradient_see_the_same_bits() -> None:
    x = np.ones(4)
    value, gradient = td.value_and_grad(noisy)(x)
    np.testing.assert_allclose(value.numpy(), gradient.numpy().sum())
    value, pull = td.vjp(noisy, x)
    np.testing.assert_allclose(value.numpy(), pull(np.float64(1))[0].numpy().sum())
    np.testing.assert_allclose(value.numpy(), pull(np.float64(2))[0].numpy().sum() / 2)
    value, slope = td.jvp(noisy, (x,), (x,))
    np.testing.assert_allclose(value.numpy(), slope.numpy())


# Bodies ------------------------------------------------------------------------------------------


def test_random_inside_scan_differs_per_step() -> None:
    def function() -> Any:
        return td.scan(lambda c, _: (c, td.random.bits((4,))), None, length=6)[1]

    (rows,) = draw(function)
    assert len({row.tobytes() for row in rows}) == 6
    np.testing.assert_array_equal(rows, draw(function)[0])
    (other,) = draw(function, seed=1)
    assert (rows != other).all()


def test_random_inside_nested_scans_differs_per_step() -> None:
    def inner(c: Any, _: Any) -> Any:
        return c, td.random.bits((4,))

    def function() -> Any:
        outer = td.random.bits((4,))
        rows = td.scan(lambda c, _: td.scan(inner, c, length=3), None, length=5)[1]
        return td.concat([outer[None], rows.reshape(15, 4)])

    (rows,) = draw(function)
    assert len({row.tobytes() for row in rows}) == 16


@pytest.mark.parametrize("recompute", [False, True])
def test_dropout_inside_scan_has_the_masks_of_the_forward(recompute: bool) -> None:
    def loss(x: td.Tensor) -> Any:
        def body(c: td.Tensor, _: Any) -> Any:
            kept = td.random.bernoulli(0.5, (32,))
            return c * td.where(kept, 1.5, 0.5), kept

        last, masks = td.scan(body, x, length=4, recompute=recompute)
        return last.sum(), masks

    graph = td.trace(td.grad(loss, has_aux=True), td.Spec((32,)))
    gradient, masks = evaluate_float64(graph, {"x": np.ones(32), "random:key": make_key(3)})
    np.testing.assert_array_equal(gradient, np.where(masks, 1.5, 0.5).prod(0))


def test_dropout_inside_checkpoint_has_the_mask_of_the_forward() -> None:
    def loss(x: td.Tensor) -> td.Tensor:
        return td.checkpoint(lambda x: x * td.random.uniform((32,)))(x).sum()

    graph = td.trace(td.value_and_grad(loss), td.Spec((32,)))
    value, gradient = evaluate_float64(graph, {"x": np.ones(32), "random:key": make_key(3)})
    np.testing.assert_allclose(value, gradient.sum())


def test_traced_and_eager_bits_agree() -> None:
    """The eager stream is the program's, at step 0 and its sites in order."""
    eager = [td.random.bits((5,)).numpy() for _ in range(3)]
    traced = draw(lambda: tuple(td.random.bits((5,)) for _ in range(3)))
    np.testing.assert_array_equal(eager, traced)


# Programs of one session

SPEC, X = td.Spec((6,)), np.ones(6, np.float32)


class Weights(td.nn.Module):
    def __init__(self) -> None:
        self.w = td.nn.Parameter((6,))


def noisy_loss(model: Any, x: Any) -> Any:
    return ((model.w - td.capture("noise", td.random.normal((6,)))) * x).sum()


def sample(model: Any, x: Any) -> Any:
    return td.random.normal((6,)) * x


def noise(step: td.TrainStep) -> np.ndarray:
    return step(X, captures=True).captures["noise"]


def compiled(device: str, **options: Any) -> td.TrainStep:
    return td.compile_step(Weights(), noisy_loss, td.optim.sgd(0.1), SPEC, device=device, **options)


def draws(device: str, forwards_between: int = 0) -> dict[str, np.ndarray]:
    """Two steps and two forwards of one session, all at their first call."""
    one = compiled(device)
    between = [one.attach(sample, SPEC) for _ in range(forwards_between)]
    two = compiled(device, share=one)
    rest = [one.attach(sample, SPEC) for _ in range(2 - forwards_between)]
    first, second = [*between, *rest]
    return {"one": noise(one), "two": noise(two), "first": first(X), "second": second(X)}


@pytest.mark.parametrize("device", ["cpu", "oracle"])
def test_programs_of_a_session_draw_numbers_of_their_own(device: str) -> None:
    found = draws(device)
    values = list(found.values())
    for i, a in enumerate(values):
        assert not any(np.isin(a, b).any() for b in values[i + 1 :])
    # Again the same; and looking at a model in between changes no step's numbers.
    for again in (draws(device), draws(device, 1), draws(device, 2)):
        assert all(np.array_equal(again[name], value) for name, value in found.items())


def test_programs_that_are_told_one_stream_draw_the_same() -> None:
    """Steps of one session and forwards beside them; each counts its own calls."""
    one = compiled("oracle", stream=0)
    two = compiled("oracle", share=one, stream=0)
    apart = compiled("oracle", share=one)
    first, second = (one.attach(sample, SPEC, stream=7) for _ in range(2))
    third = td.compile_forward(Weights(), sample, SPEC, share=one, stream=7, device="oracle")
    for _ in range(2):
        noises = [noise(step) for step in (one, two, apart)]
        np.testing.assert_array_equal(noises[0], noises[1])
        assert not np.isin(noises[2], noises[0]).any()
        seen = first(X)
        np.testing.assert_array_equal(second(X), seen)
        np.testing.assert_array_equal(third(X), seen)
    assert not np.array_equal(first(X), seen)
    for wrong in (-1, 1.5, "a", True):
        with pytest.raises(td.ArgumentError, match="stream"):
            compiled("oracle", stream=wrong)


def test_many_steps_in_one_call_draw_what_single_ones_do() -> None:
    """Of the second program too, and after a reset; micro-steps of two programs differ."""
    one, other = compiled("cpu"), compiled("cpu")
    two, again = compiled("cpu", share=one), compiled("cpu", share=other)
    losses = [two(X).loss for _ in range(4)]
    assert again.run([X] * 4).losses.tolist() == losses
    two.reset()
    two.load_params({"w": np.zeros(6)})
    assert two(X).loss == losses[0]
    a = compiled("oracle", accumulate=2)
    b = compiled("oracle", share=a, accumulate=2)
    micro = [noise(step) for step in (a, b, a, b)]
    for i, values in enumerate(micro):
        assert not any(np.isin(values, later).any() for later in micro[i + 1 :])


@pytest.mark.parametrize("device", ["cpu", "oracle"])
def test_the_first_program_draws_by_the_seed_itself(device: str) -> None:
    key = make_key(0)
    bits = random_bits(key, 0, (6,))
    first = td.compile(lambda: td.random.bits((6,)), device=device)
    np.testing.assert_array_equal(first(), bits)
    np.testing.assert_array_equal(noise(compiled(device)), draws(device)["one"])
    assert np.array_equal(make_key(7, 3, 2), [7, 0, 3, 2, 0, 0])
    assert not np.array_equal(make_key(7, 3, 2, 1)[:2], make_key(7, 3, 2, 2)[:2])


def test_evaluation_and_gradients_draw_as_the_next_step_will() -> None:
    one = compiled("cpu")
    two = compiled("cpu", share=one)
    seen = two.evaluate(X, captures=True).captures["noise"]
    np.testing.assert_array_equal(noise(two), seen)


@pytest.mark.parametrize("device", ["cpu", "oracle"])
def test_a_state_has_the_stream_that_it_was_drawn_from(device: str) -> None:
    """Also where the step is the second of its session, and the one that goes on the first."""
    one = compiled(device)
    two = compiled(device, share=one, accumulate=2)
    noise(two)
    state = two.state_dict()
    expected = [noise(two) for _ in range(3)]
    alone = compiled(device, accumulate=2)
    alone.load_state_dict(state)
    assert all(np.array_equal(noise(alone), e) for e in expected)
    assert one.state_dict()["step:counters"].shape == (4,), "a step by itself is as it was"


def test_a_state_from_before_there_were_streams() -> None:
    one = compiled("cpu")
    two = compiled("cpu", share=one)
    state = two.state_dict()
    state["step:counters"] = state["step:counters"][:4]
    two.load_state_dict(state)
    np.testing.assert_array_equal(noise(two), noise(compiled("cpu")))


def test_a_program_that_does_not_compile_has_no_stream() -> None:
    one = compiled("oracle")
    with pytest.raises(td.TreadleError):
        one.attach(lambda m, x: x @ td.ones((5, 5)), SPEC)
    with pytest.raises(td.TreadleError):
        td.compile_step(
            Weights(), lambda m, x: x, td.optim.sgd(0.1), SPEC, share=one, device="oracle"
        )
    np.testing.assert_array_equal(one.attach(sample, SPEC)(X), draws("oracle")["first"])
    np.testing.assert_array_equal(noise(compiled("oracle", share=one)), draws("oracle")["two"])


def test_multinomial_draws_by_weights() -> None:
    """With and without replacement, as often as PyTorch's would."""
    weights = np.tile(np.array([1, 0, 2, 5], np.float32), (20000, 1))

    def drawn(p):
        return td.random.multinomial(p, 7, True), td.random.multinomial(p, 2)

    several, two = td.compile(drawn, td.Spec(weights.shape), device="cpu")(weights)
    np.testing.assert_allclose(
        np.bincount(several.ravel()) / several.size * 8, [1, 0, 2, 5], atol=0.1
    )
    assert (two[:, 0] != two[:, 1]).all()
    first = np.bincount(two[:, 0], minlength=4) / len(two)
    np.testing.assert_allclose(first, [1 / 8, 0, 2 / 8, 5 / 8], atol=0.015)
    second = np.bincount(two[two[:, 0] == 3][:, 1], minlength=4) / (two[:, 0] == 3).sum()
    np.testing.assert_allclose(second, [1 / 3, 0, 2 / 3, 0], atol=0.02)
    wrong = lambda: td.random.multinomial([1.0, 0.0], 2)  # noqa: E731
    refused(wrong, td.ArgumentError, "multinomial", "fewer than 2")
    refused(lambda: td.random.multinomial([1.0, 2.0], 3), td.ArgumentError, "multinomial")
    refused(lambda: td.random.multinomial([1.0, -2.0], 1), td.ArgumentError, "multinomial")


def test_randint_is_even() -> None:
    def drawn(x):
        return td.random.randint(-3, 9, (24000,)), td.random.randint(0, 2**31, (4000,), td.int64)

    few, many = td.compile(drawn, td.Spec((1,)), device="cpu")(np.zeros(1, np.float32))
    assert few.dtype == np.int32
    assert many.dtype == np.int64
    np.testing.assert_allclose(np.bincount(few + 3, minlength=12) / 2000, 1, atol=0.1)
    assert many.min() >= 0
    np.testing.assert_allclose(np.histogram(many, 4, (0, 2**31))[0] / 1000, 1, atol=0.15)
    refused(lambda: td.random.randint(3, 3, (2,)), td.ArgumentError, "randint", "low < high")
    refused(lambda: td.random.randint(0, 300, (2,), td.uint8), td.ArgumentError, "randint")
