"""PyTorch's own database of optimizer configurations: eight updates of each beside ours."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.testing._internal.common_optimizers import optim_db

import treadle as td
from treadle import nn, optim

ABSENT = {"SparseAdam": "parameters have no sparse gradients"}
GIVEN = {
    # The default depends on the dtype of the parameters: float32 here and float64 in PyTorch.
    "Adafactor": {"eps": (float(np.finfo(np.float32).eps), 1e-3)},
    "LBFGS": {"history_size": 8},  # the oracle takes long for a memory of 100
}
UPDATES = 8
SHAPES = {"b": (5,), "w": (5, 4)}
INFOS = {info.optim_cls.__name__: info for info in optim_db}
CONFIGURATIONS = [
    pytest.param(name, i, id=f"{name}-{config.desc}")
    for name, info in INFOS.items()
    if name not in ABSENT
    for i, config in enumerate(info.optim_inputs_func("cpu"))
]


@pytest.fixture(autouse=True)
def float64_scalars(monkeypatch: pytest.MonkeyPatch):
    """PyTorch keeps some scalars in the default dtype, and Muon iterates in bfloat16."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def plain(value: object) -> object:
    return float(value) if isinstance(value, torch.Tensor) else value


def start(name: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    shapes = {"w": SHAPES["w"]} if name == "Muon" else SHAPES
    return {n: rng.normal(0, 0.6, s).astype(np.float32) for n, s in shapes.items()}


def loss(model, x):
    b = model.get("b", 0.0)
    return ((td.tanh(x @ model["w"].T + b) - 0.3) ** 2).mean() + 0.01 * (model["w"] ** 4).sum()


def torch_loss(model, x):
    b = model.get("b", 0.0)
    return ((torch.tanh(x @ model["w"].T + b) - 0.3) ** 2).mean() + 0.01 * (model["w"] ** 4).sum()


@pytest.mark.parametrize(("name", "index"), CONFIGURATIONS)
def test_configurations_agree(name: str, index: int) -> None:
    info = INFOS[name]
    kwargs = {k: plain(v) for k, v in info.optim_inputs_func("cpu")[index].kwargs.items()}
    kwargs |= GIVEN.get(name, {})
    first = start(name)
    model = {n: torch.nn.Parameter(torch.tensor(v.astype(np.float64))) for n, v in first.items()}
    theirs = info.optim_cls(list(model.values()), **kwargs)
    parameters = {n: nn.Parameter(v.shape) for n, v in first.items()}
    ours = getattr(optim, name.lower())(**kwargs)
    step = td.compile_step(parameters, loss, ours, td.Spec((6, 4)), device="oracle")
    step.load_params(first)
    rng = np.random.default_rng(0)
    for _ in range(UPDATES):
        x = rng.normal(size=(6, 4)).astype(np.float32).astype(np.float64)

        def closure(x=x):
            theirs.zero_grad()
            value = torch_loss(model, torch.tensor(x))
            value.backward()
            return value

        expected = theirs.step(closure).item()
        assert step(x).loss == pytest.approx(expected, rel=1e-8)
    tolerance = 1e-5 if name == "LBFGS" else 1e-8  # its searches amplify rounding
    for n, p in model.items():
        found = step.params[n]
        np.testing.assert_allclose(found, p.detach().numpy(), tolerance, tolerance, err_msg=n)


def refused() -> list[object]:
    """Configurations that PyTorch refuses for a number."""
    cases = []
    for name in INFOS.keys() - ABSENT.keys():
        for case in INFOS[name].optim_error_inputs_func("cpu", torch.float32):
            kwargs = case.optimizer_error_input.kwargs
            numbers = {k: v for k, v in kwargs.items() if k not in ("foreach", "fused", "lr")}
            if numbers and not any("tensor" in repr(v) for v in kwargs.values()):
                cases.append(pytest.param(name, numbers, id=f"{name}-{numbers}"))
    return sorted(cases, key=lambda case: case.id)


@pytest.mark.parametrize(("name", "kwargs"), refused())
def test_what_pytorch_refuses_is_refused(name: str, kwargs: dict[str, object]) -> None:
    kwargs = {"adjust_lr" if k == "adjust_lr_fn" else k: v for k, v in kwargs.items()}
    with pytest.raises(td.ArgumentError):
        getattr(optim, name.lower())(**kwargs)
    assert len(refused()) >= 15


def test_absent_optimizers_are_the_listed_ones() -> None:
    assert {name for name in INFOS if not hasattr(optim, name.lower())} == set(ABSENT)
