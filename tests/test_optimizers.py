"""A hundred updates of every optimizer beside PyTorch, or beside NumPy where PyTorch has none.

In float64 through the oracle to 1e-10, and natively in float32 to 1e-5.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import optimizer_references as r
import treadle as td
from treadle import losses, nn, optim
from treadle.domains.philox import make_key, random_bits

STEPS = 100
SHAPES = {"b": (5,), "w": (5, 4)}
Arrays = dict[str, np.ndarray]


def start() -> Arrays:
    rng = np.random.default_rng(3)
    return {
        n: rng.normal(0, 0.6, s).astype(np.float32).astype(np.float64) for n, s in SHAPES.items()
    }


def batches() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=(6, 4)).astype(np.float32).astype(np.float64) for _ in range(STEPS)]


def loss(model, x):
    return (td.tanh(td.linear(x, model["w"], model["b"])) ** 2).mean()


def torch_loss(model, x):
    return (torch.tanh(torch.nn.functional.linear(x, model["w"], model["b"])) ** 2).mean()


def numpy_grads(params: Arrays, x: np.ndarray) -> Arrays:
    y = np.tanh(x @ params["w"].T + params["b"])
    slope = 2 * y * (1 - y**2) / y.size
    return {"b": slope.sum(0), "w": slope.T @ x}


def trained(optimizer: optim.Optimizer, device: str) -> td.TrainStep:
    first = start()
    parameters = {n: nn.Parameter(s) for n, s in SHAPES.items()}
    step = td.compile_step(parameters, loss, optimizer, td.Spec((6, 4)), device=device)
    step.load_params(first)
    for x in batches():
        step(x)
    return step


def check(found: Arrays, expected: Arrays, device: str, amplified: float = 1) -> None:
    """`amplified` is how much larger rounding may become than in plain averages."""
    assert found.keys() == expected.keys()
    relative, absolute = (1e-10, 1e-12) if device == "oracle" else (1e-5, 1e-5)
    tolerance = {"rtol": relative * amplified, "atol": absolute * amplified}
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, err_msg=name, **tolerance)


T = torch.optim
# Ours, and theirs for the same parameters.
TORCH = {
    "sgd": (lambda: optim.sgd(0.1), lambda p: T.SGD(p, 0.1)),
    "momentum": (lambda: optim.sgd(0.1, 0.9), lambda p: T.SGD(p, 0.1, 0.9)),
    "dampening": (lambda: optim.sgd(0.1, 0.9, dampening=0.3),
                  lambda p: T.SGD(p, 0.1, 0.9, dampening=0.3)),
    "nesterov": (lambda: optim.sgd(0.1, 0.8, weight_decay=0.01, nesterov=True),
                 lambda p: T.SGD(p, 0.1, 0.8, weight_decay=0.01, nesterov=True)),
    "adam": (lambda: optim.adam(0.05), lambda p: T.Adam(p, 0.05)),
    "adam decay": (lambda: optim.adam(0.05, (0.8, 0.95), 1e-6, 0.1),
                   lambda p: T.Adam(p, 0.05, (0.8, 0.95), 1e-6, 0.1)),
    "adam without memory": (lambda: optim.adam(0.05, (0.0, 0.9)), lambda p: T.Adam(p, 0.05, (0.0, 0.9))),
    "amsgrad": (lambda: optim.adam(0.05, amsgrad=True), lambda p: T.Adam(p, 0.05, amsgrad=True)),
    "adamw": (lambda: optim.adamw(0.05), lambda p: T.AdamW(p, 0.05)),
    "adamw amsgrad": (lambda: optim.adamw(0.05, weight_decay=0.2, amsgrad=True),
                      lambda p: T.AdamW(p, 0.05, weight_decay=0.2, amsgrad=True)),
    "adagrad": (lambda: optim.adagrad(0.05), lambda p: T.Adagrad(p, 0.05)),
    "adagrad all": (lambda: optim.adagrad(0.05, 0.1, 0.01, 0.2, 1e-6),
                    lambda p: T.Adagrad(p, 0.05, 0.1, 0.01, 0.2, 1e-6)),
    "rmsprop": (lambda: optim.rmsprop(0.01), lambda p: T.RMSprop(p, 0.01)),
    "rmsprop all": (lambda: optim.rmsprop(0.01, 0.9, 1e-6, 0.01, 0.8, centered=True),
                    lambda p: T.RMSprop(p, 0.01, 0.9, 1e-6, 0.01, 0.8, centered=True)),
    "adadelta": (lambda: optim.adadelta(), lambda p: T.Adadelta(p)),
    "adadelta all": (lambda: optim.adadelta(0.5, 0.8, 1e-5, 0.01), lambda p: T.Adadelta(p, 0.5, 0.8, 1e-5, 0.01)),
    "nadam": (lambda: optim.nadam(0.01), lambda p: T.NAdam(p, 0.01)),
    "nadam decay": (lambda: optim.nadam(0.01, (0.8, 0.99), weight_decay=0.1, momentum_decay=0.01),
                    lambda p: T.NAdam(p, 0.01, (0.8, 0.99), weight_decay=0.1, momentum_decay=0.01)),
    "nadam decoupled": (lambda: optim.nadam(0.01, weight_decay=0.1, decoupled_weight_decay=True),
                        lambda p: T.NAdam(p, 0.01, weight_decay=0.1, decoupled_weight_decay=True)),
    "radam": (lambda: optim.radam(0.01), lambda p: T.RAdam(p, 0.01)),
    "radam decay": (lambda: optim.radam(0.01, (0.8, 0.95), weight_decay=0.1),
                    lambda p: T.RAdam(p, 0.01, (0.8, 0.95), weight_decay=0.1)),
    "radam decoupled": (lambda: optim.radam(0.01, weight_decay=0.1, decoupled_weight_decay=True),
                        lambda p: T.RAdam(p, 0.01, weight_decay=0.1, decoupled_weight_decay=True)),
    "adamax": (lambda: optim.adamax(0.01), lambda p: T.Adamax(p, 0.01)),
    "adamax decay": (lambda: optim.adamax(0.01, (0.8, 0.95), 1e-6, 0.1),
                     lambda p: T.Adamax(p, 0.01, (0.8, 0.95), 1e-6, 0.1)),
    "asgd": (lambda: optim.asgd(0.1), lambda p: T.ASGD(p, 0.1)),
    "asgd all": (lambda: optim.asgd(0.2, 1e-2, 0.6, 30, 0.01), lambda p: T.ASGD(p, 0.2, 1e-2, 0.6, 30, 0.01)),
    "rprop": (lambda: optim.rprop(), lambda p: T.Rprop(p)),
    "rprop all": (lambda: optim.rprop(1e-3, (0.4, 1.5), (1e-4, 0.1)),
                  lambda p: T.Rprop(p, 1e-3, (0.4, 1.5), (1e-4, 0.1))),
    "adafactor": (lambda: optim.adafactor(eps=(1e-12, 1e-3)), lambda p: T.Adafactor(p, eps=(1e-12, 1e-3))),
    "adafactor all": (lambda: optim.adafactor(0.3, -0.5, (1e-6, 1e-2), 1.2, 0.1),
                      lambda p: T.Adafactor(p, 0.3, -0.5, (1e-6, 1e-2), 1.2, 0.1)),
    "sgd up": (lambda: optim.sgd(0.1, 0.9, weight_decay=0.1, maximize=True),
               lambda p: T.SGD(p, 0.1, 0.9, weight_decay=0.1, maximize=True)),
    "adamw up": (lambda: optim.adamw(0.01, maximize=True), lambda p: T.AdamW(p, 0.01, maximize=True)),
    "adafactor up": (lambda: optim.adafactor(eps=(1e-12, 1e-3), maximize=True),
                     lambda p: T.Adafactor(p, eps=(1e-12, 1e-3), maximize=True)),
    "adagrad up": (lambda: optim.adagrad(0.05, maximize=True), lambda p: T.Adagrad(p, 0.05, maximize=True)),
}  # fmt: skip


@pytest.fixture(autouse=True)
def float64_scalars():
    """PyTorch keeps some scalars of its optimizers in the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def torch_model() -> dict[str, torch.nn.Parameter]:
    return {n: torch.nn.Parameter(torch.tensor(v)) for n, v in start().items()}


