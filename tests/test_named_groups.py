"""Groups with names, selectors that are lists and modules, and what modules and steps tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import treadle as td
from refusals import refused
from treadle import losses, nn, optim


class Net(nn.Module):
    def __init__(self):
        self.encoder = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5))
        self.norm, self.head = nn.LayerNorm(5), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.norm(self.encoder(x)))


rng = np.random.default_rng(0)
BATCH = {
    "x": rng.normal(size=(6, 4)).astype(np.float32),
    "y": rng.normal(size=(6, 3)).astype(np.float32),
}


def loss(model, batch):
    return losses.mse(model(batch["x"]), batch["y"])


def compiled(optimizer: td.optim.Optimizer, model: Any = None, **options: Any) -> td.TrainStep:
    model = Net() if model is None else model
    return td.compile_step(model, loss, optimizer, BATCH, device="oracle", **options)


def changed(step: td.TrainStep) -> set[str]:
    before = step.params
    step(BATCH)
    return {n for n, v in step.params.items() if (v != before[n]).any()}


# Names


def test_numbers_of_a_group_have_its_name() -> None:
    step = compiled(
        optim.groups(
            optim.group("head", lr=0.5, weight_decay=0.0),
            optim.group("norm"),
            optim.adamw(0.1, weight_decay=0.3),
        )
    )
    found = dict(step.hyperparameters)
    assert (found["head.lr"], found["norm.lr"], found["lr"]) == (0.5, 0.1, 0.1)
    assert (found["head.weight_decay"], found["weight_decay"]) == (0.0, 0.3)
    assert {"head.frozen", "norm.frozen", "frozen"} <= set(found)
    step.hyperparameters["head.lr"] = 0.25
    assert step.hyperparameters["head.lr"] == 0.25
    with pytest.raises(td.ArgumentError, match=r"3 groups with rates.*head\.lr"):
        step.learning_rate  # noqa: B018


def test_each_group_follows_its_numbers() -> None:
    """Other rates and decays, against the rule written out on PyTorch's gradients."""
    torch.manual_seed(0)
    encoder = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 5))
    parts = {"encoder": encoder, "norm": torch.nn.LayerNorm(5), "head": torch.nn.Linear(5, 3)}
    theirs = torch.nn.ModuleDict(parts).double()
    step = compiled(
        optim.groups(
            optim.group("head", lr=0.05),
            optim.group("plain", ["*.bias", "norm.weight"], weight_decay=0.0),
            optim.sgd(0.01, weight_decay=0.2),
        )
    )
    step.load_params(theirs.state_dict())
    x, y = (torch.tensor(BATCH[k], dtype=torch.float64) for k in "xy")
    for _ in range(5):
        theirs.zero_grad()
        out = theirs["head"](theirs["norm"](theirs["encoder"](x)))
        torch.nn.functional.mse_loss(out, y).backward()
        step(BATCH)
        for name, p in theirs.named_parameters():
            is_head, is_plain = name.startswith("head."), p.ndim == 1
            rate, decay = 0.05 if is_head else 0.01, 0.2 if is_head or not is_plain else 0.0
            p.data -= rate * (p.grad + decay * p.data)
    for name, value in theirs.state_dict().items():
        np.testing.assert_allclose(step.params[name], value, rtol=1e-6, atol=1e-8)


def test_a_flag_is_true_or_false() -> None:
    step = compiled(optim.groups(optim.group("head"), optim.sgd(0.1)))
    step.hyperparameters["head.frozen"] = True
    assert step.hyperparameters["head.frozen"] == 1
    assert not any(n.startswith("head.") for n in changed(step))
    step.hyperparameters["head.frozen"] = np.False_
    assert any(n.startswith("head.") for n in changed(step))
    for key, wrong in (("head.frozen", 0.5), ("head.lr", True), ("head.lr", "0.1")):
        with pytest.raises(td.ArgumentError, match=key.rpartition(".")[2]):
            step.hyperparameters[key] = wrong


def test_a_group_with_an_optimizer_and_a_schedule_of_its_own() -> None:
    schedule = optim.cosine(0.1, steps=10)
    step = compiled(
        optim.groups(optim.group("head", optimizer=optim.adam(schedule)), ("*", optim.sgd(0.1)))
    )
    assert {"head.beta1", "group1.lr"} <= set(step.hyperparameters)
    assert len(changed(step)) == len(list(step.model.parameters()))


@pytest.mark.parametrize(
    ("call", "operation", "said"),
    [
        (lambda: optim.group(["head"], lr=0.1), "group", "['head']"),
        (lambda: optim.group("a.b"), "group", "'a.b'"),
        (lambda: optim.group("head", 3), "group", "select = 3"),
        (lambda: optim.group("head", []), "group", "select = []"),
        (lambda: optim.groups(optim.group("head", lr=0.1)), "groups", "has no optimizer"),
        (lambda: optim.groups(optim.group("a"), optim.group("a"), optim.sgd(1)), "groups", "two"),
        (lambda: optim.groups(optim.group("a", beta=1), optim.sgd(1)), "group", "no number beta"),
        (lambda: optim.groups(optim.group("a", lr=-1), optim.sgd(1)), "group", "lr = -1"),
        (lambda: optim.only(["head.*"], "sgd"), "only", "'sgd'"),
        (lambda: optim.only(3, optim.sgd(0.1)), "groups", "the selector = 3"),
    ],
    ids=range(10),
)
def test_wrong_groups(call: Callable[[], Any], operation: str, said: str) -> None:
    refused(call, td.ArgumentError, operation, said)


