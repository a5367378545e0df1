"""Right programs that full verification and the checker accept: kernels and graphs of forms that are
rare, and were refused once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import treadle as td
from derived_gradients import compare_gradients
from treadle import losses, nn, optim
from treadle.autodiff.backward import differentiate
from treadle.base.errors import GraphError
from treadle.ir.graph import Graph
from treadle_checker.certificate import check_bytes

FULL = td.CompileOptions(verify="full")


class Function(nn.Module):
    """A loss of one parameter."""

    def __init__(self, loss: Callable[..., td.Tensor], shape: tuple[int, ...]):
        self.weight = nn.Parameter(shape, nn.init.normal(0.0, 1.0))
        self.loss = loss

    def forward(self, *inputs: td.Tensor) -> td.Tensor:
        return self.loss(self.weight, *inputs)


def accepted(
    model: nn.Module, batch: dict[str, td.Spec], optimizer: optim.Optimizer | None = None
) -> None:
    step = td.compile_step(
        model,
        lambda m, b: m(*b.values()),
        optimizer or optim.sgd(0.1),
        batch,
        device="cpu",
        options=FULL,
    )
    report = check_bytes(step.certificate.to_bytes())
    assert report.exit_code == 0, str(report)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_few_random_numbers(count: int) -> None:
    """Random bits come in blocks of four."""
    accepted(Function(lambda w: (w * td.random.uniform((count,))).sum(), (count,)), {})


@pytest.mark.parametrize(
    ("loss", "shape"),
    [
        (lambda w: td.abs(w).max(0).mean(), (5, 4)),
        (lambda w: td.abs(w - w.T).max(0).mean(), (5, 5)),
        (lambda w: (w - td.log(td.abs(w) + 0.1)).max(1).mean(), (5, 4)),
    ],
    ids=["abs", "of differences", "log of abs"],
)
def test_gradients_of_maxima_of_what_is_made_by_comparing(
    loss: Callable[..., td.Tensor], shape: tuple[int, ...]
) -> None:
    accepted(Function(loss, shape), {})


def test_a_wrong_gradient_of_such_a_maximum_is_refused() -> None:
    from treadle.ir.ops.elementwise import EQ, LE, NEG, SIGN

    loss = td.trace(lambda w: td.abs(w).max(0).mean() + (w * 2).sum(), td.Spec((5, 4)))
    both = differentiate(loss, list(loss.leaves)).graph
    compare_gradients(loss, both)
    # The derivative of the absolute value is the sign; of the maximum, where it is reached.
    for op, wrong in ((SIGN, NEG), (EQ, LE)):
        at = next(i for i, node in enumerate(both.nodes) if node.op is op)
        node = both.nodes[at]
        new = type(node)(wrong, node.attributes, node.operands, node.types, node.origin)
        nodes = (*both.nodes[:at], new, *both.nodes[at + 1 :])
        with pytest.raises(GraphError, match="gradients that are not those of the loss"):
            compare_gradients(loss, Graph(nodes, both.outputs, both.name))


def test_a_cross_entropy_of_one_class() -> None:
    """Nothing reads an index along an axis of one element, and it is 0 all the same."""
    model = Function(lambda w, y: losses.cross_entropy(w, y), (12, 1))
    accepted(model, {"y": td.Spec((12,), td.int32)})


class Remembers(nn.Module):
    """States that become a batch, another state and a number."""

    def __init__(self) -> None:
        self.linear = nn.Linear(4, 3)
        self.last, self.older, self.scale = nn.State((6, 4)), nn.State((6, 4)), nn.State(())

    def forward(self, x: td.Tensor) -> td.Tensor:
        y = self.linear(x + self.last - self.older) * (self.scale + 1)
        td.update(self.older, self.last)
        td.update(self.last, x)
        td.update(self.scale, td.ones(()))
        return (y**2).mean()


def test_states_that_become_what_is_given() -> None:
    accepted(Remembers(), {"x": td.Spec((6, 4))})
    accepted(Remembers(), {"x": td.Spec((6, 4))}, optim.schedule_free_adamw(0.01))


def test_the_gradient_of_the_smallest_batch_of_the_same_form() -> None:
    """The variance of two rows is of another form than that of three."""

    class Variance(nn.Module):
        def __init__(self) -> None:
            self.norm = nn.RMSNorm(65, eps=1e-2)

        def forward(self, x: td.Tensor) -> td.Tensor:
            return td.var(self.norm(x), 0, 0).mean()

    accepted(Variance(), {"x": td.Spec((3, 65))})


class Nothing(nn.Module):
    """For functions without parameters."""


def of_function(function: Callable[..., object], *specs: td.Spec) -> None:
    compiled = td.compile_forward(
        Nothing(), lambda m, given: function(*given), list(specs), device="cpu", options=FULL
    )
    report = check_bytes(compiled.certificate.to_bytes())
    assert report.exit_code == 0, str(report)


@pytest.mark.parametrize("dtype", [td.bfloat16, td.float16, td.float32], ids=str)
def test_gradients_of_attention_read_weights_and_compute_them(dtype: td.DType) -> None:
    """Those of the values read the rounded weights, those of the scores make them anew."""

    def slopes(q, k, v, w):
        def total(q, k, v):
            return (td.cast(td.attention(q, k, v, causal=False), td.float32) * w).sum()

        return td.grad(total, (0, 1, 2))(q, k, v)

    given = td.Spec((2, 2, 17, 64), dtype)
    of_function(slopes, given, given, given, td.Spec((2, 2, 17, 64)))


def test_what_is_given_and_computed_too() -> None:
    """The hyperbolic tangent of the exponents is in memory, and is made once more."""

    def slopes(x, y, a, b):
        def total(x, y):
            v = td.pow(1.5 + td.tanh(x), td.tanh(y))[::5] * 2
            return (v * a).sum() + (td.tanh(x) * td.sigmoid(x) * b).sum()

        return td.grad(total, (0, 1))(x, y)

    whole = td.Spec((15, 15, 31))
    of_function(slopes, whole, td.Spec((15, 1, 31)), td.Spec((3, 15, 31)), whole)


def test_the_programs_are_right() -> None:
    """What is accepted here is what the oracle says."""
    rng = np.random.default_rng(0)
    batches = [{"x": rng.normal(size=(6, 4)).astype(np.float32)} for _ in range(4)]
    found = []
    for device in ("cpu", "oracle"):
        step = td.compile_step(
            Remembers(), lambda m, b: m(b["x"]), optim.sgd(0.1), batches[0], device=device
        )
        found.append([float(step(batch).loss) for batch in batches])
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)
