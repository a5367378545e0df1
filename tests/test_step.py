"""The surface of a compiled step."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import treadle as td
from treadle import losses, nn, optim

Spec = td.Spec


class Net(nn.Module):
    def __init__(self, inputs: int = 5, hidden: int = 7, classes: int = 3, dropout: float = 0.0):
        self.fc1, self.fc2 = nn.Linear(inputs, hidden), nn.Linear(hidden, classes)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.fc2(self.dropout(td.tanh(self.fc1(x))))


def loss(model, batch):
    logits = td.capture("logits", model(batch["x"]))
    hits = (logits.argmax(-1) == batch["y"]).astype(td.float32)
    td.metric("accuracy", hits.mean(), len(batch["y"]))
    return losses.cross_entropy(logits, batch["y"])


SPECS = {"x": Spec((4, 5)), "y": Spec((4,), td.int32)}


def batch(seed: int = 0, size: int = 4) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(size, 5)), "y": rng.integers(0, 3, size)}


def make(**keywords) -> td.TrainStep:
    optimizer = keywords.pop("optimizer", optim.adamw(1e-2))
    return td.compile_step(keywords.pop("model", Net()), loss, optimizer, SPECS, **keywords)


def same_values(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[n], b[n]) for n in a)


def test_a_step_learns_and_tells() -> None:
    step = make()
    first = step(batch())
    assert isinstance(first.loss, float)
    assert first.updated
    assert first.grad_norm > 0
    assert set(first.metrics) == {"accuracy"}
    assert first.captures == {}
    assert first.grad_norms == {}
    for _ in range(60):
        last = step(batch())
    assert last.loss < 0.5 * first.loss
    assert step.count == 61


def test_captures_and_norms_come_when_asked_for() -> None:
    step = make()
    gradients = step.gradients(batch())
    before = step.params
    out = step(batch(), captures=True, grad_norms=True)
    expected = np.tanh(batch()["x"] @ before["fc1.weight"].T + before["fc1.bias"])
    expected = expected @ before["fc2.weight"].T + before["fc2.bias"]
    np.testing.assert_allclose(out.captures["logits"], expected, rtol=1e-5, atol=1e-6)
    assert out.grad_norms.keys() == gradients.keys()
    for name, g in gradients.items():
        assert out.grad_norms[name] == pytest.approx(np.linalg.norm(g), rel=1e-5)
    total = np.sqrt(sum((g**2).sum() for g in gradients.values()))
    assert out.grad_norm == pytest.approx(total, rel=1e-5)


def test_gradients_change_nothing_and_equal_td_grad() -> None:
    model = Net()
    step = make(model=model)
    before = step.state_dict()
    gradients = step.gradients(batch())
    assert same_values(before, step.state_dict())

    def plain(params):
        return losses.cross_entropy(model.apply(params, batch()["x"]), batch()["y"])

    expected = td.grad(plain)(step.params)
    for name, g in gradients.items():
        np.testing.assert_allclose(g, expected[name].numpy(), rtol=1e-5, atol=1e-6)


def test_evaluation_is_not_training_and_takes_other_sizes() -> None:
    step = make(model=Net(dropout=0.5))
    before = step.state_dict()
    results = [step.evaluate(batch(size=n)) for n in (4, 4, 9, 1)]
    assert results[0].loss == results[1].loss
    assert [r.weight for r in results] == [4, 4, 9, 1]
    assert results[2].weights == {"accuracy": 9}
    assert same_values(before, step.state_dict())


def test_attach_shares_values() -> None:
    step = make()
    predict = step.attach(lambda model, b: model(b["x"]), {"x": Spec((2, 5))})
    x = batch(1)["x"][:2]
    first = predict({"x": x})
    step(batch())
    second = predict({"x": x})
    assert not np.array_equal(first, second)
    p = step.params
    expected = np.tanh(x @ p["fc1.weight"].T + p["fc1.bias"]) @ p["fc2.weight"].T + p["fc2.bias"]
    np.testing.assert_allclose(second, expected, rtol=1e-5, atol=1e-6)
    predict.load_params({n: v * 0 for n, v in p.items()})
    assert (step.params["fc1.weight"] == 0).all()


def test_reading_copies() -> None:
    step = make()
    snapshot = step.params
    snapshot["fc1.weight"][:] = 7
    assert not (step.params["fc1.weight"] == 7).any()


def test_run_equals_single_steps() -> None:
    one, many = make(), make()
    results = [one(batch(i)) for i in range(5)]
    ran = many.run(batch(i) for i in range(5))
    np.testing.assert_array_equal(ran.losses, [r.loss for r in results])
    assert ran.updates == 5
    assert ran.metrics["accuracy"] == pytest.approx(
        np.mean([r.metrics["accuracy"] for r in results])
    )
    assert ran.loss == pytest.approx(np.mean(ran.losses))
    assert same_values(one.state_dict(), many.state_dict())


def test_reset_starts_again_without_compiling() -> None:
    step = make(model=Net(dropout=0.3))
    first = [step(batch(i)).loss for i in range(4)]
    compiles = step.report.compiles
    step.learning_rate = 0.5
    step.reset()
    assert [step(batch(i)).loss for i in range(4)] == first
    step.reset(seed=5)
    assert [step(batch(i)).loss for i in range(4)] != first
    assert step.report.compiles == compiles
    assert step.learning_rate == pytest.approx(1e-2)


def test_hyperparameters_change_without_compiling() -> None:
    step = make(clip_norm=1.0)
    step(batch())
    compiles = step.report.compiles
    reference = make(
        optimizer=optim.adamw(0.3, betas=(0.5, 0.6), eps=1e-3, weight_decay=0.2), clip_norm=1.0
    )
    reference(batch())
    reference.load_state_dict(
        step.state_dict() | {k: v for k, v in reference.state_dict().items() if "hyper" in k}
    )
    step.learning_rate = 0.3
    step.hyperparameters.update(beta1=0.5, beta2=0.6, eps=1e-3, weight_decay=0.2)
    step(batch(1))
    reference(batch(1))
    assert same_values(step.params, reference.params)
    assert step.report.compiles == compiles
    expected = {"lr": 0.3, "beta1": 0.5, "beta2": 0.6, "eps": 1e-3, "weight_decay": 0.2}
    assert dict(step.hyperparameters) == pytest.approx(expected)


def test_learning_rate_under_a_schedule() -> None:
    step = make(optimizer=optim.sgd(optim.linear(0.4, 0.0, 4)))
    rates = []
    for i in range(6):
        rates.append(step.learning_rate)
        step(batch(i))
    np.testing.assert_allclose(rates, [0.4, 0.3, 0.2, 0.1, 0, 0], atol=1e-15)
    with pytest.raises(td.ArgumentError, match="lr_scale"):
        step.learning_rate = 1.0
    step.reset()
    step.lr_scale = 0.5
    assert step.learning_rate == pytest.approx(0.2)
    step.hyperparameters["start"] = 0.8
    assert step.learning_rate == pytest.approx(0.4)


def test_lr_scale_scales_the_update() -> None:
    step = make(optimizer=optim.sgd(0.1))
    before, gradients = step.params, step.gradients(batch())
    step.lr_scale = 0.5
    step(batch())
    after = step.params
    for name, g in gradients.items():
        np.testing.assert_allclose(after[name], before[name] - 0.05 * g, rtol=1e-5, atol=1e-7)


# Accumulation


def token_loss(model, batch):
    logits = model(batch["x"])
    losses_each = losses.cross_entropy(logits, batch["y"], reduction="none")
    td.metric(
        "loss", (losses_each * batch["mask"]).sum() / batch["mask"].sum(), batch["mask"].sum()
    )
    return td.Mean((losses_each * batch["mask"]).sum(), batch["mask"].sum())


@given(st.integers(0, 1000), st.integers(2, 4))
@settings(max_examples=8, deadline=None)
def test_accumulating_unequal_masks_equals_the_big_batch(seed: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    data = {"x": rng.normal(size=(4 * k, 5)), "y": rng.integers(0, 3, 4 * k)}
    mask = (rng.uniform(size=4 * k) < rng.uniform(0.2, 1)).astype(np.float64)
    mask[::4] = 1  # no micro-batch is empty
    data["mask"] = mask
    specs = {"x": (5,), "y": (), "mask": ()}

    def spec(n: int):
        return {
            key: Spec((n, *s), td.int32 if key == "y" else td.float32) for key, s in specs.items()
        }

    keywords = {"clip_norm": 0.1, "device": "oracle"}
    big = td.compile_step(Net(), token_loss, optim.adamw(1e-2), spec(4 * k), **keywords)
    small = td.compile_step(Net(), token_loss, optim.adamw(1e-2), spec(4), accumulate=k, **keywords)
    for _ in range(2):
        expected = big(data)
        for i in range(k):
            out = small({key: a[4 * i : 4 * i + 4] for key, a in data.items()})
            assert out.updated == (i == k - 1)
            assert (out.grad_norm is None) == (i < k - 1)
        assert out.loss == pytest.approx(expected.loss, rel=1e-12)
        assert out.grad_norm == pytest.approx(expected.grad_norm, rel=1e-12)
        assert out.metrics["loss"] == pytest.approx(expected.metrics["loss"], rel=1e-12)
        for name, value in big.params.items():
            np.testing.assert_allclose(small.params[name], value, rtol=1e-12, atol=1e-14)


def test_ignored_targets_accumulate_by_their_count() -> None:
    def masked(model, batch):
        return losses.cross_entropy(model(batch["x"]), batch["y"], ignore_index=-1)

    data = batch(3, size=8)
    data["y"][[1, 2, 3, 6]] = -1
    big = td.compile_step(
        Net(), masked, optim.sgd(0.1), {"x": Spec((8, 5)), "y": Spec((8,), td.int32)}
    )
    small = td.compile_step(Net(), masked, optim.sgd(0.1), SPECS, accumulate=2)
    expected = big(data)
    for i in (0, 4):
        out = small({k: a[i : i + 4] for k, a in data.items()})
    assert out.loss == pytest.approx(expected.loss, rel=1e-5)
    for name, value in big.params.items():
        np.testing.assert_allclose(small.params[name], value, rtol=1e-5, atol=1e-7)


def test_two_means_with_different_weights_cannot_be_accumulated() -> None:
    def mixed(model, batch):
        logits = model(batch["x"])
        return losses.cross_entropy(logits, batch["y"]) + losses.mse(logits, td.zeros((4, 3)))

    td.compile_step(Net(), mixed, optim.sgd(0.1), SPECS)(batch())
    with pytest.raises(td.GradientError, match="2 means with different weights"):
        td.compile_step(Net(), mixed, optim.sgd(0.1), SPECS, accumulate=2)


# State


RESUME = """
import sys, json, numpy as np
sys.path.insert(0, {tests!r})
from test_step import make, batch, Net
step = make(model=Net(dropout=0.2), accumulate=3, seed=11)
step.load({path!r})
print(json.dumps([step(batch(i)).loss.hex() for i in range(10)]))
"""


def test_a_saved_step_continues_bit_for_bit_in_another_process(tmp_path: Path) -> None:
    step = make(model=Net(dropout=0.2), accumulate=3, seed=11)
    for i in range(7):  # two updates and one micro-step
        step(batch(100 + i))
    path = tmp_path / "step.safetensors"
    step.save(path)
    expected = [step(batch(i)).loss.hex() for i in range(10)]
    script = RESUME.format(tests=str(Path(__file__).parent), path=str(path))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(expected).replace("'", '"')
    assert list(tmp_path.iterdir()) == [path], "nothing is left aside"


def test_state_dict_round_trip_restores_everything() -> None:
    step = make(accumulate=2)
    for i in range(3):
        step(batch(i))
    state = step.state_dict()
    after = [step(batch(9)).loss, step(batch(8)).loss]
    other = make(accumulate=2, seed=99)
    other.load_state_dict(state)
    assert [other(batch(9)).loss, other(batch(8)).loss] == after
    step.load_state_dict(state)
    assert same_values(step.state_dict(), state)


def test_strict_loading_names_everything_at_once() -> None:
    step = make()
    before = step.params
    wrong = {
        "fc1.weight": np.zeros((7, 6)),
        "fc2.bias": np.zeros(3, np.int64),
        "extra": np.zeros(2),
    }
    with pytest.raises(td.LoadError) as caught:
        step.load_params(wrong)
    message = str(caught.value)
    assert "missing: fc1.bias, fc2.weight" in message
    assert "unexpected: extra" in message
    assert "fc1.weight has the shape (7, 6), not (7, 5)" in message
    assert "fc2.bias is int64, not a float" in message
    assert same_values(before, step.params)
    found = step.load_params({"fc2.bias": np.ones(3), "extra": np.zeros(2)}, strict=False)
    assert found.missing == ("fc1.weight", "fc1.bias", "fc2.weight")
    assert found.unexpected == ("extra",)
    assert (step.params["fc2.bias"] == 1).all()


def test_bad_files_are_refused_and_change_nothing(tmp_path: Path) -> None:
    step = make()
    step(batch())
    good = tmp_path / "good"
    step.save(good)
    before = step.state_dict()
    data = good.read_bytes()
    files = {
        "truncated": data[: len(data) // 2],
        "empty": b"",
        "garbage": b"\x80\x04\x95 not a safetensors file at all" * 9,
        "header": b"\xff" * 8 + data[8:],
    }
    for name, content in files.items():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(td.LoadError, match="damaged or not a safetensors file"):
            step.load(path)
    with pytest.raises(td.LoadError, match="there is no file"):
        step.load(tmp_path / "nowhere")
    from safetensors.numpy import save_file

    save_file({"a": np.zeros(2)}, tmp_path / "foreign")
    with pytest.raises(td.LoadError, match="not written by Treadle"):
        step.load(tmp_path / "foreign")
    other = td.compile_step(Net(hidden=9), loss, optim.sgd(0.1), SPECS)
    other.save(tmp_path / "other")
    with pytest.raises(td.LoadError, match="mismatched"):
        step.load(tmp_path / "other")
    assert same_values(before, step.state_dict())


# Batches


BAD_BATCHES = {
    "missing": (lambda b: {"x": b["x"]}, "y is missing"),
    "extra": (lambda b: b | {"z": np.zeros(2)}, "z is unexpected"),
    "misnamed": (lambda b: {"x": b["x"], "Y": b["y"]}, "y is missing; Y is unexpected"),
    "shape": (lambda b: b | {"x": np.zeros((4, 6))}, r"x is \(4, 6\), compiled for \(4, 5\)"),
    "size": (lambda b: {k: a[:3] for k, a in b.items()}, 'on_new_shape="specialise"'),
    "rank": (lambda b: b | {"x": np.zeros(5)}, r"x has the shape \(5,\), not \(4, 5\)"),
    "float labels": (lambda b: b | {"y": b["y"] * 1.0}, "y is float64, not an integer"),
    "int image": (lambda b: b | {"x": np.zeros((4, 5), int)}, "x is int64, not a float"),
    "out of range": (lambda b: b | {"y": b["y"] + 2**40}, "which int32 cannot hold"),
    "strings": (lambda b: b | {"y": np.array(["a"] * 4)}, "not an integer"),
    "not a dict": (lambda b: b["x"], "x is missing"),
}


@pytest.mark.parametrize("name", BAD_BATCHES)
@pytest.mark.parametrize("method", ["__call__", "gradients", "evaluate"])
def test_bad_batches_are_named_and_change_nothing(name: str, method: str) -> None:
    change, message = BAD_BATCHES[name]
    if method == "evaluate" and name in ("size", "shape"):
        return  # evaluation specialises: other sizes are fine, a wrong width fails in the model
    step = make()
    before = step.state_dict()
    with pytest.raises(td.BatchError, match=message):
        getattr(step, method)(change(batch()))
    assert same_values(before, step.state_dict())


def test_new_shapes_are_specialised_when_asked_for_and_bounded() -> None:
    step = make(options=td.CompileOptions(on_new_shape="specialise", max_shapes=2))
    compiles = step.report.compiles
    for size in (4, 3, 2, 3, 2):
        step(batch(size=size))
    assert step.count == 5
    assert step.report.compiles - compiles == 2  # sizes 3 and 2, each once
    step(batch(size=4))
    assert step.report.compiles - compiles == 3  # 4 had to go


def test_an_index_out_of_range_raises_and_changes_nothing() -> None:
    class Table(nn.Module):
        def __init__(self):
            self.table = nn.Embedding(5, 3)

        def forward(self, i):
            return self.table(i)

    step = td.compile_step(
        Table(),
        lambda m, b: (m(b) ** 2).mean(),
        optim.sgd(0.1),
        Spec((4,), td.int32),
        device="oracle",
    )
    before = step.state_dict()
    with pytest.raises(td.IndexRangeError, match="the array\\[2\\] is 7"):
        step(np.array([0, 1, 7, 2]))
    assert same_values(before, step.state_dict())


# Sharing


def test_a_gan_is_two_steps_over_one_set_of_parameters() -> None:
    model = {"g": nn.Linear(2, 3), "d": nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))}

    def d_loss(m, b):
        real, fake = m["d"](b["x"]), m["d"](td.stop_gradient(m["g"](b["z"])))
        return losses.bce_with_logits(real, td.ones_like(real)) + losses.bce_with_logits(
            fake, td.zeros_like(fake)
        )

    def g_loss(m, b):
        fake = m["d"](m["g"](b["z"]))
        return losses.bce_with_logits(fake, td.ones_like(fake))

    specs = {"x": Spec((8, 3)), "z": Spec((8, 2))}
    d_step = td.compile_step(model, d_loss, optim.only("d.*", optim.adam(1e-2)), specs)
    g_step = td.compile_step(
        model, g_loss, optim.only("g.*", optim.adam(1e-2)), {"z": specs["z"]}, share=d_step
    )
    rng = np.random.default_rng(0)
    z = rng.normal(size=(8, 2))
    before = d_step.params
    first = g_step.evaluate({"z": z}).loss
    d_step({"x": rng.normal(2, 1, (8, 3)), "z": z})
    after = d_step.params
    assert np.array_equal(before["g.weight"], after["g.weight"])
    assert not np.array_equal(before["d.0.weight"], after["d.0.weight"])
    for _ in range(20):
        g_step({"z": z})
    final = d_step.params
    assert np.array_equal(after["d.0.weight"], final["d.0.weight"])
    assert not np.array_equal(after["g.weight"], final["g.weight"])
    assert g_step.evaluate({"z": z}).loss < first
    assert (d_step.count, g_step.count) == (1, 20)


def test_a_target_network_is_updated_by_hand() -> None:
    model = {"online": Net(), "target": Net().requires_grad_(False)}

    def td_loss(m, b):
        goal = b["r"] + 0.9 * td.max(td.stop_gradient(m["target"](b["next"])), -1)
        value = td.take_along_axis(m["online"](b["x"]), b["a"][:, None], 1)[:, 0]
        return losses.huber(value, goal)

    specs = {"x": Spec((4, 5)), "next": Spec((4, 5)), "r": Spec((4,)), "a": Spec((4,), td.int32)}
    step = td.compile_step(model, td_loss, optim.adam(1e-2), specs)

    def copy_to_target() -> None:
        own = {n: v for n, v in step.params.items() if n.startswith("online.")}
        step.load_params({n.replace("online.", "target."): v for n, v in own.items()}, strict=False)

    copy_to_target()
    rng = np.random.default_rng(0)
    data = {k: rng.normal(size=s.shape) for k, s in specs.items()} | {"a": np.array([0, 1, 2, 0])}
    target = step.params["target.fc1.weight"]
    for _ in range(3):
        step(data)
    assert np.array_equal(step.params["target.fc1.weight"], target)
    assert not np.array_equal(step.params["online.fc1.weight"], target)
    copy_to_target()
    assert np.array_equal(step.params["online.fc1.weight"], step.params["target.fc1.weight"])


def test_distillation_teaches_a_student() -> None:
    teacher = td.compile_forward(Net(hidden=9), lambda m, x: m(x), Spec((4, 5)), seed=3)
    model = {"teacher": Net(hidden=9).requires_grad_(False), "student": Net(hidden=4)}

    def distil(m, b):
        soft = td.softmax(m["teacher"](b) / 2.0)
        return losses.kl_div(td.log_softmax(m["student"](b) / 2.0), soft, reduction="batchmean")

    step = td.compile_step(model, distil, optim.adam(0.05), Spec((4, 5)))
    step.load_params({f"teacher.{n}": v for n, v in teacher.params.items()}, strict=False)
    x = batch(2)["x"]
    first = step(x).loss
    for _ in range(80):
        last = step(x).loss
    assert last < 0.2 * first
    np.testing.assert_array_equal(step.params["teacher.fc1.weight"], teacher.params["fc1.weight"])


def test_sharing_models_of_different_shapes_is_refused() -> None:
    step = make()
    before = step.state_dict()
    with pytest.raises(
        td.ShapeError, match=r"fc1.weight is float32\[7,5\] here and float32\[9,5\] there"
    ):
        td.compile_step(Net(hidden=9), loss, optim.sgd(0.1), SPECS, share=step)
    assert same_values(before, step.state_dict())
    with pytest.raises(td.ShapeError, match="the models differ"):
        td.compile_forward(Net(hidden=9), lambda m, b: m(b), Spec((4, 5)), share=step)


# States, programs, forwards


def test_states_update_on_every_micro_step() -> None:
    class Counter(nn.Module):
        def __init__(self):
            self.w, self.seen = nn.Parameter((3,), nn.init.ones), nn.State((), dtype=td.int32)

        def forward(self, x):
            if self.training:
                td.update(self.seen, self.seen + 1)
            return (x * self.w).sum()

    step = td.compile_step(
        Counter(), lambda m, b: m(b) ** 2, optim.sgd(0.1), Spec((3,)), accumulate=2
    )
    for i in range(3):
        step(np.ones(3))
        assert step.params["seen"] == i + 1
    step.evaluate(np.ones(3))
    assert step.params["seen"] == 3
    assert step.count == 1


def test_a_forward_may_own_a_cache() -> None:
    class Memory(nn.Module):
        def __init__(self):
            self.cache, self.at = nn.State((4, 2)), nn.State((), dtype=td.int32)

        def forward(self, row):
            starts = td.stack([self.at.tensor(), td.zeros((), td.int32)])
            cache = td.dynamic_update_slice(self.cache, row[None], starts)
            td.update(self.cache, cache)
            td.update(self.at, self.at + 1)
            return cache.sum(0)

    memory = td.compile_forward(Memory(), lambda m, row: m(row), Spec((2,)))
    np.testing.assert_array_equal(memory(np.array([1.0, 2.0])), [1, 2])
    np.testing.assert_array_equal(memory(np.array([10.0, 20.0])), [11, 22])
    np.testing.assert_array_equal(memory.params["cache"][:2], [[1, 2], [10, 20]])


def test_compile_gives_a_program() -> None:
    def function(x, pair):
        return {"sum": x + pair[0], "product": x @ pair[1]}

    program = td.compile(function, Spec((2, 2)), (Spec((2, 2)), Spec((2, 3))))
    rng = np.random.default_rng(0)
    x, a, b = rng.normal(size=(2, 2)), rng.normal(size=(2, 2)), rng.normal(size=(2, 3))
    found = program(x, (a, b))
    np.testing.assert_allclose(found["sum"], x + a, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["product"], x @ b, rtol=1e-5, atol=1e-6)
    assert program.graph.name == "function"
    with pytest.raises(td.BatchError):
        program(x)


def test_arrays_are_a_model_too() -> None:
    params = {"w": np.ones((3, 2)), "b": np.zeros(2)}

    def mse(p, batch):
        return losses.mse(batch["x"] @ p["w"] + p["b"], batch["y"])

    step = td.compile_step(params, mse, optim.sgd(0.1), {"x": Spec((4, 3)), "y": Spec((4, 2))})
    assert step.params.keys() == {"w", "b"}
    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=(4, 3)), "y": rng.normal(size=(4, 2))}
    losses_seen = [step(data).loss for _ in range(30)]
    assert losses_seen[-1] < 0.3 * losses_seen[0]


def test_unreached_parameters_are_reported_by_name() -> None:
    class Spare(Net):
        def __init__(self):
            super().__init__()
            self.unused = nn.Linear(2, 2)

    with pytest.warns(td.UnreachedWarning, match=r"unused.weight, unused.bias"):
        step = make(model=Spare())
    assert step.report.unreached == ("unused.weight", "unused.bias")
    before = step.params["unused.weight"]
    step(batch())
    assert np.array_equal(step.params["unused.weight"], before)
    assert "unused.weight" in str(step.report)


# Groups, decay, optimizers


def test_a_step_says_what_it_trains_and_only_chooses_it() -> None:
    """What is not selected stays as it is, to the bit; without a selector all move, and it says so."""
    step = make()
    names = tuple(step.params)
    assert (step.report.trained, step.report.frozen) == (names, ())
    assert "trains all 4 parameter tensors" in str(step.report)
    selected = ("fc2.weight", "fc2.bias")
    for selector in ("fc2.*", list(selected), lambda n: n.startswith("fc2")):
        step = make(optimizer=optim.adamw(0.1, weight_decay=0.5), only=selector)
        before, moved = step.params, step.gradients(batch()).keys()
        step(batch())
        after = step.params
        changed = {n for n in names if not np.array_equal(before[n], after[n])}
        assert changed == set(moved) == set(step.report.trained) == set(selected)
        assert "trains 2 of 4 parameter tensors, not fc1.weight, fc1.bias" in str(step.report)
    with pytest.raises(td.ArgumentError, match="no parameter is trained"):
        make(only="fc9.*")
    with pytest.raises(td.ArgumentError, match="select"):
        make(only=3)


def test_groups_filters_and_frozen_parameters() -> None:
    optimizer = optim.groups(
        ("*.bias", optim.sgd(1.0)),
        (lambda n: n == "fc1.weight", optim.freeze()),
        ("*", optim.sgd(0.1)),
    )
    step = make(optimizer=optimizer)
    before, gradients = step.params, step.gradients(batch())
    assert gradients.keys() == {"fc1.bias", "fc2.weight", "fc2.bias"}
    step(batch())
    after = step.params
    assert np.array_equal(after["fc1.weight"], before["fc1.weight"])
    for name, rate in {"fc2.weight": 0.1, "fc1.bias": 1.0}.items():
        expected = before[name] - rate * gradients[name]
        np.testing.assert_allclose(after[name], expected, rtol=1e-5, atol=1e-7)
    assert dict(step.hyperparameters)["group0.lr"] == 1.0
    with pytest.raises(td.ArgumentError, match="2 groups with rates"):
        _ = step.learning_rate
    with pytest.raises(td.ArgumentError, match="no group selects 'fc1.weight'"):
        make(optimizer=optim.groups(("*.bias", optim.sgd(1.0))))


def test_weight_decay_follows_the_parameter_and_the_filter() -> None:
    model = Net()
    model.fc1.bias.decay = False
    step = make(
        model=model, optimizer=optim.adamw(0.1, weight_decay=0.5, decay=lambda n: n != "fc2.bias")
    )
    plain = make(model=Net(), optimizer=optim.adamw(0.1, weight_decay=0.0))
    start = step.params
    step(batch())
    plain(batch())
    for name in start:
        difference = plain.params[name] - step.params[name]
        expected = 0 if name.endswith("bias") else 0.05 * start[name]
        np.testing.assert_allclose(difference, expected, atol=1e-6, err_msg=name)


def test_chain_clips_before_the_optimizer() -> None:
    chained = make(optimizer=optim.chain(optim.clip_by_global_norm(0.01), optim.sgd(1.0)))
    argument = make(optimizer=optim.sgd(1.0), clip_norm=0.01)
    for i in range(3):
        assert chained(batch(i)).loss == argument(batch(i)).loss
    assert same_values(chained.params, argument.params)
    assert dict(chained.hyperparameters)["clip_by_global_norm.0.max_norm"] == pytest.approx(0.01)


def test_an_optimizer_can_ask_for_gradients_elsewhere() -> None:
    """Sharpness-aware minimisation, written with the contract alone."""

    def update(grads, state, params, context):
        norm = td.sqrt(sum((g * g).sum() for g in grads.values()))
        there = {n: params[n] + g * (0.05 / norm) for n, g in grads.items()}
        sharp = context.grad_at(there)
        return {n: params[n] - g * 0.1 for n, g in sharp.items()}, state

    sam = optim.Optimizer("sam", lambda params: {}, update, {}, {})
    step = make(optimizer=sam)
    before, gradients = step.params, step.gradients(batch())
    norm = np.sqrt(sum((g**2).sum() for g in gradients.values()))
    other = make(optimizer=sam)
    other.load_params({n: v + 0.05 * gradients[n] / norm for n, v in before.items()})
    expected = other.gradients(batch())
    step(batch())
    for name, value in step.params.items():
        np.testing.assert_allclose(value, before[name] - 0.1 * expected[name], rtol=1e-5, atol=1e-6)


def test_evaluation_may_use_other_parameters() -> None:
    """An exponential moving average as an optimizer with `eval_params`."""
    inner = optim.sgd(0.5)

    def init(params):
        return {"ema": dict(params)}

    def update(grads, state, params, context):
        after, _ = inner.update(grads, {}, params, context)
        return after, {"ema": {n: state["ema"][n] * 0.9 + after[n] * 0.1 for n in after}}

    ema = optim.Optimizer("ema", init, update, inner.hyper, inner.schedules, lambda s, p: s["ema"])
    step = make(optimizer=ema)
    start = step.params
    step(batch())
    average = {n: 0.9 * start[n] + 0.1 * v for n, v in step.params.items()}
    plain = make()
    plain.load_params(average)
    assert step.evaluate(batch(5)).loss == pytest.approx(plain.evaluate(batch(5)).loss, rel=1e-5)
    predict = step.attach(lambda m, b: m(b), Spec((2, 5)))
    other = plain.attach(lambda m, b: m(b), Spec((2, 5)))
    x = batch(1)["x"][:2]
    np.testing.assert_allclose(predict(x), other(x), rtol=1e-5, atol=1e-6)


# Precision


def test_float16_skips_a_step_that_overflows_and_recovers() -> None:
    def steep(model, b):
        return (model(b) * b.sum()).mean()

    step = td.compile_step(
        nn.Linear(2, 2), steep, optim.adam(1e-3), Spec((3, 2)), precision="float16"
    )
    while not step(np.ones((3, 2))).updated:  # the first scales are too large
        assert step.count == 0
    before = step.state_dict()
    out = step(np.full((3, 2), 3e4))
    assert not out.updated
    after = step.state_dict()
    assert after["step:loss_scale"] == before["step:loss_scale"] / 2
    changed = {n for n in before if not np.array_equal(before[n], after[n])}
    assert changed == {"step:loss_scale", "step:good_steps", "step:skipped", "step:counters"}
    assert step.count == 1
    assert step(np.ones((3, 2))).updated
    assert step.count == 2


def test_bfloat16_trains_close_to_float32() -> None:
    wide, narrow = make(), make(precision="bfloat16")
    for i in range(30):
        a, b = wide(batch(i % 3)), narrow(batch(i % 3))
    assert a.loss != b.loss
    assert b.loss == pytest.approx(a.loss, rel=0.1)
    assert all(v.dtype == np.float32 for v in narrow.params.values())


@pytest.mark.parametrize("precision", ["int32", "float4", "float64"])
def test_other_precisions_are_refused(precision: str) -> None:
    with pytest.raises((td.ArgumentError, td.DTypeError)):
        make(precision=precision)


# Manual backward


def manual_forward(model, b):
    h = td.tanh(model["w"] * b["x"])
    error = h - b["y"]
    return (error * error).mean(), (h, error)


def manual_backward(model, b, kept):
    h, error = kept
    return [(2 * error * (1 - h * h) * b["x"] / error.size).sum(0)]


MANUAL_SPECS = {"x": Spec((4, 3)), "y": Spec((4, 3))}


def test_a_backward_of_your_own_drives_the_same_step() -> None:
    rng = np.random.default_rng(0)
    data = {k: rng.normal(size=(4, 3)) for k in ("x", "y")}
    params = {"w": rng.normal(size=3)}
    manual = td.compile_manual_step(
        params, manual_forward, manual_backward, optim.adamw(1e-2), MANUAL_SPECS
    )
    automatic = td.compile_step(
        params, lambda m, b: manual_forward(m, b)[0], optim.adamw(1e-2), MANUAL_SPECS
    )
    for _ in range(5):
        a, b = manual(data, grad_norms=True), automatic(data, grad_norms=True)
        assert a.loss == pytest.approx(b.loss, rel=1e-5)
        assert a.grad_norms == pytest.approx(b.grad_norms, rel=1e-5)
    np.testing.assert_allclose(manual.params["w"], automatic.params["w"], rtol=1e-5)
    assert manual.gradients(data).keys() == {"w"}
    assert manual.evaluate(data).loss == pytest.approx(automatic.evaluate(data).loss)


WRONG_GRADIENTS = {
    "too many": (lambda m, b, k: [b["x"].sum(0), b["x"].sum(0)], "2 gradients for 1 parameters"),
    "none": (lambda m, b, k: [], "0 gradients for 1 parameters"),
    "name": (
        lambda m, b, k: {"v": b["x"].sum(0)},
        r"missing for \['w'\] and unexpected for \['v'\]",
    ),
    "shape": (
        lambda m, b, k: [b["x"]],
        r"gradient of w is float32\[4,3\], the parameter float32\[3\]",
    ),
    "dtype": (lambda m, b, k: {"w": b["x"].sum(0).astype(td.float64)}, "float64"),
}


@pytest.mark.parametrize("name", WRONG_GRADIENTS)
def test_gradients_that_do_not_match_are_named(name: str) -> None:
    backward, message = WRONG_GRADIENTS[name]
    params = {"w": np.ones(3, np.float32)}
    with pytest.raises(td.GradientError, match=message):
        td.compile_manual_step(params, manual_forward, backward, optim.sgd(0.1), MANUAL_SPECS)


# Bad arguments


BAD_ARGUMENTS = [
    (lambda: make(accumulate=0), td.ArgumentError, "accumulate = 0"),
    (lambda: make(clip_norm=-1.0), td.ArgumentError, "clip_norm = -1"),
    (lambda: make(device="tpu"), td.DeviceError, "'tpu' is not available"),
    (lambda: make(optimizer="adam"), td.ArgumentError, "the optimizer is 'adam'"),
    (lambda: optim.adamw(-1.0), td.ArgumentError, "lr = -1"),
    (lambda: optim.adam(betas=(0.9, 1.0)), td.ArgumentError, "beta2 = 1.0"),
    (lambda: optim.sgd(0.1, nesterov=True), td.ArgumentError, "nesterov"),
    (lambda: optim.warmup_cosine(1e-3, 10, 5), td.ArgumentError, "warmup = 10 of 5"),
    (lambda: optim.chain(optim.clip_by_global_norm(1.0)), td.ArgumentError, "not an optimizer"),
    (lambda: td.CompileOptions(on_new_shape="guess"), td.ArgumentError, "on_new_shape is 'guess'"),
    (lambda: td.compile_step(Net(), lambda m, b: m(b["x"]), optim.sgd(0.1), SPECS), td.GradientError, "not a float scalar"),
    (lambda: td.compile_step(Net(), lambda m, b: None, optim.sgd(0.1), SPECS), td.GradientError, "the loss returns None"),
    (lambda: td.compile_step({"w": object()}, loss, optim.sgd(0.1), SPECS), td.ArgumentError, "A model is made of"),
    (lambda: make().hyperparameters["nothing"], td.ArgumentError, "there is no 'nothing'"),
    (lambda: setattr(make(), "lr_scale", float("nan")), td.ArgumentError, "step: lr_scale = nan"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), BAD_ARGUMENTS)
def test_bad_arguments(call, error, message) -> None:
    with pytest.raises(error, match=message):
        call()


def test_debug_print_runs_with_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    def shown(model, b):
        out = (model(b) ** 2).mean()
        td.debug_print("loss is {}", out)
        return out

    step = td.compile_step(nn.Linear(2, 1), shown, optim.sgd(0.1), Spec((3, 2)))
    assert capsys.readouterr().out == ""
    value = step(np.ones((3, 2))).loss
    assert capsys.readouterr().out == f"loss is {value}\n"


@pytest.mark.parametrize("device", ["cpu", "oracle"])
def test_debug_print_without_a_field_prints_the_value_after_the_text(device, capsys) -> None:
    def shown(model, b):
        td.debug_print("p", b[0])
        td.debug_print("", b[1])
        td.debug_print("{{}}", b[0])
        return (model(b) ** 2).mean()

    spec = Spec((3, 2))
    step = td.compile_step(nn.Linear(2, 1), shown, optim.sgd(0.1), spec, device=device)
    step(np.arange(6.0).reshape(3, 2))
    assert capsys.readouterr().out == "p [0. 1.]\n[2. 3.]\n{} [0. 1.]\n"
    td.debug_print("p", td.tensor(1.5))
    assert capsys.readouterr().out == "p 1.5\n"


@pytest.mark.parametrize("device", ["cpu", "oracle"])
def test_two_prints_of_the_same_text(device, capsys) -> None:
    def shown(x):
        td.debug_print("{}", x)
        td.debug_print("{}", x + 1)
        return x

    td.compile(shown, Spec((2,)), device=device)(np.zeros(2, np.float32))
    assert capsys.readouterr().out == "[0. 0.]\n[1. 1.]\n"


# What was found by using it


@pytest.mark.parametrize("seed", [-5, 2**63 + 7, 2**64 - 1])
def test_any_seed_survives_saving(seed: int) -> None:
    step = make(model=Net(dropout=0.5), seed=seed)
    state = step.state_dict()
    expected = [step(batch(i)).loss for i in range(3)]
    other = make(model=Net(dropout=0.5))
    other.load_state_dict(state)
    assert [other(batch(i)).loss for i in range(3)] == expected


def test_a_state_between_other_micro_steps_is_refused() -> None:
    step = make(accumulate=4)
    for i in range(3):
        step(batch(i))
    other = make(accumulate=2)
    before = other.state_dict()
    with pytest.raises(td.LoadError, match="at micro-step 3, but 2 make an update here"):
        other.load_state_dict(step.state_dict())
    assert same_values(before, other.state_dict())


def test_nested_chains_keep_their_numbers_apart() -> None:
    inner = optim.chain(optim.clip_by_global_norm(2.0), optim.sgd(1.0))
    step = make(optimizer=optim.chain(optim.clip_by_global_norm(1e-3), inner))
    found = dict(step.hyperparameters)
    assert found["clip_by_global_norm.0.max_norm"] == 2.0
    assert found["clip_by_global_norm.1.max_norm"] == pytest.approx(1e-3)
    before = step.params
    step(batch())
    moved = np.sqrt(sum(((step.params[n] - v) ** 2).sum() for n, v in before.items()))
    assert moved == pytest.approx(1e-3, rel=1e-2)


def test_a_failed_share_undoes_no_step_of_another_thread() -> None:
    def loss(model, x):
        return (model(x) ** 2).mean()

    x = np.ones((2, 3), np.float32)

    def compiled():
        return td.compile_step(nn.Linear(3, 1), loss, optim.sgd(0.1), x, device="oracle")

    step, alone = compiled(), compiled()
    trains = threading.Thread(target=step, args=(x,))

    def fails(model, x):
        trains.start()
        trains.join(0.2)  # it waits for the end of this
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        td.compile_step(nn.Linear(3, 1), fails, optim.sgd(0.1), x, device="oracle", share=step)
    trains.join()
    alone(x)
    assert step.count == 1
    for name, array in alone.params.items():
        np.testing.assert_array_equal(step.params[name], array)


def test_threads_draw_numbers_of_their_own_and_share_what_is_built() -> None:
    """Of more shapes than are kept, so that what one thread uses another one takes away."""
    forward = td.compile_forward(
        {},
        lambda model, x: x + td.random.uniform(x.shape),
        Spec((4,)),
        device="oracle",
        options=td.CompileOptions(on_new_shape="specialise", max_shapes=2),
    )
    found: list[float] = []

    def call(first: int) -> None:
        for i in range(60):
            found.append(float(forward(np.zeros(4 + (first + i) % 4, np.float32))[0]))

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(call, i) for i in range(4)]:
            done.result()
    assert len(set(found)) == len(found) == 240
    assert forward.session.calls[forward._number] == 240


@pytest.mark.parametrize("method", ["state_dict", "load_state_dict", "reset", "load_params"])
def test_values_and_counters_are_of_one_moment(method: str, monkeypatch) -> None:
    """A step of another thread comes before what is read or written at once, or after it."""
    step = make(device="oracle")
    step(batch())
    state, params = step.state_dict(), step.params
    trains = threading.Thread(target=step, args=(batch(),))
    name = "read" if method == "state_dict" else "write"
    whole = getattr(step.session, name)

    def slow(values):
        found = whole(values)
        if trains.ident is None:
            trains.start()
            trains.join(0.2)  # it waits for the end of this
        return found

    monkeypatch.setattr(step.session, name, slow)
    given = {"load_state_dict": (state,), "load_params": (params,)}.get(method, ())
    found = getattr(step, method)(*given)
    trains.join()
    if method == "state_dict":
        assert found.keys() == state.keys()
        assert all(np.array_equal(found[n], v) for n, v in state.items())
    counts = {"reset": 1, "load_state_dict": 2}.get(method, 2)
    assert step.count == step.position[0] == counts


def test_a_failed_share_leaves_no_trace() -> None:
    step = make()

    def broken(model, batch):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        td.compile_step({"head": nn.Linear(2, 2)}, broken, optim.sgd(0.1), SPECS, share=step)
    head = {"head": nn.Linear(3, 3)}
    td.compile_forward(head, lambda m, b: m["head"](b), Spec((1, 3)), share=step)


def test_metrics_without_weight_are_nan() -> None:
    def unweighted(model, b):
        td.metric("nothing", 1.0, 0)
        return (model(b) ** 2).mean()

    step = td.compile_step(nn.Linear(2, 1), unweighted, optim.sgd(0.1), Spec((3, 2)))
    assert np.isnan(step.run([np.ones((3, 2))] * 2).metrics["nothing"])


BAD_OPTIMIZERS = {
    "structure": (lambda g, s, p, c: (p, {}), "update changes the structure of its state"),
    "missing": (lambda g, s, p, c: ({}, s), "update returns no parameters fc"),
}


@pytest.mark.parametrize("name", BAD_OPTIMIZERS)
def test_mistakes_in_an_optimizer_are_named(name: str) -> None:
    update, message = BAD_OPTIMIZERS[name]
    wrong = optim.Optimizer("mine", lambda params: {"n": td.zeros(())}, update, {}, {})
    with pytest.raises(td.ArgumentError, match=f"optimizer mine: {message}"):
        make(optimizer=wrong)


def test_rates_are_never_negative_and_something_is_trained() -> None:
    step = make(clip_norm=1.0)
    with pytest.raises(td.ArgumentError, match="lr = -1"):
        step.learning_rate = -1
    with pytest.raises(td.ArgumentError, match="no parameter is trained"):
        make(optimizer=optim.only("typo.*", optim.sgd(0.1)))
    step.clip_norm = 0.5
    assert step.clip_norm == 0.5
    with pytest.raises(td.ArgumentError, match="clip_norm"):
        make().clip_norm = 1.0


def test_gradients_elsewhere_need_a_derived_backward() -> None:
    def update(grads, state, params, context):
        return context.grad_at(params), state

    params = {"w": np.ones(3, np.float32)}
    asking = optim.Optimizer("asking", lambda p: {}, update, {}, {})
    with pytest.raises(td.GradientError, match="a backward of the user's own"):
        td.compile_manual_step(params, manual_forward, manual_backward, asking, MANUAL_SPECS)