def torch_trained(optimizers: list[torch.optim.Optimizer], model, after=lambda: None) -> Arrays:
    for x in batches():
        for o in optimizers:
            o.zero_grad()
        torch_loss(model, torch.tensor(x)).backward()
        for o in optimizers:
            o.step()
        after()
    return {n: p.detach().numpy() for n, p in model.items()}


@pytest.mark.parametrize("device", ["oracle", "cpu"])
@pytest.mark.parametrize("name", TORCH)
def test_beside_pytorch(name: str, device: str) -> None:
    ours, theirs = TORCH[name]
    model = torch_model()
    expected = torch_trained([theirs(list(model.values()))], model)
    check(trained(ours(), device).params, expected, device)


LBFGS = {
    "plain": {"lr": 0.3, "max_iter": 4},
    "long memory": {"lr": 0.2, "max_iter": 7, "history_size": 40},
    "one iteration": {"lr": 0.3, "max_iter": 1},
    "few evaluations": {"lr": 0.3, "max_iter": 9, "max_eval": 4},
    "tolerances": {"lr": 0.3, "max_iter": 9, "tolerance_grad": 1e-3, "tolerance_change": 1e-3},
    "wolfe": {"max_iter": 6, "line_search_fn": "strong_wolfe"},
    "long steps": {"lr": 30.0, "max_iter": 9, "line_search_fn": "strong_wolfe"},
    "short steps": {"lr": 1e-3, "max_iter": 5, "line_search_fn": "strong_wolfe"},
    "few trials": {"lr": 20.0, "max_iter": 9, "max_eval": 5, "line_search_fn": "strong_wolfe"},
    "coarse": {"max_iter": 9, "tolerance_change": 1e-3, "line_search_fn": "strong_wolfe"},
}


