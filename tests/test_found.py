"""What readers and users of the code found wrong once, and must stay right."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

import treadle as td
from treadle import losses, nn, optim
from treadle.codegen.cuda.driver import render_program
from treadle.domains.field import equal_graphs
from treadle.kernel.index import Data, Index, Var, variable
from treadle.kernel.nodes import For, Load, Role, Store
from treadle.kernel.races import conflicts_in
from treadle.schedule.schedule import GPU, schedule

Spec = td.Spec
X, Y = Spec((6,)), Spec((6,))

DIFFERENT = {
    "log of a sign": (lambda x, y: td.log(-x), lambda x, y: td.log(x)),
    "truncation": (lambda x, y: x.astype(td.int32).astype(td.float32), lambda x, y: x),
    "equality of pieces": (
        lambda x, y: td.where(td.relu(x) == 0, 5, td.relu(x)),
        lambda x, y: td.relu(x),
    ),
    "two relus": (lambda x, y: td.where(td.relu(x) == td.relu(y), x, y), lambda x, y: y),
    "floor": (lambda x, y: td.where(td.floor(x) == 0, 5, x), lambda x, y: x),
    "bool of relu": (lambda x, y: td.where(td.relu(x).astype(td.bool_), x, 7), lambda x, y: x),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_the_field_tells_these_apart(name: str) -> None:
    f, g = DIFFERENT[name]
    assert not equal_graphs(td.trace(f, X, Y), td.trace(g, X, Y))


def test_leaves_of_other_shapes_are_other_functions() -> None:
    f, g = (td.trace(lambda x: x.sum(), Spec((n,))) for n in (3, 5))
    assert not equal_graphs(f, g)


def weighted(model, batch):
    each = losses.mse(model(batch)[:, 0], td.zeros((4,)), reduction="none")
    weight = td.exp(model(batch)[:, 1])
    return td.Mean((weight * each).sum(), weight.sum())


def test_a_weight_that_depends_on_parameters_has_its_gradient() -> None:
    step, plain = (
        td.compile_step(nn.Linear(3, 2), f, optim.sgd(0.1), Spec((4, 3)))
        for f in (weighted, lambda m, b: weighted(m, b).tensor())
    )
    x = np.random.default_rng(0).normal(size=(4, 3))
    for name, g in plain.gradients(x).items():
        np.testing.assert_allclose(step.gradients(x)[name], g, rtol=1e-5, atol=1e-7)
    with pytest.raises(td.GradientError, match="the weight of the loss depends on parameters"):
        td.compile_step(nn.Linear(3, 2), weighted, optim.sgd(0.1), Spec((4, 3)), accumulate=2)


def test_a_metric_without_weight_does_not_spoil_the_mean() -> None:
    def loss(model, batch):
        value = losses.cross_entropy(model(batch["x"]), batch["y"], ignore_index=-1)
        td.metric("ce", value.tensor(), value.weight)
        return value

    specs = {"x": Spec((2, 3)), "y": Spec((2,), td.int32)}
    step = td.compile_step(nn.Linear(3, 3), loss, optim.sgd(0.1), specs, accumulate=2)
    x = np.ones((2, 3))
    step({"x": x, "y": np.array([-1, -1])})
    out = step({"x": x, "y": np.array([0, 1])})
    assert np.isfinite(out.metrics["ce"])
    assert out.metrics["ce"] == pytest.approx(out.loss)


def test_a_product_of_means_is_a_mean_of_the_first() -> None:
    a, b = td.Mean(td.tensor(6.0), td.tensor(3.0)), td.Mean(td.tensor(8.0), td.tensor(2.0))
    assert (a * b).item() == 8.0
    assert (a / b).item() == 0.5


def test_freezing_after_compiling_changes_nothing() -> None:
    model = nn.Linear(2, 1)
    options = td.CompileOptions(on_new_shape="specialise")
    step = td.compile_step(
        model, lambda m, x: (m(x) ** 2).mean(), optim.adam(0.1), Spec((3, 2)), options=options
    )
    model.requires_grad_(False)
    for rows in (3, 5):
        before = step.params["weight"]
        step(np.ones((rows, 2)))
        assert not np.array_equal(step.params["weight"], before)


def test_a_negative_seed_resets_to_itself() -> None:
    def make(seed):
        return td.compile_step(
            nn.Linear(2, 1), lambda m, x: m(x).sum(), optim.sgd(0.1), Spec((3, 2)), seed=seed
        )

    step, other = make(-1), make(0)
    first = step.params["weight"]
    other.load_state_dict(step.state_dict())
    other.reset()
    np.testing.assert_array_equal(other.params["weight"], first)


@pytest.mark.parametrize(
    "optimizer",
    [
        optim.groups(("*.bais", optim.sgd(0.1)), ("*", optim.sgd(0.2))),
        optim.adamw(0.1, decay="fc9.weight"),
        optim.sgd(0.1, decay="fc9.weight"),
    ],
    ids=["groups", "adamw", "sgd"],
)
def test_a_selector_that_selects_nothing_is_an_error(optimizer) -> None:
    with pytest.raises(td.ArgumentError, match="selects no parameter. There are: weight, bias"):
        td.compile_step(nn.Linear(2, 1), lambda m, x: m(x).sum(), optimizer, Spec((3, 2)))


def test_accumulate_is_a_whole_number() -> None:
    with pytest.raises(td.ArgumentError, match="accumulate = 1.5"):
        td.compile_step(
            nn.Linear(2, 1), lambda m, x: m(x).sum(), optim.sgd(0.1), Spec((3, 2)), accumulate=1.5
        )


def test_saved_files_have_ordinary_permissions(tmp_path: Path) -> None:
    step = td.compile_step(nn.Linear(2, 1), lambda m, x: m(x).sum(), optim.sgd(0.1), Spec((3, 2)))
    step.save(tmp_path / "state")
    (tmp_path / "plain").write_bytes(b"")
    assert (tmp_path / "state").stat().st_mode == (tmp_path / "plain").stat().st_mode


# Native programs


def both(function, *arrays: np.ndarray) -> list[np.ndarray]:
    specs = [Spec(a.shape) for a in arrays]
    return [td.compile(function, *specs, device=d)(*arrays) for d in ("cpu", "oracle")]


def nested_sum(x):
    def outer(c, row):
        return td.scan(lambda d, r: (d + r, None), c, row)[0], None

    return td.scan(outer, td.zeros(()), x)[0]


def test_nested_scans_read_their_own_rows() -> None:
    x = np.array([[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]])
    native, exact = both(nested_sum, x)
    assert native == exact == 333.0
    native, exact = both(td.grad(lambda x: nested_sum(x * x)), x)
    np.testing.assert_allclose(native, exact)


def test_a_tensor_may_be_scanned_and_closed_over() -> None:
    x = np.arange(6.0).reshape(3, 2)
    native, exact = both(lambda x: td.scan(lambda c, r: (c, x), td.zeros(()), x)[1], x)
    np.testing.assert_array_equal(native, exact)
    native, exact = both(
        lambda x: td.scan(lambda c, r: (c + td.sum(x * r), None), td.zeros(()), x)[0], x
    )
    np.testing.assert_allclose(native, exact)


def test_zero_and_minus_zero_are_different_kernels() -> None:
    native = td.compile(lambda x: (x / 0.0, x / (-0.0)), Spec((1,)), device="cpu")(np.ones(1))
    assert [float(a[0]) for a in native] == [np.inf, -np.inf]


def test_values_that_are_used_twice_do_not_double() -> None:
    def grown(x):
        for _ in range(40):
            x = x * x * 0.5 + x * 0.25
        return x

    native, exact = both(grown, np.full(3, 0.5))
    np.testing.assert_allclose(native, exact, rtol=1e-4, atol=1e-12)


def test_long_chains_are_cut_into_pieces() -> None:
    def chain(x):
        for _ in range(2000):
            x = td.sin(x) + 0.01
        return x

    native, exact = both(chain, np.linspace(0, 1, 5))
    np.testing.assert_allclose(native, exact, rtol=1e-3)


def test_remainders_with_large_quotients_and_infinities() -> None:
    inf = np.inf
    x = np.array([1e-8, -1e-8, 1e10, -1.0, 1.0, 7.0, -7.0, 5.5], np.float32)
    y = np.array([-1.0, 1.0, 3.0, inf, -inf, 2.0, 2.0, -2.0], np.float32)
    native = td.compile(lambda x, y: (x % y, x // y), Spec((8,)), Spec((8,)), device="cpu")(x, y)
    np.testing.assert_array_equal(native[0], np.mod(x, y))
    np.testing.assert_array_equal(native[1], np.floor_divide(x, y))


def test_steps_and_programs_may_be_called_from_several_threads() -> None:
    batch = np.ones((6, 4), np.float32)
    step = td.compile_step(
        nn.Linear(4, 3), lambda m, b: (m(b) ** 2).mean(), optim.sgd(0.0), Spec((6, 4)), device="cpu"
    )
    programs = [td.compile(lambda x, k=k: x * k, Spec((3000,)), device="cpu") for k in range(6)]
    wrong: list[int] = []

    def work(k: int) -> None:
        x = np.full(3000, k + 1.0, np.float32)
        for _ in range(40):
            step(batch)
            for i, program in enumerate(programs):
                if not (program(x) == (k + 1.0) * i).all():
                    wrong.append(i)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    assert step.count == 160


@pytest.mark.parametrize("optimizer", [lambda: optim.sgd(0.1), lambda: optim.adamw(3e-3)])
@pytest.mark.parametrize("sizes", [(64, 64, 64), (64, 64, 128), (32, 100, 50)])
def test_layers_of_ordinary_sizes_train_as_the_oracle_does(sizes, optimizer) -> None:
    """These sizes once trained wrongly on the CPU, while every smaller model was right."""
    rows, inputs, hidden = sizes
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(rows, inputs)), "y": rng.integers(0, 10, rows)}
    found = []
    for device in ("oracle", "cpu"):
        net = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, 10))
        specs = {"x": Spec((rows, inputs)), "y": Spec((rows,), td.int32)}
        step = td.compile_step(
            net,
            lambda m, b: losses.cross_entropy(m(b["x"]), b["y"]),
            optimizer(),
            specs,
            device=device,
        )
        found.append(([step(batch).loss for _ in range(3)], step.params))
    (exact, expected), (native, params) = found
    assert native == pytest.approx(exact, rel=1e-5)
    for name, value in expected.items():
        np.testing.assert_allclose(params[name], value, atol=1e-5, err_msg=name)


# Kindness


def small_step(**keywords) -> td.TrainStep:
    return td.compile_step(
        nn.Linear(2, 1),
        lambda m, b: (m(b["x"]) ** 2).mean(),
        optim.sgd(0.1),
        {"x": Spec((3, 2))},
        **keywords,
    )


def test_a_misspelt_property_is_an_error() -> None:
    step = small_step()
    with pytest.raises(AttributeError, match="has no 'lr' to set"):
        step.lr = 0.1
    step.lr_scale = 0.5
    assert "3 parameters, 0 updates, device='cpu'" in repr(step)


def test_lists_and_numbers_are_not_arrays() -> None:
    with pytest.raises(td.BatchError, match="and 1 more; lists of numbers are not arrays"):
        small_step()({"x": [[1.0, 2.0]] * 3})
    with pytest.raises(
        td.ArgumentError, match="the Python number 3 in it. Describe an input by td.Spec"
    ):
        td.compile_step(
            nn.Linear(2, 1), lambda m, b: m(b["x"]).sum(), optim.sgd(0.1), {"x": (3, 2)}
        )


def test_a_precision_by_another_name() -> None:
    with pytest.raises(
        td.ArgumentError, match="'bf16' is not a precision to train in. Use float32"
    ):
        small_step(precision="bf16")


def test_attach_takes_options() -> None:
    predict = small_step().attach(
        lambda m, x: m(x), Spec((1, 2)), options=td.CompileOptions(on_new_shape="specialise")
    )
    assert predict(np.ones((5, 2))).shape == (5, 1)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 8, 16, 33, 64, 69])
def test_the_largest_of_a_product(n: int) -> None:
    """An index of one possible value is no overlap: it compiles, at every size."""
    rng = np.random.default_rng(n)
    a, b = (rng.normal(size=(n, n)).astype(np.float32) for _ in range(2))
    found = td.compile(lambda a, b: td.topk(a @ b, 1, 1), td.Spec((n, n)), td.Spec((n, n)))(a, b)
    np.testing.assert_allclose(found[0][:, 0], (a @ b).max(1), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found[1][:, 0], (a @ b).argmax(1))


@pytest.mark.parametrize(
    ("shape", "chosen"), [((2, 3, 1), (2, 1, 1)), ((2, 1), (2, 3)), ((1, 1), (1, 1))]
)
def test_the_gradient_of_few_elements_taken(
    shape: tuple[int, ...], chosen: tuple[int, ...]
) -> None:
    gradient = td.grad(lambda x, i: (td.take_along_axis(x, i, 1) ** 2).sum())
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    i = np.zeros(chosen, np.int32)
    specs = td.Spec(shape), td.Spec(chosen, td.int32)
    found, expected = (td.compile(gradient, *specs, device=d)(x, i) for d in ("cpu", "oracle"))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_gradients_of_a_spread_add_up_to_nothing() -> None:
    """Far from zero the mean is rounded coarsely; the gradients are not."""
    x = (np.random.default_rng(0).normal(size=(64, 33)) + 300).astype(np.float32)
    found = td.compile(td.grad(lambda x: td.std(x, 1).sum()), td.Spec(x.shape), device="cpu")(x)
    assert np.abs(found.sum(1)).max() < 1e-6


def test_the_oracle_rounds_a_float64_that_is_cast() -> None:
    x = np.array([1 + 2.0**-40, 1 / 3])
    f = lambda x: td.cast(td.cast(x, td.float32), td.float64)  # noqa: E731
    found = td.compile(f, td.Spec((2,), td.float64), device="oracle")(x)
    np.testing.assert_array_equal(found, x.astype(np.float32).astype(np.float64))


def test_a_bound_is_what_a_device_holds() -> None:
    """The float32 next to 0.8 is above it: nobody may say that it lies outside."""
    x = np.array([0.8, -0.5, np.nextafter(np.float32(0.8), np.float32(1))], np.float32)
    gradient = td.grad(lambda x: td.clamp(x, -0.5, 0.8).sum())
    for device in ("cpu", "oracle"):
        found = td.compile(gradient, td.Spec((3,)), device=device)(x)
        np.testing.assert_array_equal(found, [1, 1, 0])


@pytest.mark.parametrize("sizes", [(12, 255, 33, 16), (32, 16, 1000, 5), (8, 63, 63, 100)])
def test_tiles_of_wide_floats_fit_into_shared_memory(sizes: tuple[int, ...]) -> None:
    batch, m, n, k = sizes
    f = td.grad(lambda a, b: ((a @ b) ** 2).sum(), (0, 1))
    specs = td.Spec((batch, m, k), td.float64), td.Spec((batch, k, n), td.float64)
    source = render_program(schedule(td.trace(f, *specs), target=GPU))
    assert max(p.shared for p in (*source.launches, *source.cooperative)) <= 96 << 10


@pytest.mark.parametrize("device", ["cpu", "oracle"])
def test_the_gradient_of_bce_in_float16(device: str) -> None:
    """1e-12 is zero there: the branch that is not taken gave a NaN."""
    x = np.array([0.0, 1e-4, 0.2, 0.5, 0.9, 1.0], np.float16)
    y = np.array([0.0, 1, 1, 0, 1, 1], np.float16)
    gradient = td.grad(lambda x, y: losses.bce(x, y, reduction="none").sum())
    found = td.compile(
        gradient, Spec(x.shape, td.float16), Spec(y.shape, td.float16), device=device
    )(x, y)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found[2:5], [-5, 2, -1 / 0.9], rtol=1e-2)


def test_a_row_that_is_found_once_for_all_rows_of_a_softmax() -> None:
    """An index that is data and the same in all iterations was taken for one that overlaps."""
    rng = np.random.default_rng(0)
    x, u = rng.normal(size=(17, 3, 5)), rng.normal(size=(17, 1, 5))
    w = rng.normal(size=(17, 3, 5))
    at = np.array([1], np.int32)

    def total(x, u, at, w):
        return (td.softmax(td.scatter_add(x, at, u, 1), 1) * w).sum()

    arrays = [x.astype(np.float32), u.astype(np.float32), at, w.astype(np.float32)]
    specs = [td.Spec(a.shape, str(a.dtype)) for a in arrays]
    f = td.grad(total, (0, 1))
    ours, exact = (td.compile(f, *specs, device=d)(*arrays) for d in ("cpu", "oracle"))
    for a, b in zip(ours, exact, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_rows_that_data_moves_by_one_number_still_meet() -> None:
    i = Var("i", 8)
    there = variable(i) + Index(((Data("d", 3), 1),))
    body = (Store("y", variable(i), Load("y", there, td.float32)),)
    assert conflicts_in(For(i, Role.PARALLEL, body)) == {"y"}
    apart = (
        Store("y", variable(i) * 3, Load("y", there - variable(i) + variable(i) * 3, td.float32)),
    )
    assert not conflicts_in(For(i, Role.PARALLEL, apart))