def test_what_selects_nothing() -> None:
    for optimizer, said in (
        (optim.only(["head.*", "hed.*"], optim.sgd(0.1)), "'hed.*'"),
        (optim.only(nn.Linear(2, 2), optim.sgd(0.1)), "Linear selects"),
        (optim.groups(optim.group("hed", lr=0.1), optim.sgd(0.1)), "'hed' selects"),
    ):

        def call(optimizer=optimizer):
            td.compile_step(Net(), loss, optimizer, BATCH, device="oracle")

        if "Linear" not in said:
            refused(call, td.ArgumentError, "groups", said, "head.weight")
        else:
            refused(call, td.ArgumentError, "compile_step", "no parameter is trained")


# Selectors


def test_selectors_are_lists_modules_and_parameters() -> None:
    model = Net()
    head, last = {"head.weight", "head.bias"}, {"encoder.2.weight", "encoder.2.bias"}
    for selector, expected in (
        (["head.*", "norm.*"], head | {"norm.weight", "norm.bias"}),
        (model.head, head),
        ([model.head, "encoder.2.*"], head | last),
        ([model.encoder[2], model.norm.bias], last | {"norm.bias"}),
        (
            [lambda name: name.endswith("2.bias"), model.head.weight],
            {"encoder.2.bias", "head.weight"},
        ),
    ):
        step = compiled(optim.only(selector, optim.adamw(0.1)), model)
        assert changed(step) == expected
        step.hyperparameters["group0.lr"] = 0.2
        assert set(step.gradients(BATCH)) == expected


def test_a_module_selects_under_the_name_that_it_has_in_each_model() -> None:
    """One module in two models, also where its optimizer is inside others."""
    net = Net()

    def other_loss(models, batch):
        return loss(models["net"], batch)

    optimizer = optim.ema(
        optim.chain(optim.clip_by_norm(1.0), optim.only(net.head, optim.sgd(0.1)))
    )
    assert changed(compiled(optimizer, net)) == {"head.weight", "head.bias"}
    step = td.compile_step({"net": net}, other_loss, optimizer, BATCH, device="oracle")
    assert changed(step) == {"net.head.weight", "net.head.bias"}


def test_decay_takes_lists_too() -> None:
    def nothing(model, batch):
        return loss(model, batch) * 0.0

    model = Net()
    sgd = optim.sgd(0.1, weight_decay=0.5, decay=["encoder.*.weight", model.head.weight])
    step = td.compile_step(model, nothing, sgd, BATCH, device="oracle")
    assert changed(step) == {"encoder.0.weight", "encoder.2.weight", "head.weight"}


def test_other_shapes_ask_the_selectors_again() -> None:
    model = Net()
    options = td.CompileOptions(on_new_shape="specialise")
    step = compiled(optim.only([model.head], optim.sgd(0.1)), model, options=options)
    few = {n: v[:2] for n, v in BATCH.items()}
    before = step.params
    step(few)
    moved = {n for n, v in step.params.items() if (v != before[n]).any()}
    assert moved == {"head.weight", "head.bias"}


# What a step and a model tell


def test_a_step_has_its_model() -> None:
    model = Net()
    step = compiled(optim.sgd(0.1), model)
    assert step.model is model
    assert [n for n, _ in step.model.named_modules()][:3] == ["", "encoder", "encoder.0"]
    pair = {"a": nn.Linear(4, 3), "w": np.ones(3, np.float32)}

    def both(models, batch):
        return losses.mse(models["a"](batch["x"]) * models["w"], batch["y"])

    step = td.compile_step(pair, both, optim.sgd(0.1), BATCH, device="oracle")
    assert step.model["a"] is pair["a"]
    assert step.model["w"].shape == (3,)
    with pytest.raises(AttributeError):
        step.model = model


def test_named_modules_and_requires_grad_as_in_pytorch() -> None:
    ours, theirs = Net(), torch.nn.Module()
    theirs.encoder = torch.nn.Sequential(
        torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 5)
    )
    theirs.norm, theirs.head = torch.nn.LayerNorm(5), torch.nn.Linear(5, 3)
    for walk in ("named_modules", "named_parameters", "named_children"):
        assert [n for n, _ in getattr(ours, walk)()] == [n for n, _ in getattr(theirs, walk)()]
    assert ours.encoder.requires_grad_(False) is ours.encoder
    theirs.encoder.requires_grad_(False)
    theirs.encoder[2].bias.requires_grad_(True)
    ours.encoder[2].bias.requires_grad = True
    trained = {n for n, p in theirs.named_parameters() if p.requires_grad}
    assert {n for n, p in ours.named_parameters() if p.requires_grad} == trained
    assert changed(compiled(optim.sgd(0.1), ours)) == trained


def test_a_hook_is_a_capture() -> None:
    """What a forward hook sees: the output of one module, in every program of the model."""

    class Watched(nn.Module):
        def __init__(self, inner, name):
            self.inner, self.name = inner, name

        def forward(self, x):
            return td.capture(self.name, self.inner(x))

    model = Net()
    model.norm = Watched(model.norm, "after norm")
    step = compiled(optim.sgd(0.0), model)
    seen = step(BATCH, captures=True).captures["after norm"]
    assert seen.shape == (6, 5)
    np.testing.assert_array_equal(step.evaluate(BATCH, captures=True).captures["after norm"], seen)
    assert step(BATCH).captures == {}