@pytest.mark.parametrize("device", ["oracle", "cpu"])
@pytest.mark.parametrize("name", LBFGS)
def test_lbfgs_beside_pytorch(name: str, device: str) -> None:
    """In float32 PyTorch's own branches of a search differ from those in float64."""
    given = {"history_size": 5} | LBFGS[name]
    dtype = torch.float64 if device == "oracle" else torch.float32
    model = {n: torch.nn.Parameter(torch.tensor(v, dtype=dtype)) for n, v in start().items()}
    theirs = T.LBFGS(list(model.values()), **given)
    parameters = {n: nn.Parameter(s) for n, s in SHAPES.items()}
    step = td.compile_step(
        parameters, curved_loss, optim.lbfgs(**given), td.Spec((6, 4)), device=device
    )
    step.load_params(start())

    def closure():
        theirs.zero_grad()
        value = torch_curved_loss(model, torch.tensor(x, dtype=dtype))
        value.backward()
        return value

    updates = 8 if device == "oracle" else 1
    for x in batches()[:updates]:
        loss = theirs.step(closure)
        assert step(x).loss == pytest.approx(loss.item(), rel=1e-6)
    tolerance = 1e-6 if device == "oracle" else 1e-3
    for n, p in model.items():
        np.testing.assert_allclose(
            step.params[n], p.detach().numpy(), tolerance, tolerance, err_msg=n
        )


def curved_loss(model, x):
    y = td.tanh(td.linear(x, model["w"], model["b"])) - 0.3
    return (y**2).mean() + 0.01 * (td.exp(model["w"]).sum() + (model["b"] ** 4).sum())


