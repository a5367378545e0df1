"""What the tests of sizes share: how many features and rows, compiled together, and how near to be.

Few features fill no vector and a batch of rows fills many, with a rest: the shapes of small problems,
where a reduction's loop is short and the loop around it is what becomes lanes. All sizes of one case
are compiled as one program, since most of the time is the compiler's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

import treadle as td
from treadle.base import trees

FEATURES = (2, 3, 5, 6, 7)
BATCHES = (7, 64, 257)
SIZES = [(features, batch) for features in FEATURES for batch in BATCHES]
# Every number of features and of rows: where a matrix is no more than its elements.
SOME = [(2, 257), (3, 64), (5, 7), (6, 257), (7, 64)]
# What most programs are compiled for by default: every number of features beside many rows or few.
# All of SIZES are compiled by slow tests.
MOST = [*SOME, (2, 7), (3, 257), (7, 257)]
DEVICE = "cpu"
TOLERANCE = 2e-5  # of an array's greatest element: sums of 257 float32 terms and what follows


def options() -> td.CompileOptions:
    """How every program of these tests is compiled."""
    return td.CompileOptions()


def compiled(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function of trees of arrays as a native program, and what it gives for them."""
    specs = trees.map_leaves(spec_of, list(arguments))
    return td.compile(function, *specs, device=DEVICE, options=options())(*arguments)


def spec_of(array: np.ndarray) -> td.Spec:
    kinds = {"i": td.int32, "u": td.int32, "b": td.bool_}
    return td.Spec(array.shape, kinds.get(array.dtype.kind, td.float32))


def rounded(array: np.ndarray) -> np.ndarray:
    """A float64 array of float32 values: both sides compute from the same numbers."""
    return array.astype(np.float32).astype(np.float64) if array.dtype.kind == "f" else array


def assert_near(ours: Any, theirs: Any, what: str, tolerance: float = TOLERANCE) -> None:
    """Ours is float32; theirs is the same computation in float64."""
    found, expected = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    assert found.shape == expected.shape, what
    scale = max(1.0, float(np.abs(expected[np.isfinite(expected)]).max(initial=0)))
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * scale, err_msg=what)


Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Problem:
    """A function of floats, which have gradients, and of constants; and PyTorch's of the same.

    Both take two dicts of tensors by name and give a tensor or a tree of them.
    """

    ours: Callable[..., Any]
    theirs: Callable[..., Any]
    floats: Arrays
    constants: Arrays = field(default_factory=dict)


class Reference(NamedTuple):
    values: list[np.ndarray]
    cotangents: list[np.ndarray]
    gradients: Arrays


def reference(problem: Problem) -> Reference:
    """Results and gradients by PyTorch, in float64; zeros where nothing depends."""
    floats = {n: torch.tensor(a, requires_grad=True) for n, a in problem.floats.items()}
    constants = {n: torch.as_tensor(a) for n, a in problem.constants.items()}
    results = trees.flatten(problem.theirs(floats, constants))[0]
    rng = np.random.default_rng(2)
    cotangents = [rounded(rng.standard_normal(tuple(r.shape))) for r in results]
    found = torch.autograd.grad(
        results, list(floats.values()), [torch.as_tensor(c) for c in cotangents], allow_unused=True
    )
    gradients = {
        n: np.zeros(a.shape) if g is None else g.numpy()
        for (n, a), g in zip(problem.floats.items(), found, strict=True)
    }
    return Reference([r.detach().numpy() for r in results], cotangents, gradients)


def check(problems: dict[str, Problem], tolerance: float = TOLERANCE) -> None:
    """The problems' values, by a program of them alone, and by one of them and their gradients.

    What is computed for its own sake is scheduled in another way than what a gradient uses again.
    """
    given = list(problems.values())
    references = [reference(p) for p in given]
    floats, constants = [p.floats for p in given], [p.constants for p in given]

    def forward(floats: list[Any], constants: list[Any]) -> Any:
        called = (p.ours(*each) for p, *each in zip(given, floats, constants, strict=True))
        return [trees.flatten(result)[0] for result in called]

    def together(floats: list[Any], constants: list[Any], cotangents: list[Any]) -> Any:
        return [
            values_and_gradients(p.ours, *each)
            for p, *each in zip(given, floats, constants, cotangents, strict=True)
        ]

    alone = compiled(forward, floats, constants)
    found = compiled(together, floats, constants, [r.cotangents for r in references])
    for name, values, pair, expected in zip(problems, alone, found, references, strict=True):
        assert_all_near(values, expected, f"{name}: alone", tolerance)
        assert_all_near(pair[0], expected, name, tolerance)
        assert pair[1].keys() == expected.gradients.keys()
        for n, a in pair[1].items():
            assert_near(a, expected.gradients[n], f"{name}: gradient of {n}", tolerance)


def check_exactly(problems: dict[str, Problem]) -> None:
    """The problems' values and gradients at once, by the oracle in float64: no compiler runs."""
    for name, problem in problems.items():
        expected = reference(problem)
        given = [trees.map_leaves(td.tensor, a) for a in (problem.floats, problem.constants)]
        values, gradients = values_and_gradients(
            problem.ours, *given, [td.tensor(c) for c in expected.cotangents]
        )
        found = [*values, *gradients.values()]
        wanted = [*expected.values, *(expected.gradients[n] for n in gradients)]
        for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
            scale = max(1.0, float(np.abs(b).max(initial=0)))
            np.testing.assert_allclose(
                a.numpy(), b, rtol=0, atol=1e-9 * scale, err_msg=f"{name}: {i}"
            )


def assert_all_near(
    values: list[Any], expected: Reference, name: str, tolerance: float = TOLERANCE
) -> None:
    for i, (a, b) in enumerate(zip(values, expected.values, strict=True)):
        assert_near(a, b, f"{name}: result {i}", tolerance)


def values_and_gradients(
    function: Callable[..., Any], floats: Any, constants: Any, cotangents: list[Any]
) -> tuple[list[Any], dict[str, Any]]:
    result, pull = td.vjp(lambda floats: function(floats, constants), floats)
    values, structure = trees.flatten(result)
    (gradients,) = pull(structure.rebuild(cotangents))
    return values, gradients


def every_size(
    *makes: Callable[[int, int], Problem], sizes: Sequence[tuple[int, int]] = MOST
) -> None:
    """What each makes for each number of features and rows, compared with PyTorch."""
    numbered = [(i, make, f, n) for i, make in enumerate(makes) for f, n in sizes]
    check({f"{i}: {f} features, batch {n}": make(f, n) for i, make, f, n in numbered})
