"""Distributions beside PyTorch's: densities, moments, divergences, gradients and samples."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats

import treadle as td
from treadle import distributions as d
from treadle import losses, nn, optim
from treadle.distributions.gamma import _slope

T = torch.distributions
RNG = np.random.default_rng(0)


def positive(*shape: int) -> np.ndarray:
    return RNG.gamma(2.0, 1.0, shape) + 0.3


def real(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape)


def inner(*shape: int) -> np.ndarray:
    return RNG.uniform(0.1, 0.9, shape)


def simplex(*shape: int) -> np.ndarray:
    weights = positive(*shape)
    return weights / weights.sum(-1, keepdims=True)


def covariance(n: int) -> np.ndarray:
    a = real(n, n)
    return a @ a.T + np.eye(n)


CASES = {
    "Normal": {"loc": real(3), "scale": positive(3)},
    "Laplace": {"loc": real(3), "scale": positive(3)},
    "Cauchy": {"loc": real(3), "scale": positive(3)},
    "Gumbel": {"loc": real(3), "scale": positive(3)},
    "StudentT": {"df": positive(3) + 2.5, "loc": real(3), "scale": positive(3)},
    "Uniform": {"low": real(3) - 3, "high": real(3) + 3},
    "Exponential": {"rate": positive(3)},
    "HalfNormal": {"scale": positive(3)},
    "HalfCauchy": {"scale": positive(3)},
    "LogNormal": {"loc": real(3), "scale": inner(3)},
    "Weibull": {"scale": positive(3), "concentration": positive(3)},
    "Pareto": {"scale": positive(3), "alpha": positive(3) + 2},
    "Gamma": {"concentration": positive(3), "rate": positive(3)},
    "Chi2": {"df": positive(3)},
    "InverseGamma": {"concentration": positive(3) + 2, "rate": positive(3)},
    "Beta": {"concentration1": positive(3), "concentration0": positive(3)},
    "Dirichlet": {"concentration": positive(2, 3)},
    "Bernoulli": {"probs": inner(3)},
    "Geometric": {"probs": inner(3)},
    "Binomial": {"total_count": np.array([3.0, 5.0, 7.0]), "probs": inner(3)},
    "NegativeBinomial": {"total_count": positive(3), "probs": inner(3)},
    "Poisson": {"rate": np.array([0.4, 5.0, 30.0])},
    "Categorical": {"logits": real(2, 4)},
    "OneHotCategorical": {"probs": simplex(2, 4)},
    "OneHotCategoricalStraightThrough": {"logits": real(2, 4)},
    "Multinomial": {"total_count": 5, "probs": simplex(4)},
    "MultivariateNormal": {"loc": real(3), "covariance_matrix": covariance(3)},
    "RelaxedBernoulli": {"temperature": np.array(0.7), "logits": real(3)},
    "RelaxedOneHotCategorical": {"temperature": np.array(0.7), "logits": real(2, 4)},
}
# What takes no parameters of its own, or is not in PyTorch, has tests of its own below.
ELSEWHERE = {
    "Distribution",
    "Independent",
    "MixtureSameFamily",
    "TransformedDistribution",
    "Logistic",
}
every = pytest.mark.parametrize("name", CASES)


def ours(name: str, given: dict | None = None) -> d.Distribution:
    given = CASES[name] if given is None else given
    tensors = {k: td.tensor(v) if isinstance(v, np.ndarray) else v for k, v in given.items()}
    return getattr(d, name)(**tensors)


def theirs(name: str, given: dict | None = None) -> T.Distribution:
    given = CASES[name] if given is None else given
    tensors = {k: torch.tensor(v) if isinstance(v, np.ndarray) else v for k, v in given.items()}
    return getattr(T, name)(**tensors)


def close(found: td.Tensor, expected: torch.Tensor, what: str, rtol: float = 1e-9) -> None:
    assert found.shape == tuple(expected.shape), what
    np.testing.assert_allclose(found.numpy(), expected.detach().numpy(), rtol, 1e-10, err_msg=what)


def test_every_distribution_is_here() -> None:
    classes = {
        n for n, c in vars(d).items() if isinstance(c, type) and issubclass(c, d.Distribution)
    }
    assert classes == set(CASES) | ELSEWHERE


@every
def test_beside_pytorch(name: str) -> None:
    mine, other = ours(name), theirs(name)
    assert (mine.batch_shape, mine.event_shape) == (
        tuple(other.batch_shape),
        tuple(other.event_shape),
    )
    torch.manual_seed(1)
    x = other.sample((5,))
    close(mine.log_prob(x.numpy()), other.log_prob(x), "log_prob")
    compared = 1
    p = torch.tensor(np.random.default_rng(2).uniform(0.1, 0.9, (5, *mine.batch_shape)))
    for what, asked in {
        **dict.fromkeys(("mean", "variance", "stddev", "mode"), lambda it, key: getattr(it, key)),
        "entropy": lambda it, key: it.entropy(),
        "cdf": lambda it, key: it.cdf(x if isinstance(it, T.Distribution) else x.numpy()),
        "icdf": lambda it, key: it.icdf(p if isinstance(it, T.Distribution) else p.numpy()),
    }.items():
        try:
            expected = asked(other, what)
        except (NotImplementedError, AttributeError):
            continue
        # PyTorch sums the entropy of a Multinomial over numbers of float32.
        close(asked(mine, what), expected, what, 1e-6 if name == "Multinomial" else 1e-9)
        compared += 1
    assert compared >= 4 or name.startswith("Relaxed"), compared


@every
def test_gradients_of_log_prob(name: str) -> None:
    """With respect to each parameter, through a compiled function too."""
    other = theirs(name)
    torch.manual_seed(1)
    x = other.sample((5,))
    keys = [k for k, v in CASES[name].items() if isinstance(v, np.ndarray) and k != "total_count"]
    held = {k: v for k, v in CASES[name].items() if k not in keys}
    values = [CASES[name][k] for k in keys]

    def total(*parameters):
        given = dict(zip(keys, parameters, strict=True)) | held
        return getattr(d, name)(**given).log_prob(x.numpy().astype(np.float32)).sum()

    leaves = [torch.tensor(v, requires_grad=True) for v in values]
    given = dict(zip(keys, leaves, strict=True)) | {
        k: torch.tensor(v) if isinstance(v, np.ndarray) else v for k, v in held.items()
    }
    getattr(T, name)(**given, validate_args=False).log_prob(x).sum().backward()
    gradient = td.grad(total, tuple(range(len(keys))))
    narrow = [v.astype(np.float32) for v in values]
    found = gradient(*(td.tensor(v) for v in narrow))
    compiled = td.compile(gradient, *(td.Spec(v.shape) for v in narrow), device="cpu")(*narrow)
    for key, eager, native, leaf in zip(keys, found, compiled, leaves, strict=True):
        expected = leaf.grad.numpy()
        if key == "covariance_matrix":  # only the symmetric part has a meaning
            expected, eager, native = (a + a.T for a in (expected, eager.numpy(), native))
        else:
            eager = eager.numpy()
        scale = np.abs(expected).max() + 1
        np.testing.assert_allclose(eager, expected, rtol=1e-4, atol=2e-5 * scale, err_msg=key)
        np.testing.assert_allclose(native, expected, rtol=1e-3, atol=1e-4 * scale, err_msg=key)


PAIRS = [
    ("Normal", "Normal"), ("Laplace", "Laplace"), ("Exponential", "Exponential"),
    ("Gumbel", "Gumbel"), ("HalfNormal", "HalfNormal"), ("LogNormal", "LogNormal"),
    ("Uniform", "Uniform"), ("Uniform", "Normal"), ("Pareto", "Pareto"), ("Gamma", "Gamma"),
    ("Exponential", "Gamma"), ("Gamma", "Exponential"), ("Chi2", "Gamma"), ("Beta", "Beta"),
    ("Dirichlet", "Dirichlet"), ("Bernoulli", "Bernoulli"), ("Geometric", "Geometric"),
    ("Binomial", "Binomial"), ("Poisson", "Poisson"), ("Categorical", "Categorical"),
    ("OneHotCategorical", "OneHotCategorical"), ("MultivariateNormal", "MultivariateNormal"),
]  # fmt: skip


def others(name: str) -> dict[str, np.ndarray]:
    """Parameters of the same shapes, and other values."""
    given = dict(CASES[name])
    for key, value in given.items():
        if key == "probs":
            given[key] = value[..., ::-1].copy() if value.sum(-1).max() < 1 + 1e-9 else value * 0.8
        elif key == "covariance_matrix":
            given[key] = value + np.eye(3)
        elif key == "low":
            given[key] = value - 2
        elif key == "high":
            given[key] = value + 2
        elif key != "total_count":
            given[key] = value * 0.9 + 0.05
    return given


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_divergences(first: str, second: str) -> None:
    q = others(second)
    found = d.kl_divergence(ours(first), ours(second, q))
    expected = T.kl_divergence(theirs(first), theirs(second, q))
    close(found, expected, f"{first} {second}")
    assert (found.numpy() > 0).all()


def test_a_divergence_without_a_formula() -> None:
    with pytest.raises(NotImplementedError, match=r"Cauchy and Normal.*Estimate it by"):
        d.kl_divergence(ours("Cauchy"), ours("Normal"))


# Samples: each marginal against its distribution function, one compiled program a distribution.

DRAWS = 4000
SCIPY = {
    "Normal": lambda k: stats.norm(k["loc"], k["scale"]),
    "Laplace": lambda k: stats.laplace(k["loc"], k["scale"]),
    "Cauchy": lambda k: stats.cauchy(k["loc"], k["scale"]),
    "Gumbel": lambda k: stats.gumbel_r(k["loc"], k["scale"]),
    "StudentT": lambda k: stats.t(k["df"], k["loc"], k["scale"]),
    "Uniform": lambda k: stats.uniform(k["low"], k["high"] - k["low"]),
    "Exponential": lambda k: stats.expon(scale=1 / k["rate"]),
    "HalfNormal": lambda k: stats.halfnorm(scale=k["scale"]),
    "HalfCauchy": lambda k: stats.halfcauchy(scale=k["scale"]),
    "LogNormal": lambda k: stats.lognorm(k["scale"], scale=np.exp(k["loc"])),
    "Weibull": lambda k: stats.weibull_min(k["concentration"], scale=k["scale"]),
    "Pareto": lambda k: stats.pareto(k["alpha"], scale=k["scale"]),
    "Gamma": lambda k: stats.gamma(k["concentration"], scale=1 / k["rate"]),
    "Chi2": lambda k: stats.chi2(k["df"]),
    "InverseGamma": lambda k: stats.invgamma(k["concentration"], scale=k["rate"]),
    "Beta": lambda k: stats.beta(k["concentration1"], k["concentration0"]),
    "Bernoulli": lambda k: stats.bernoulli(k["probs"]),
    "Geometric": lambda k: stats.geom(k["probs"], loc=-1),
    "Binomial": lambda k: stats.binom(k["total_count"], k["probs"]),
    "NegativeBinomial": lambda k: stats.nbinom(k["total_count"], 1 - k["probs"]),
    "Poisson": lambda k: stats.poisson(k["rate"]),
}


def drawn(name: str, given: dict | None = None, seed: int = 0) -> np.ndarray:
    given = CASES[name] if given is None else given
    arrays = {k: v.astype(np.float32) for k, v in given.items() if isinstance(v, np.ndarray)}
    held = {k: v for k, v in given.items() if k == "total_count"}
    arrays = {k: v for k, v in arrays.items() if k not in held}

    def sample(*values):
        return getattr(d, name)(**held, **dict(zip(arrays, values, strict=True))).sample((DRAWS,))

    specs = [td.Spec(v.shape) for v in arrays.values()]
    program = td.compile(sample, *specs, device="cpu", seed=seed)
    return program(*arrays.values()).astype(np.float64)


SLOW = {"NegativeBinomial", "Beta", "InverseGamma", "Chi2", "StudentT", "Dirichlet", "Weibull"}


def some_slow(names) -> list[object]:
    """Names as parameters; those whose programs take long to compile are slow tests."""
    return [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in names]


@pytest.mark.parametrize("name", some_slow(SCIPY))
def test_samples_follow_their_distribution(name: str) -> None:
    """The largest distance between the two distribution functions, at a level of 1e-5."""
    samples = drawn(name)
    assert samples.shape == (DRAWS, 3)
    limit = math.sqrt(math.log(2 / 1e-5) / (2 * DRAWS))
    for column in range(3):
        one = SCIPY[name]({k: np.asarray(v)[column] for k, v in CASES[name].items()})
        x = np.sort(samples[:, column])
        above = np.searchsorted(x, x, "right") / DRAWS
        assert np.abs(one.cdf(x) - above).max() < limit + 1 / DRAWS
        assert np.isfinite(x).all()


@pytest.mark.parametrize("concentration", [0.02, 0.5, 1.0, 60.0, 3000.0])
def test_gamma_samples_of_any_shape(concentration: float) -> None:
    samples = drawn("Gamma", {"concentration": np.full(1, concentration), "rate": np.ones(1)})
    limit = math.sqrt(math.log(2 / 1e-5) / (2 * DRAWS))
    x = np.sort(samples[:, 0])
    above = np.searchsorted(x, x, "right") / DRAWS
    is_normal = x > 1e-37  # smaller ones are raised to the least float32
    distance = np.abs(stats.gamma(concentration).cdf(x) - above)[is_normal]
    assert distance.max() < limit + 1 / DRAWS
    assert (x > 0).all()


@pytest.mark.parametrize(
    "name", ["Dirichlet", "OneHotCategorical", "Multinomial", "MultivariateNormal"]
)
def test_means_of_vectors(name: str) -> None:
    samples, mine = drawn(name), ours(name)
    error = np.abs(samples.mean(0) - mine.mean.numpy())
    spread = np.sqrt(mine.variance.numpy() / DRAWS)
    assert (error < 5 * spread).all()
    if name == "MultivariateNormal":
        expected = CASES[name]["covariance_matrix"]
        assert np.abs(np.cov(samples.T) - expected).max() < 0.15 * np.abs(expected).max()


def test_categories_are_drawn_as_often_as_they_should() -> None:
    samples = drawn("Categorical")
    probs = ours("Categorical").probs.numpy()
    for row in range(2):
        counts = np.bincount(samples[:, row].astype(int), minlength=4)
        assert stats.chisquare(counts, probs[row] * DRAWS).pvalue > 1e-5


def exact_slope(alpha: float, x: float) -> float:
    """−(∂P(α, x)/∂α) / density with 40 digits."""
    with mpmath.workdps(40):
        a, at, h = mpmath.mpf(alpha), mpmath.mpf(x), mpmath.mpf(10) ** -12

        def below(shape):
            return mpmath.gammainc(shape, 0, at, regularized=True)

        change = (below(a + h) - below(a - h)) / (2 * h)
        return float(-change / (mpmath.exp(-at) * at ** (a - 1) / mpmath.gamma(a)))


@pytest.mark.parametrize("alpha", [0.05, 0.9, 1.0, 4.0, 19.0, 99.0, 101.0, 300.0])
def test_gradients_of_gamma_samples(alpha: float) -> None:
    x = stats.gamma(alpha).ppf([0.001, 0.1, 0.5, 0.9, 0.999])
    found = _slope(td.tensor(np.full(5, alpha)), td.tensor(x)).numpy()
    expected = [exact_slope(alpha, value) for value in x]
    np.testing.assert_allclose(found, expected, rtol=3e-4 if alpha > 100 else 1e-6)


@pytest.mark.parametrize(
    "name", some_slow(["Gamma", "Beta", "Dirichlet", "StudentT", "Normal", "Weibull", "Gumbel"])
)
def test_gradients_of_samples(name: str) -> None:
    """The mean of x² by samples with gradients, against the derivative of its closed form."""
    given = {k: v.astype(np.float32) for k, v in CASES[name].items()}
    if name == "StudentT":
        given["df"] = given["df"] + 6

    def second_moment(*values):
        mine = getattr(d, name)(**dict(zip(given, values, strict=True)))
        return mine.variance.sum() + (mine.mean * mine.mean).sum()

    def by_samples(*values):
        x = getattr(d, name)(**dict(zip(given, values, strict=True))).rsample((20000,))
        return (x * x).mean(0).sum()

    which = tuple(range(len(given)))
    specs = [td.Spec(v.shape) for v in given.values()]
    found = td.compile(td.grad(by_samples, which), *specs, device="cpu")(*given.values())
    exact = td.grad(second_moment, which)(*(td.tensor(v) for v in given.values()))
    for key, estimate, value in zip(given, found, exact, strict=True):
        expected = value.numpy()
        scale = np.abs(expected).max() + 0.05
        np.testing.assert_allclose(estimate, expected, atol=0.12 * scale, err_msg=key)


# Compounds and transforms.


def test_mixtures_beside_pytorch() -> None:
    weights, loc, scale = simplex(4), real(2, 4), positive(2, 4)
    mine = d.MixtureSameFamily(d.Categorical(td.tensor(weights)), d.Normal(loc, scale))
    other = T.MixtureSameFamily(
        T.Categorical(torch.tensor(weights)), T.Normal(torch.tensor(loc), torch.tensor(scale))
    )
    x = real(5, 2)
    close(mine.log_prob(x), other.log_prob(torch.tensor(x)), "log_prob")
    close(mine.cdf(x), other.cdf(torch.tensor(x)), "cdf")
    close(mine.mean, other.mean, "mean")
    close(mine.variance, other.variance, "variance")

    program = td.compile(lambda w: d.MixtureSameFamily(
        d.Categorical(w), d.Normal(loc.astype(np.float32), scale.astype(np.float32))
    ).sample((DRAWS,)), td.Spec((4,)), device="cpu")  # fmt: skip
    samples = program(weights.astype(np.float32))
    spread = np.sqrt(mine.variance.numpy() / DRAWS)
    assert (np.abs(samples.mean(0) - mine.mean.numpy()) < 5 * spread).all()


def test_mixtures_of_vectors_beside_pytorch() -> None:
    weights, loc, scale = simplex(3, 4), real(3, 4, 2), positive(3, 4, 2)
    mine = d.MixtureSameFamily(
        d.Categorical(td.tensor(weights)), d.Independent(d.Normal(loc, scale), 1)
    )
    other = T.MixtureSameFamily(
        T.Categorical(torch.tensor(weights)),
        T.Independent(T.Normal(torch.tensor(loc), torch.tensor(scale)), 1),
    )
    x = real(5, 3, 2)
    close(mine.log_prob(x), other.log_prob(torch.tensor(x)), "log_prob")
    close(mine.mean, other.mean, "mean")
    close(mine.variance, other.variance, "variance")
    assert mine.sample((7,)).shape == (7, 3, 2)


def test_independent_beside_pytorch() -> None:
    loc, scale = real(2, 3, 4), positive(2, 3, 4)
    mine = d.Independent(d.Normal(loc, scale), 2)
    other = T.Independent(T.Normal(torch.tensor(loc), torch.tensor(scale)), 2)
    x = real(2, 3, 4)
    close(mine.log_prob(x), other.log_prob(torch.tensor(x)), "log_prob")
    close(mine.entropy(), other.entropy(), "entropy")
    close(d.kl_divergence(mine, d.Independent(d.Normal(0.0, np.ones((2, 3, 4))), 2)),
          T.kl_divergence(other, T.Independent(T.Normal(torch.zeros(2, 3, 4).double(), 1.0), 2)), "kl")  # fmt: skip


TRANSFORMS = {
    "ExpTransform": (), "SigmoidTransform": (), "TanhTransform": (), "SoftplusTransform": (),
    "AffineTransform": (0.5, -2.0), "PowerTransform": (2.5,),
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_beside_pytorch(name: str) -> None:
    arguments = TRANSFORMS[name]
    mine = getattr(d, name)(*arguments)
    given = [torch.tensor(a, dtype=torch.float64) for a in arguments]
    other = getattr(T.transforms, name)(*given)
    x = positive(6) if name == "PowerTransform" else real(6)
    at = torch.tensor(x)
    y = other(at)
    close(mine(x), y, "forward")
    close(mine.inv(y.numpy()), at, "inverse", 1e-8)
    close(mine.log_abs_det_jacobian(x, y.numpy()), other.log_abs_det_jacobian(at, y), "slope")
    base = ours("LogNormal") if name == "PowerTransform" else ours("Normal")
    torch_base = theirs("LogNormal") if name == "PowerTransform" else theirs("Normal")
    value = other(torch.tensor(positive(3) * 0.3))
    close(
        d.TransformedDistribution(base, [mine]).log_prob(value.numpy()),
        T.TransformedDistribution(torch_base, [other]).log_prob(value), "log_prob", 1e-8,
    )  # fmt: skip
    close(
        d.TransformedDistribution(base, mine).cdf(value.numpy()),
        T.TransformedDistribution(torch_base, [other]).cdf(value), "cdf", 1e-8,
    )  # fmt: skip


def test_the_logistic_distribution() -> None:
    mine = d.Logistic(td.tensor([0.5]), td.tensor([2.0]))
    other = stats.logistic(0.5, 2.0)
    x = np.array([-3.0, 0.2, 5.0])
    np.testing.assert_allclose(mine.log_prob(x).numpy(), other.logpdf(x), rtol=1e-6)
    np.testing.assert_allclose(mine.cdf(x).numpy(), other.cdf(x), rtol=1e-6)
    np.testing.assert_allclose(mine.entropy().numpy(), other.entropy(), rtol=1e-6)


# In programs, and what is refused.


def test_a_policy_gradient_in_a_step() -> None:
    """A Categorical and a Normal inside a compiled training step."""

    def loss(model, batch):
        logits, mean = model["logits"], model["mean"]
        choice = d.Categorical(logits=logits)
        action = choice.sample((64,))
        reward = td.where(action == 2, 1.0, 0.0)
        point = d.Normal(mean, 0.3).rsample((64,))
        return -(choice.log_prob(action) * reward).mean() + ((point - batch) ** 2).mean()

    model = {"logits": nn.Parameter((4,)), "mean": nn.Parameter((1,))}
    step = td.compile_step(model, loss, optim.adam(0.1), td.Spec((1,)))
    for _ in range(60):
        step(np.array([1.5], np.float32))
    assert step.params["logits"].argmax() == 2
    assert abs(step.params["mean"][0] - 1.5) < 0.2


def test_samples_are_the_same_cold_and_warm() -> None:
    first, second, other = (drawn("Gamma", seed=seed) for seed in (3, 3, 4))
    np.testing.assert_array_equal(first, second)
    assert (first != other).any()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: d.Normal(0.0, -1.0), r"Normal: scale = -1.0. It must be positive"),
        (lambda: d.Normal(math.nan, 1.0), r"loc = nan. It must be finite"),
        (lambda: d.Bernoulli(), "neither of probs and logits"),
        (lambda: d.Bernoulli(0.5, 0.0), "both of probs and logits"),
        (lambda: d.Bernoulli(1.5), r"probs = 1.5. It must be between 0 and 1"),
        (lambda: d.Normal(np.zeros(3), np.ones(4)), r"loc \(3,\), scale \(4,\)"),
        (lambda: d.Uniform(1.0, 0.0), r"high - low = -1.0"),
        (lambda: d.Dirichlet(1.0), "Give a vector"),
        (lambda: d.Poisson(3.0).log_prob(1.5), r"value = 1.5. It must be a whole number"),
        (lambda: d.Gamma(1.0, 1.0).log_prob(-1.0), r"value = -1.0. It must be positive"),
        (lambda: d.Categorical(np.ones(3)).log_prob(3), "There are 3 classes"),
        (lambda: d.MultivariateNormal(np.zeros(2)), "Give one"),
        (lambda: d.MultivariateNormal(np.zeros(2), np.eye(3)), "square matrix"),
        (lambda: d.Independent(d.Normal(0.0, 1.0), 1), "reinterpreted_batch_ndims = 1"),
        (lambda: d.Normal(np.zeros(3), 1.0).log_prob(np.zeros(2)), "Give shapes that broadcast"),
        (lambda: d.MixtureSameFamily(d.Normal(0.0, 1.0), d.Normal(0.0, 1.0)), "Categorical"),
    ],
)
def test_wrong_arguments_are_refused(make, message: str) -> None:
    with pytest.raises(td.TreadleError, match=message):
        make()


def test_what_a_distribution_has_not_is_named() -> None:
    with pytest.raises(NotImplementedError, match=r"Poisson has no rsample. Use sample"):
        d.Poisson(3.0).rsample()
    with pytest.raises(NotImplementedError, match=r"StudentT has no cdf"):
        d.StudentT(3.0).cdf(1.0)


def test_a_variational_autoencoder_trains() -> None:
    """The divergence and the reparameterised sample in one loss, as examples of PyTorch have it."""
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(64, 2)) @ rng.normal(size=(2, 6))).astype(np.float32)

    class VAE(nn.Module):
        def __init__(self):
            self.encoder, self.decoder = nn.Linear(6, 4), nn.Linear(2, 6)

        def forward(self, x):
            mean, log_scale = self.encoder(x).chunk(2, -1)
            posterior = d.Normal(mean, td.exp(log_scale))
            return posterior, self.decoder(posterior.rsample())

    def loss(model, x):
        posterior, output = model(x)
        divergence = d.kl_divergence(posterior, d.Normal(0.0, 1.0)).sum(-1).mean()
        return losses.mse(output, x) * 6 + 0.01 * divergence

    step = td.compile_step(VAE(), loss, optim.adam(0.02), td.Spec((64, 6)))
    first = step(x).loss
    for _ in range(150):
        last = step(x).loss
    assert last < 0.2 * first
