"""Wrong arguments of every public function: a named error or a result, never a raw exception."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle as td
from refusals import refused
from treadle import data, losses, metrics, nn, optim
from treadle.base.memory import memory_there

WRONG = [None, "x", -1, 0, 1.5, True]

X = td.tensor(np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32))
HEADS = td.ones((1, 2, 3, 4))

# A right value for each parameter that has no default, by its name; 4 for all others.
RIGHT: dict[str, Any] = {
    "amounts": ((0, 0), (0, 0)),
    "axes": (1, 0),
    "axis": 0,
    "batch_size": 2,
    "condition": X > 0,
    "data": np.ones((4, 2), np.float32),
    "dtype": td.float32,
    "format": "{}",
    "function": lambda *arguments: arguments[0] if arguments else X,
    "indices": td.tensor(np.array([0, 1, 2], np.int32)),
    "init": td.zeros(()),
    "k": HEADS,
    "kernel": 2,
    "loader": [{"a": np.zeros(2)}],
    "logits": X,
    "modules": [nn.ReLU()],
    "name": "n",
    "path": "there is none",
    "primals": [X],
    "q": HEADS,
    "shape": (2, 2),
    "sizes": (1, 1),
    "spec": "ij,jk->ik",
    "starts": (0, 0),
    "tangents": [X],
    "targets": td.tensor(np.zeros(4, np.int32)),
    "tensors": [X, X],
    "tokens": np.arange(20),
    "update": td.ones((1, 1)),
    "updates": td.ones((3, 4)),
    "v": HEADS,
    "value": 1.0,
    "values": np.array([1, 2]),
    "weight": X,
    "x": X,
    "y": X,
}

# What users do not call themselves: protocols, and what steps and modules are made of.
INNER = {
    "data.Loader", "data.Source", "td.Forward", "td.Program", "td.RunResult", "td.TrainStep",
    "td.Trainer", "td.CheckpointManager", "nn.init.fans", "nn.init.zeros", "nn.init.ones",
}  # fmt: skip


def _callables() -> list[tuple[str, Callable[..., Any]]]:
    parts = {
        "td": td, "nn": nn, "nn.init": nn.init, "data": data, "losses": losses,
        "metrics": metrics, "td.random": td.random,
    }  # fmt: skip
    found = []
    for prefix, module in parts.items():
        for name, value in vars(module).items():
            is_ours = getattr(value, "__module__", "").startswith("treadle")
            is_own = prefix not in ("nn.init", "td.random") or (
                is_ours and value.__module__ == module.__name__
            )
            is_error = isinstance(value, type) and issubclass(value, BaseException | Warning)
            if callable(value) and is_ours and is_own and not is_error and name[0] != "_":
                found.append((f"{prefix}.{name}", value))
    # These are imported when they are first used.
    found += [(f"td.{n}", getattr(td, n)) for n in ("GradientAccumulator",)]
    return [(name, value) for name, value in found if name not in INNER]


CALLABLES = _callables()


@pytest.mark.parametrize(("name", "function"), CALLABLES, ids=[n for n, _ in CALLABLES])
def test_wrong_arguments_are_refused_by_name(name: str, function: Callable[..., Any]) -> None:
    parameters = list(inspect.signature(function).parameters.values())
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    right = {p.name: RIGHT.get(p.name, 4) for p in named if p.default is p.empty}
    raw = []
    for parameter in named:
        for wrong in WRONG:
            given = right | {parameter.name: wrong}
            positional = [given.pop(p.name) for p in named if p.kind is p.POSITIONAL_ONLY]
            try:
                function(*positional, **given)
            except td.TreadleError:
                pass
            except Exception as error:
                raw.append(f"{name}({parameter.name}={wrong!r}): {error!r}")
    assert not raw


def test_the_list_is_long() -> None:
    assert len(CALLABLES) > 200


SIZES: list[Callable[[Any], object]] = [
    lambda n: nn.Linear(n, 2),
    lambda n: nn.Linear(2, n),
    lambda n: nn.Embedding(n, 2),
    lambda n: nn.Embedding(2, n),
    lambda n: nn.Conv1d(n, 2, 3),
    lambda n: nn.Conv2d(2, n, 3),
    lambda n: nn.Conv3d(2, 2, n),
    lambda n: nn.Conv2d(2, 2, 3, stride=n),
    lambda n: nn.Conv2d(2, 2, 3, dilation=n),
    lambda n: nn.Conv2d(2, 2, 3, groups=n),
    lambda n: nn.LayerNorm(n),
    lambda n: nn.RMSNorm((2, n)),
    lambda n: nn.BatchNorm1d(n),
    lambda n: nn.BatchNorm2d(n),
    lambda n: nn.LSTM(n, 2),
    lambda n: nn.LSTM(2, n),
    lambda n: nn.GRU(2, 2, n),
    lambda n: nn.MultiHeadAttention(n, 1),
    lambda n: nn.MultiHeadAttention(4, n),
    lambda n: nn.RotaryEmbedding(n),
    lambda n: nn.SwiGLU(n, 2),
    lambda n: nn.SwiGLU(2, n),
    lambda n: nn.MaxPool2d(n),
    lambda n: nn.AvgPool2d((2, n)),
    lambda n: nn.MaxPool2d(2, stride=n),
]


@pytest.mark.parametrize("make", SIZES)
def test_sizes_of_layers_are_positive_integers(make: Callable[[Any], object]) -> None:
    make(np.int64(2))
    for wrong in (-1, 0, 1.5, True, "x", None, np.float32(2)):
        if wrong is None and make is SIZES[-1]:
            continue  # a pooling's stride may be left out
        with pytest.raises(td.ArgumentError, match="whole number of at least 1"):
            make(wrong)


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan"), "x", None, True])
def test_probabilities(p: Any) -> None:
    for make in (nn.Dropout, lambda q: nn.LSTM(2, 2, dropout=q)):
        with pytest.raises(td.ArgumentError, match="between 0 and 1"):
            make(p)


def _loss(model: nn.Module, x: td.Tensor) -> td.Tensor:
    return (model(x) ** 2).mean()


STEP = {"loss": _loss, "optimizer": optim.sgd(0.1), "batch": td.Spec((3, 2)), "device": "oracle"}


@pytest.mark.parametrize("seed", ["x", 1.5, True, np.float64(3)])
def test_seeds(seed: Any) -> None:
    model = nn.Linear(2, 1)
    step = td.compile_step(model, **STEP)
    calls = [
        lambda: td.compile_step(model, **STEP, seed=seed),
        lambda: td.compile_forward(model, lambda m, x: m(x), td.Spec((3, 2)), seed=seed),
        lambda: td.compile(lambda x: x, td.Spec(()), seed=seed),
        lambda: step.reset(seed),
        lambda: model.init(seed),
        lambda: td.random.seed(seed),
        lambda: data.ArrayLoader(np.zeros((4, 1)), 2, seed=seed),
        lambda: data.split(np.zeros((4, 1)), seed=seed),
    ]
    for call in calls:
        with pytest.raises(td.ArgumentError, match=r"seed = .* It is a whole number"):
            call()


@pytest.mark.parametrize("seed", [-5, 2**64 + 3, np.int64(7)])
def test_any_whole_number_is_a_seed_the_same_everywhere(seed: Any) -> None:
    model = nn.Linear(2, 1)
    step = td.compile_step(model, **STEP, seed=seed)
    first = model.init(seed)["weight"]
    np.testing.assert_array_equal(step.params["weight"].astype(np.float32), first)
    step.reset(seed)
    np.testing.assert_array_equal(step.params["weight"].astype(np.float32), first)


# Memory


HUGE: list[Callable[[str], object]] = [
    lambda device: td.compile(lambda x: x * 2, td.Spec((10**12,)), device=device),
    lambda device: td.compile(lambda x: x.sum(), td.Spec((2**40, 2**40)), device=device),
    lambda device: td.compile(lambda: td.zeros((2**31, 2**31)), device=device),
    lambda device: td.compile_step(
        nn.Linear(10**6, 10**6), _loss, optim.sgd(0.1), td.Spec((1, 10**6)), device=device
    ),
    lambda device: td.compile_step(
        nn.Embedding(2**40, 2**40), _loss, optim.adam(0.1), td.Spec((1,), td.int32), device=device
    ),
]


@pytest.mark.parametrize("device", ["cpu", "oracle"])
@pytest.mark.parametrize("call", HUGE)
def test_what_no_machine_holds_is_refused_with_its_bytes(
    device: str, call: Callable[[str], object]
) -> None:
    with pytest.raises(td.OutOfMemoryError, match=r"needs [\d.,e+]+ [TE]B \([\d,]+ bytes\)"):
        call(device)


@pytest.mark.parametrize(
    "call",
    [
        lambda: td.zeros((10**12,)),
        lambda: td.random.bits((2**40, 2**40)),
        lambda: td.ones((10**6,))[:, None] * td.ones((10**6,)),
        lambda: nn.Linear(10**6, 10**6).init(),
    ],
)
def test_eager_values_that_no_machine_holds(call: Callable[[], object]) -> None:
    with pytest.raises(td.OutOfMemoryError, match="4,000,000,000,000 bytes|EB"):
        call()
    with pytest.raises(MemoryError):  # what one would catch otherwise
        call()


def test_between_inputs_and_results_counts_too() -> None:
    wide = memory_there() // 4 + 1  # a row of it is more than there is

    def function(x: td.Tensor) -> td.Tensor:
        row = x[:, None] @ td.ones((1, wide))
        return td.sort(row)[0][:, :1]

    with pytest.raises(td.OutOfMemoryError, match="between them"):
        td.compile(function, td.Spec((2,)), device="cpu")


# Files


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"delimiter": ""}, "delimiter = ''"),
        ({"delimiter": ";;"}, "delimiter = ';;'"),
        ({"delimiter": "\n"}, "delimiter = "),
        ({"encoding": "zz"}, "encoding = 'zz'"),
        ({"encoding": "hex"}, "encoding = 'hex'"),
        ({"header": 3}, "header = 3"),
        ({"types": "x"}, "types = 'x'"),
        ({"fill": "x"}, "fill = 'x'"),
    ],
)
def test_what_is_said_about_a_csv_file(options: dict, said: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(td.ArgumentError, match=said):
        data.read_csv(path, **options)


@pytest.mark.parametrize("read", [data.read_csv, data.read_npy, data.read_idx])
def test_a_path_is_text_or_a_path(read: Callable[[Any], object]) -> None:
    for path in (None, 3):
        with pytest.raises(td.ArgumentError, match="path = "):
            read(path)


def test_a_function_is_compiled_for_a_spec_of_each_argument() -> None:
    def f(x, y=1.0):
        return (x * x * y).sum()

    for function in (f, td.grad(f), td.value_and_grad(f), td.vmap(f)):
        refused(
            lambda function=function: td.compile(function),
            td.ArgumentError,
            "compile",
            "f takes (x, y=1.0), and there are no specs",
            "td.compile(f, td.Spec((3,)))",
        )
    spec = td.Spec((3,))
    refused(lambda: td.compile(f, spec, spec, spec), td.ArgumentError, "compile", "are 3 specs")
    refused(lambda: td.compile(nn.ReLU()), td.ArgumentError, "compile", "no specs")
    assert td.compile(lambda: td.ones((2,)), device="oracle")().tolist() == [1, 1]
    assert td.compile(nn.ReLU(), spec, device="oracle")(np.array([-1.0, 0, 2], np.float32))[2] == 2
    value, slope = td.compile(td.value_and_grad(f), spec, device="oracle")(np.ones(3, np.float32))
    assert (value, slope.tolist()) == (3, [2, 2, 2])