def torch_curved_loss(model, x):
    y = torch.tanh(torch.nn.functional.linear(x, model["w"], model["b"])) - 0.3
    return (y**2).mean() + 0.01 * (torch.exp(model["w"]).sum() + (model["b"] ** 4).sum())


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("device", ["oracle", "cpu"])
def test_muon_beside_pytorch(adjust: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch iterates in bfloat16; here it is made to keep float64."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())
    model = torch_model()
    muon = T.Muon([model["w"]], 0.02, nesterov=True, adjust_lr_fn=adjust)
    expected = torch_trained([muon, T.AdamW([model["b"]], 0.01)], model)
    ours = optim.muon(0.02, adjust_lr=adjust, others=optim.adamw(0.01))
    check(trained(ours, device).params, expected, device)


def test_muon_steps_are_nearly_orthogonal() -> None:
    """Without momentum one step is U Vᵀ of the gradient but for singular values around 1."""
    step = td.compile_step(
        {"w": nn.Parameter((6, 4))},
        lambda m, c: (m["w"] * c).sum(),  # the gradient is the batch
        optim.muon(1.0, weight_decay=0.0, momentum=0.0, nesterov=False),
        td.Spec((6, 4)),
        device="oracle",
    )
    g = np.random.default_rng(5).normal(size=(6, 4))
    before = step.params["w"]
    step(g)
    change = (before - step.params["w"]) / np.sqrt(6 / 4)
    u, _, vt = np.linalg.svd(g, full_matrices=False)
    inner = u.T @ change @ vt.T
    assert np.abs(inner - np.diag(np.diag(inner))).max() < 1e-12
    assert np.all((np.diag(inner) > 0.6) & (np.diag(inner) < 1.25))


AVERAGES = {
    "ema": (lambda o: optim.ema(o, 0.9), {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}, 1, 1),
    "swa": (lambda o: optim.swa(o, start=1), {}, 1, 1),
    "swa late": (lambda o: optim.swa(o, start=40, every=7), {}, 40, 7),
}


@pytest.mark.parametrize("device", ["oracle", "cpu"])
@pytest.mark.parametrize("name", AVERAGES)
def test_averages_beside_pytorch(name: str, device: str) -> None:
    wrap, options, first, every = AVERAGES[name]
    model = torch_model()
    holder = torch.nn.ParameterDict(model)
    average = AveragedModel(holder, **options)
    count = 0

    def after() -> None:
        nonlocal count
        count += 1
        if count >= first and (count - first) % every == 0:
            average.update_parameters(holder)

    expected = torch_trained([T.Adam(list(model.values()), 0.01)], model, after)
    step = trained(wrap(optim.adam(0.01)), device)
    check(step.params, expected, device)
    mean = {n: p.detach().numpy() for n, p in average.module.items()}
    check(evaluated(step), mean, device)
    assert np.abs(mean["w"] - expected["w"]).max() > 1e-3


def evaluated(step: td.TrainStep) -> Arrays:
    """The parameters that evaluation uses."""
    read = step.attach(lambda model, x: {n: p * 1.0 for n, p in model.items()}, td.Spec((1,)))
    return read(np.zeros(1, np.float32))


@dataclass(frozen=True)
class Case:
    ours: Callable[[], optim.Optimizer]
    reference: Callable[[], r.Reference]


BETAS = (0.85, 0.97)
NUMPY = {
    "adabelief": Case(lambda: optim.adabelief(0.01), lambda: r.AdaBelief(lr=0.01, betas=(0.9, 0.999), eps=1e-16, wd=0)),
    "adabelief decay": Case(lambda: optim.adabelief(0.01, BETAS, 1e-8, 0.1), lambda: r.AdaBelief(lr=0.01, betas=BETAS, eps=1e-8, wd=0.1)),
    "laprop": Case(lambda: optim.laprop(), lambda: r.LaProp(lr=4e-4, betas=(0.9, 0.999), eps=1e-15, wd=0)),
    "laprop decay": Case(lambda: optim.laprop(0.01, BETAS, 1e-8, 0.1), lambda: r.LaProp(lr=0.01, betas=BETAS, eps=1e-8, wd=0.1)),
    "ademamix": Case(lambda: optim.ademamix(0.01), lambda: r.AdEMAMix(lr=0.01, betas=(0.9, 0.999, 0.9999), alpha=5.0, warmup=None, eps=1e-8, wd=0)),
    "ademamix all": Case(lambda: optim.ademamix(0.01, (0.8, 0.97, 0.99), 3.0, 60, 1e-6, 0.1), lambda: r.AdEMAMix(lr=0.01, betas=(0.8, 0.97, 0.99), alpha=3.0, warmup=60, eps=1e-6, wd=0.1)),
    "shampoo": Case(lambda: optim.shampoo(0.05), lambda: r.Shampoo(lr=0.05, momentum=0.0, eps=1e-6, wd=0, most=1024)),
    "shampoo all": Case(lambda: optim.shampoo(0.05, 0.8, 1e-4, 0.1, 4), lambda: r.Shampoo(lr=0.05, momentum=0.8, eps=1e-4, wd=0.1, most=4)),
    "soap": Case(lambda: optim.soap(), lambda: r.SOAP(lr=3e-3, betas=(0.95, 0.95), shampoo_beta=0.95, eps=1e-8, wd=0.01, most=1024, corrects=True)),
    "soap all": Case(lambda: optim.soap(0.01, BETAS, 0.9, 1e-6, 0.1, 4, correct_bias=False), lambda: r.SOAP(lr=0.01, betas=BETAS, shampoo_beta=0.9, eps=1e-6, wd=0.1, most=4, corrects=False)),
    "lion": Case(lambda: optim.lion(1e-3), lambda: r.Lion(lr=1e-3, betas=(0.9, 0.99), wd=0)),
    "lion decay": Case(lambda: optim.lion(1e-3, BETAS, 0.3), lambda: r.Lion(lr=1e-3, betas=BETAS, wd=0.3)),
    "adamp": Case(lambda: optim.adamp(0.01, weight_decay=0.1, delta=1.5), lambda: r.AdamP(lr=0.01, betas=(0.9, 0.999), eps=1e-8, wd=0.1, delta=1.5, wd_ratio=0.1, nesterov=False)),
    "adamp nesterov": Case(lambda: optim.adamp(0.01, BETAS, 1e-6, 0.1, 1.0, 0.2, nesterov=True), lambda: r.AdamP(lr=0.01, betas=BETAS, eps=1e-6, wd=0.1, delta=1.0, wd_ratio=0.2, nesterov=True)),
    "lamb": Case(lambda: optim.lamb(0.01), lambda: r.LAMB(lr=0.01, betas=(0.9, 0.999), eps=1e-6, wd=0.01)),
    "lars": Case(lambda: optim.lars(1.0), lambda: r.LARS(lr=1.0, momentum=0.9, wd=5e-4, trust=1e-3)),
    "schedule free": Case(lambda: optim.schedule_free_adamw(0.01), lambda: r.ScheduleFree(lr=0.01, betas=(0.9, 0.999), eps=1e-8, wd=0, warmup=0, r=0, power=2)),
    "schedule free all": Case(lambda: optim.schedule_free_adamw(0.01, BETAS, 1e-6, 0.1, 20, 0.5, 1.0), lambda: r.ScheduleFree(lr=0.01, betas=BETAS, eps=1e-6, wd=0.1, warmup=20, r=0.5, power=1)),
    "prodigy": Case(lambda: optim.prodigy(0.1, d0=1e-2), lambda: r.Prodigy(lr=0.1, betas=(0.9, 0.999), eps=1e-8, wd=0, d0=1e-2)),
    "prodigy decay": Case(lambda: optim.prodigy(0.5, BETAS, 1e-6, 0.1, 1e-4), lambda: r.Prodigy(lr=0.5, betas=BETAS, eps=1e-6, wd=0.1, d0=1e-4)),
    "lookahead": Case(lambda: optim.lookahead(optim.sgd(0.1), 7, 0.3), lambda: r.Lookahead(lr=0.1, k=7, alpha=0.3)),
    "sam": Case(lambda: optim.sam(optim.sgd(0.1, 0.9)), lambda: r.SAM(lr=0.1, momentum=0.9, rho=0.05, adaptive=False)),
    "asam": Case(lambda: optim.sam(optim.sgd(0.1, 0.9), 0.5, adaptive=True), lambda: r.SAM(lr=0.1, momentum=0.9, rho=0.5, adaptive=True)),
    "galore": Case(lambda: optim.galore(0.01, 2, 30), lambda: r.GaLore(lr=0.01, rank=2, interval=30, scale=0.25, iterations=2, betas=(0.9, 0.999), eps=1e-8, wd=0)),
    "galore all": Case(lambda: optim.galore(0.01, 3, 10, 0.5, 4, BETAS, 1e-6, 0.1), lambda: r.GaLore(lr=0.01, rank=3, interval=10, scale=0.5, iterations=4, betas=BETAS, eps=1e-6, wd=0.1)),
}  # fmt: skip


def numpy_trained(reference: r.Reference, grads=numpy_grads) -> tuple[Arrays, Arrays]:
    params = start()
    for x in batches():
        reference.step(params, grads(params, x), lambda other, x=x: grads(other, x))
    return params, reference.eval_params(params)


@pytest.mark.parametrize("device", ["oracle", "cpu"])
@pytest.mark.parametrize("name", NUMPY)
def test_beside_numpy(name: str, device: str) -> None:
    case = NUMPY[name]
    expected, expected_eval = numpy_trained(case.reference())
    step = trained(case.ours(), device)
    # Eigenvectors of nearly equal eigenvalues amplify rounding.
    amplified = 300 if "soap" in name else 1
    check(step.params, expected, device, amplified)
    check(evaluated(step), expected_eval, device, amplified)


def test_both_branches_of_adamp_were_taken() -> None:
    """The parity above says nothing about a projection that never happens."""
    counts = []
    for name in ("adamp", "adamp nesterov"):
        reference = NUMPY[name].reference()
        numpy_trained(reference)
        counts.append(reference.projections)
    assert all(0 < c < STEPS for c in counts)


def test_wide_and_tall_matrices_in_galore() -> None:
    """The same numbers for a matrix and its transpose."""
    g = np.random.default_rng(1).normal(size=(20, 6, 3)).astype(np.float32)

    def run(turned: bool) -> np.ndarray:
        shape = (3, 6) if turned else (6, 3)
        step = td.compile_step(
            {"w": nn.Parameter(shape)},
            lambda m, c: (m["w"] * c).sum(),
            optim.galore(0.1, 2, 5),
            td.Spec(shape),
            device="oracle",
        )
        for x in g:
            step(x.T if turned else x)
        return step.params["w"]

    np.testing.assert_allclose(run(True).T, run(False), rtol=1e-10)
    assert np.abs(run(False)).max() > 0.1


def test_the_subspace_of_galore_is_that_of_the_svd() -> None:
    """For one gradient again and again, the basis spans its leading singular vectors."""
    rng = np.random.default_rng(2)
    u, _, vt = np.linalg.svd(rng.normal(size=(6, 9)), full_matrices=False)
    g = (u * [9.0, 5.0, 1.0, 0.4, 0.2, 0.0]) @ vt
    step = td.compile_step(
        {"w": nn.Parameter((6, 9))},
        lambda m, c: (m["w"] * c).sum(),
        optim.galore(0.1, 2, 1, iterations=3),
        td.Spec((6, 9)),
        device="oracle",
    )
    for _ in range(5):
        step(g)
    basis = step.state_dict()["step:optimizer:basis.w"]
    np.testing.assert_allclose(basis.T @ basis, np.eye(2), atol=1e-12)
    np.testing.assert_allclose(basis @ basis.T, u[:, :2] @ u[:, :2].T, atol=1e-5)


# Sophia: an estimate of the Hessian's diagonal that does not depend on luck, and one that does.


SOPHIA = {"lr": 0.01, "betas": (0.9, 0.95), "rho": 0.03, "eps": 1e-12, "wd": 0.1, "interval": 3}


@pytest.mark.parametrize("device", ["oracle", "cpu"])
def test_sophia_with_hutchinson_beside_numpy(device: str) -> None:
    rng = np.random.default_rng(0)
    data = [rng.normal(size=(5, 4)).astype(np.float32).astype(np.float64) for _ in range(STEPS)]

    def loss(model, x):
        return ((model["w"] * x) ** 4).sum() / 4 + ((model["b"] * x.sum(1)) ** 2).sum() / 2

    def grads(params, x):
        return {"b": params["b"] * x.sum(1) ** 2, "w": params["w"] ** 3 * x**4}

    def hessian(params, t):
        return {"b": data[t].sum(1) ** 2, "w": 3 * params["w"] ** 2 * data[t] ** 4}

    reference, params = r.Sophia(hessian, **SOPHIA), start()
    parameters = {n: nn.Parameter(s) for n, s in SHAPES.items()}
    ours = optim.sophia(0.01, (0.9, 0.95), 0.03, weight_decay=0.1, interval=3)
    step = td.compile_step(parameters, loss, ours, td.Spec((5, 4)), device=device)
    step.load_params(start())
    for x in data:
        reference.step(params, grads(params, x), None)
        step(x)
    check(step.params, params, device)


def test_hutchinson_is_the_diagonal_on_average() -> None:
    """For a Hessian that is not diagonal: ‖estimate − diagonal‖ falls as draws are averaged."""
    a = np.array([[2.0, 0.7, 0.1], [0.7, 3.0, -0.4], [0.1, -0.4, 1.0]])
    step = td.compile_step(
        {"w": nn.Parameter((3,))},
        lambda m, matrix: (m["w"] * (matrix @ m["w"])).sum() / 2,
        optim.sophia(0.0, (0.9, 0.99), interval=1, weight_decay=0.0),
        td.Spec((3, 3)),
    )
    for _ in range(500):
        step(a)
    h = step.state_dict()["step:optimizer:h.w"]
    np.testing.assert_allclose(h, np.diag(a), atol=0.2)


@pytest.mark.parametrize("device", ["oracle", "cpu"])
def test_sophia_with_sampled_labels_beside_numpy(device: str) -> None:
    rng = np.random.default_rng(0)
    data = [
        {"x": rng.normal(size=(8, 4)).astype(np.float32), "y": rng.integers(0, 5, 8)}
        for _ in range(STEPS)
    ]

    def loss(model, b):
        kept = td.random.bernoulli(0.8, (8, 4)).astype(td.float32)  # site 0 is taken
        return losses.cross_entropy(td.linear(b["x"] * kept, model["w"], model["b"]), b["y"])

    def logits(params, t):
        bits = random_bits(make_key(0, t), 0, (8, 4))
        x = data[t]["x"] * ((bits >> 8) * 2.0**-24 < 0.8)
        return x, x @ params["w"].T + params["b"]

    def mean_gradient(params, t, labels):
        x, z = logits(params, t)
        p = np.exp(z - z.max(1, keepdims=True))
        slope = (p / p.sum(1, keepdims=True) - np.eye(5)[labels]) / 8
        return {"b": slope.sum(0), "w": slope.T @ x}

    def hessian(params, t):
        bits = random_bits(make_key(0, t), 1, (8, 5))
        unit = ((bits >> 9) + 0.5) * 2.0**-23
        labels = (logits(params, t)[1] - np.log(-np.log(unit))).argmax(1)
        return {n: 8 * g**2 for n, g in mean_gradient(params, t, labels).items()}

    reference, params = r.Sophia(hessian, **SOPHIA), start()
    parameters = {n: nn.Parameter(s) for n, s in SHAPES.items()}
    ours = optim.sophia(0.01, (0.9, 0.95), 0.03, 1e-12, 0.1, 3, "gauss_newton")
    spec = {"x": td.Spec((8, 4)), "y": td.Spec((8,), td.int32)}
    step = td.compile_step(parameters, loss, ours, spec, device=device)
    step.load_params(start())
    for t, b in enumerate(data):
        reference.step(params, mean_gradient(params, t, b["y"]), None)
        step(b)
    check(step.params, params, device)


def test_sampled_labels_need_a_cross_entropy() -> None:
    with pytest.raises(td.GradientError, match=r"no cross-entropy.*losses\.cross_entropy"):
        trained(optim.sophia(estimator="gauss_newton"), "oracle")


def test_a_new_beta_of_schedule_free_leaves_the_average_alone() -> None:
    """y is made of z and x by the old β₁; the x that goes on is the same."""
    step = trained(optim.schedule_free_adamw(0.01), "oracle")
    before = evaluated(step)
    step.hyperparameters["beta1"] = 0.5
    check(evaluated(step), before, "oracle")
    step.lr_scale = 0.0  # z stays, and x moves to it by its weight only
    step(batches()[0])
    z = {n: step.state_dict()[f"step:optimizer:z.{n}"] for n in SHAPES}
    part = 0.01**2 / (101 * 0.01**2)
    moved = {n: x + (z[n] - x) * part for n, x in before.items()}
    check(evaluated(step), moved, "oracle")
    expected = {n: 0.5 * z[n] + 0.5 * x for n, x in moved.items()}
    check(step.params, expected, "oracle")


# The step around the optimizer


def test_sam_is_clipped_where_its_gradient_is_used() -> None:
    """The step's clipping bounds the gradient uphill, not only the one that leads there."""

    def run(**options) -> Arrays:
        step = td.compile_step(
            {n: nn.Parameter(s) for n, s in SHAPES.items()},
            loss,
            optim.sam(optim.sgd(1.0)),
            td.Spec((6, 4)),
            **options,
        )
        step.load_params(start())
        step(batches()[0])
        return {n: v - start()[n] for n, v in step.params.items()}

    free, bound = run(), run(clip_norm=1e-3)
    length = np.sqrt(sum((v**2).sum() for v in bound.values()))
    assert length == pytest.approx(1e-3, rel=2e-3)
    assert np.sqrt(sum((v**2).sum() for v in free.values())) > 1e-2


def test_no_number_of_a_step_recompiles() -> None:
    optimizer = optim.chain(
        optim.clip_by_global_norm(1.0),
        optim.groups(
            ("weight", optim.adamw(optim.warmup_cosine(0.1, 3, 20))), ("*", optim.sgd(0.1, 0.9))
        ),
    )
    step = td.compile_step(
        nn.Linear(3, 2), lambda m, x: (m(x) ** 2).mean(), optimizer, td.Spec((4, 3)), clip_norm=5.0
    )
    x = np.random.default_rng(0).normal(size=(4, 3))
    step(x)
    compiles = step.report.compiles
    for name in step.hyperparameters:
        step.hyperparameters[name] = step.hyperparameters[name] * 0.9
        step(x)
    step.lr_scale, step.clip_norm = 0.5, 2.0
    step(x)
    assert step.report.compiles == compiles
    assert len(step.hyperparameters) == 15
    assert "clip_by_global_norm.0.max_norm" in step.hyperparameters
    assert "group1.frozen" in step.hyperparameters
