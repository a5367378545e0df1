"""Linear algebra beside PyTorch's: values and gradients, natively; edges; sizes of programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import treadle as td
from refusals import refused
from sizes import TOLERANCE, Problem, check, check_exactly, compiled, rounded
from treadle.backends.registry import backend

Function = Callable[..., Any]


def normal(*shape: int, seed: int = 8) -> np.ndarray:
    """The same for a shape, whatever was drawn before."""
    return rounded(np.random.default_rng((seed, *shape)).standard_normal(shape))


def regular(*shape: int) -> np.ndarray:
    """Square and far from singular, with pivots that are not on the diagonal."""
    n = shape[-1]
    found = 0.3 * normal(*shape) / np.sqrt(n) + np.eye(n)[np.roll(np.arange(n), 1)]
    return rounded(found)


def definite(*shape: int) -> np.ndarray:
    half = normal(*shape)
    return rounded(half @ np.swapaxes(half, -1, -2) / shape[-1] + np.eye(shape[-1]))


def apart(m: int, n: int, *batch: int) -> np.ndarray:
    """(m, n) with singular values that differ: gradients of vectors divide by the differences."""
    k = min(m, n)
    u, v = (np.linalg.qr(normal(*batch, s, k, seed=i))[0] for i, s in enumerate((m, n)))
    return rounded((u * (1 + np.arange(k))) @ np.swapaxes(v, -1, -2) / k)


def spaced(*shape: int) -> np.ndarray:
    """Symmetric, with eigenvalues that differ."""
    n, basis = shape[-1], np.linalg.qr(normal(*shape))[0]
    return rounded((basis * (np.arange(n) - n / 3)) @ np.swapaxes(basis, -1, -2) / n)


# What both sides compute, from a module and its tensors. Vectors have no sign of their own.


def of_eigh(lib: Any, a: Any) -> Any:
    both = lib.eigh((a + a.mT if isinstance(a, torch.Tensor) else a + td.transpose(a, -2, -1)) / 2)
    return [both[0], both[1] * both[1], both[1][..., :1] * both[1][..., :1, :1]]


def of_svd(lib: Any, a: Any) -> Any:
    u, s, vh = lib.svd(a, full_matrices=False)
    return [s, u * u, vh * vh, u[..., :1] * vh[..., :1, :]]


def of_full_svd(lib: Any, a: Any) -> Any:
    u, s, vh = lib.svd(a)
    k = s.shape[-1]
    return [s, u[..., :k] ** 2, vh[..., :k, :] ** 2]


FUNCTIONS: dict[str, tuple[Function, Function]] = {
    "cholesky": (lambda lib, a: lib.cholesky(a), definite),
    "upper cholesky": (lambda lib, a: lib.cholesky(a, upper=True), definite),
    "inv": (lambda lib, a: lib.inv(a), regular),
    "det": (lambda lib, a: lib.det(a), regular),
    "slogdet": (lambda lib, a: lib.slogdet(a)[1], regular),
    "lu": (lambda lib, a: list(lib.lu(a))[1:], regular),
    "qr": (lambda lib, a: list(lib.qr(a)), regular),
    "eigh": (of_eigh, spaced),
    "eigvalsh": (lambda lib, a: lib.eigvalsh(a), spaced),
    "svd": (of_svd, lambda *s: apart(s[-1], s[-1], *s[:-2])),
    "pinv": (lambda lib, a: lib.pinv(a), regular),
}
TALL: dict[str, Function] = {
    "qr": lambda lib, a: list(lib.qr(a)),
    "svd": of_svd,
    "full svd": of_full_svd,
    "pinv": lambda lib, a: lib.pinv(a),
    **{
        f"norm {order}": lambda lib, a, o=order: lib.matrix_norm(a, o)
        for order in ("fro", "nuc", 1, -1, 2, -2, np.inf, -np.inf)
    },
}
SYSTEMS: dict[str, Function] = {
    "solve": lambda lib, a, b: lib.solve(a, b),
    "from the right": lambda lib, a, b: lib.solve(a, b.mT if lib is torch.linalg else td.transpose(b, -2, -1), left=False),
    "lower": lambda lib, a, b: lib.solve_triangular(a, b, upper=False),
    "upper, ones": lambda lib, a, b: lib.solve_triangular(a, b, upper=True, unitriangular=True),
    "lstsq": lambda lib, a, b: lib.lstsq(a, b)[0],
}  # fmt: skip


def problem(function: Function, *arrays: np.ndarray) -> Problem:
    names = {f"x{i}": a for i, a in enumerate(arrays)}
    return Problem(
        lambda given, _: function(td.linalg, *(given[n] for n in names)),
        lambda given, _: function(torch.linalg, *(given[n] for n in names)),
        names,
    )


def of_squares(name: str, sizes: list[tuple[int, ...]]) -> dict[str, Problem]:
    function, draw = FUNCTIONS[name]
    return {f"{name} {s}": problem(function, draw(*s)) for s in sizes}


def of_others(name: str, sizes: list[tuple[int, int]]) -> dict[str, Problem]:
    return {f"{name} {m}×{n}": problem(TALL[name], apart(m, n, 2)) for m, n in sizes}


def draw_of(draw: Function, shape: tuple[int, ...]) -> np.ndarray:
    return draw(*shape) if shape[-1] == shape[-2] else apart(*shape)


def of_systems(name: str, sizes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> dict[str, Any]:
    draw = definite if name in ("lower", "upper, ones") else regular
    if name == "lstsq":  # PyTorch's does not broadcast
        sizes = [(a, b) for a, b in sizes if a[:-2] == b[:-2]] + [
            ((5, 3), (5, 2)),
            ((2, 4), (2, 1)),
        ]
    return {
        f"{name} {a} {b}": problem(SYSTEMS[name], draw_of(draw, a), normal(*b)) for a, b in sizes
    }


SQUARES = [(1, 1), (2, 2), (2, 3, 3), (5, 5), (2, 1, 4, 4)]
LARGER = [(7, 7), (8, 8), (16, 16), (3, 17, 17), (33, 33)]
OTHERS = [(3, 1), (5, 3), (3, 5), (4, 4), (9, 2)]
WIDER = [(17, 8), (8, 17), (33, 5), (7, 16), (20, 19)]
RIGHT = [((1, 1), (1, 1)), ((3, 3), (3, 2)), ((2, 4, 4), (2, 4, 1)), ((5, 5), (2, 5, 3))]
RIGHT += [((2, 3, 3), (3, 4))]
LARGE = [((17, 17), (17, 3)), ((33, 33), (33, 5)), ((2, 8, 8), (2, 8, 16)), ((16, 16), (16, 17))]
LARGE += [((9, 9), (3, 9, 1))]


# The distances between eigenvalues, 1 / n of the greatest, divide roundings and gradients.
DIVIDED, CLOSE = ("eigh", "eigvalsh", "svd"), 2e-4


@pytest.mark.parametrize("name", FUNCTIONS)
def test_of_square_matrices(name: str) -> None:
    check_exactly(of_squares(name, SQUARES))


@pytest.mark.parametrize("name", TALL)
def test_of_other_matrices(name: str) -> None:
    check_exactly(of_others(name, OTHERS))


@pytest.mark.parametrize("name", SYSTEMS)
def test_systems(name: str) -> None:
    check_exactly(of_systems(name, RIGHT))


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_of_square_matrices_natively(name: str) -> None:
    check(of_squares(name, SQUARES + LARGER), CLOSE if name in DIVIDED else TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("name", TALL)
def test_of_other_matrices_natively(name: str) -> None:
    check(of_others(name, OTHERS + WIDER), CLOSE if "svd" in name else TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("name", SYSTEMS)
def test_systems_natively(name: str) -> None:
    check(of_systems(name, RIGHT + LARGE))


def test_some_natively() -> None:
    check(
        {
            **of_squares("cholesky", [(17, 17)]),
            **of_systems("solve", [((2, 7, 7), (2, 7, 3))]),
            **of_squares("eigh", [(2, 7, 7)]),
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FUNCTIONS, *SYSTEMS])
def test_float64_natively(name: str) -> None:
    function, draw = FUNCTIONS.get(name) or (SYSTEMS[name], regular)
    arrays = [draw(3, 9, 9)] + ([normal(3, 9, 2)] if name in SYSTEMS else [])
    specs = [td.Spec(a.shape, td.float64) for a in arrays]
    found = td.compile(lambda *xs: function(td.linalg, *xs), *specs, device="cpu")(*arrays)
    expected = function(torch.linalg, *map(torch.tensor, arrays))
    found, expected = (x if isinstance(x, list) else [x] for x in (found, expected))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b.numpy(), rtol=1e-10, atol=1e-10)


# Sizes


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_program_does_not_grow_with_its_matrices(name: str) -> None:
    function, _ = FUNCTIONS[name]

    def nodes(n: int) -> int:
        both = td.value_and_grad(lambda a: _total(function(td.linalg, a)))
        return len(td.trace(both, td.Spec((n, n))).nodes)

    # But for the gradient of a product, which is a tree, as of the pivots of `det`.
    assert nodes(32) <= nodes(8) + (20 if name == "det" else 0)


def _total(found: Any) -> Any:
    parts = found if isinstance(found, list) else [found]
    return sum(part.sum() for part in parts)


@pytest.mark.parametrize("n", [1, 6, 33])
def test_systems_by_what_they_must_satisfy(n: int) -> None:
    a, b = regular(n, n), normal(n, 2)
    np.testing.assert_allclose(a @ td.linalg.solve(a, b).numpy(), b, atol=1e-10)
    lower = td.linalg.cholesky(definite(n, n)).numpy()
    assert np.array_equal(lower, np.tril(lower))


@pytest.mark.slow
@pytest.mark.parametrize("n", range(1, 34))
def test_every_size_up_to_33(n: int) -> None:
    test_systems_by_what_they_must_satisfy(n)
    whole = normal(n, n).astype(np.float32)
    whole += whole.T
    values, vectors = compiled(lambda a: list(td.linalg.eigh(a)), whole)
    scale = np.abs(values).max()
    np.testing.assert_allclose(values, np.linalg.eigvalsh(whole), atol=2e-6 * scale)
    np.testing.assert_allclose((vectors * values) @ vectors.T, whole, atol=1e-5 * scale)
    np.testing.assert_allclose(vectors.T @ vectors, np.eye(n), atol=1e-5)


# Edges


def test_exponentials_of_large_matrices() -> None:
    """Of rotations by many turns, of decay, and of no norm that can be halved away."""
    a = np.array([[[0.0, 90.0], [-90.0, 0.0]], [[-900.0, 1.0], [0.0, -3.0]], [[0.0, 0.0]] * 2])
    expected = torch.matrix_exp(torch.tensor(a)).numpy()
    np.testing.assert_allclose(td.linalg.matrix_exp(a).numpy(), expected, rtol=1e-12, atol=1e-13)
    found = compiled(td.linalg.matrix_exp, a.astype(np.float32))
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-5)
    assert np.isnan(td.linalg.matrix_exp(np.full((2, 2), 1e6)).numpy()).all()


def test_chains_that_do_not_fit_are_refused() -> None:
    a = np.ones((2, 3))
    refused(lambda: td.linalg.multi_dot([a]), td.ArgumentError, "multi_dot")
    refused(lambda: td.linalg.multi_dot([a, a]), td.ShapeError, "multi_dot", "Inner sizes")
    refused(lambda: td.linalg.multi_dot([a, a[0], a]), td.ShapeError, "multi_dot", "tensor 1")
    refused(lambda: td.linalg.matrix_power(a, 2), td.ShapeError, "matrix_power")
    refused(lambda: td.linalg.cross(a, a[:, :2]), td.ShapeError, "cross")


def test_gradients_at_equal_eigenvalues() -> None:
    """What does not tell equal ones apart has its gradient; what does gets none."""
    a = np.diag([2.0, 2.0, 5.0])
    found = td.grad(lambda a: (td.linalg.eigvalsh(a) ** 3).sum())(a).numpy()
    np.testing.assert_allclose(found, np.diag([12.0, 12.0, 75.0]), atol=1e-12)

    def projection(a: Any) -> Any:
        vectors = td.linalg.eigh(a).eigenvectors[:, :2]
        return (vectors @ vectors.T)[0, 2]

    expected = np.zeros((3, 3))
    expected[0, 2] = expected[2, 0] = -1 / 6
    np.testing.assert_allclose(td.grad(projection)(a).numpy(), expected, atol=1e-12)
    one_of_two = td.grad(lambda a: td.linalg.eigh(a).eigenvectors[0, 0] ** 2)(a).numpy()
    assert np.isfinite(one_of_two).all()
    singular = td.grad(lambda a: td.linalg.svdvals(a).sum())(np.eye(3)).numpy()
    np.testing.assert_allclose(singular, np.eye(3), atol=1e-12)


def test_singular_vectors_at_a_lower_rank() -> None:
    rank_two = normal(6, 2) @ normal(2, 4)
    for a in (rank_two, rank_two.T, np.zeros((3, 2)), np.ones((2, 2))):
        for full in (False, True) if a is rank_two else (True,):
            u, s, vh = (x.numpy() for x in td.linalg.svd(a, full_matrices=full))
            k = len(s)
            np.testing.assert_allclose((u[:, :k] * s) @ vh[:k], a, atol=1e-10)
            np.testing.assert_allclose(u.T @ u, np.eye(u.shape[1]), atol=1e-10)
            np.testing.assert_allclose(vh @ vh.T, np.eye(vh.shape[0]), atol=1e-10)
    assert int(td.linalg.matrix_rank(rank_two).item()) == 2
    np.testing.assert_allclose(
        td.linalg.pinv(rank_two).numpy(), np.linalg.pinv(rank_two), atol=1e-10
    )


def test_what_has_no_factor_is_not_finite() -> None:
    assert np.isnan(td.linalg.cholesky(np.diag([1.0, -1.0])).numpy()).any()
    assert not np.isfinite(td.linalg.inv(np.ones((2, 2))).numpy()).any()
    assert td.linalg.det(np.ones((3, 3))).item() == 0
    sign, logarithm = td.linalg.slogdet(np.ones((2, 2)))
    assert (sign.item(), logarithm.item()) == (0, -np.inf)


def test_signs_of_determinants() -> None:
    for order in ([1, 0, 2], [1, 2, 0], [2, 1, 0], [0, 1, 2]):
        a = np.eye(3)[order] * 2
        assert td.linalg.det(a).item() == pytest.approx(np.linalg.det(a))
        assert td.linalg.slogdet(a).sign.item() == np.sign(np.linalg.det(a))


def test_second_derivatives() -> None:
    a = definite(3, 3)
    for ours, theirs in (
        (td.linalg.cholesky, torch.linalg.cholesky),
        (td.linalg.inv, torch.linalg.inv),
        (lambda a: td.linalg.slogdet(a)[1], lambda a: torch.linalg.slogdet(a)[1]),
        (lambda a: td.linalg.eigvalsh(a) ** 2, lambda a: torch.linalg.eigvalsh(a) ** 2),
    ):
        inner = td.grad(lambda a, f=ours: (f(a) ** 3).sum())
        found = td.grad(lambda a, g=inner: (g(a) ** 2).sum())(a).numpy()
        leaf = torch.tensor(a, requires_grad=True)
        (first,) = torch.autograd.grad((theirs(leaf) ** 3).sum(), leaf, create_graph=True)
        (second,) = torch.autograd.grad((first**2).sum(), leaf)
        np.testing.assert_allclose(found + found.T, (second + second.mT).numpy(), rtol=1e-8)


BLOCKED = {
    **of_squares("cholesky", [(65, 65), (2, 70, 70)]),
    **of_squares("upper cholesky", [(96, 96)]),
    **of_systems("lower", [((70, 70), (70, 3)), ((64, 64), (2, 64, 1)), ((2, 66, 66), (66, 1))]),
    **of_systems("upper, ones", [((97, 97), (97, 1))]),
}


@pytest.mark.parametrize("name", BLOCKED)
def test_large_matrices_by_blocks(name: str) -> None:
    check_exactly({name: BLOCKED[name]})


def test_large_matrices_by_blocks_natively() -> None:
    check({name: BLOCKED[name] for name in BLOCKED if "(2, 66" not in name})


def test_a_program_does_not_grow_with_its_blocks() -> None:
    def nodes(n: int) -> int:
        both = td.value_and_grad(lambda a: td.linalg.cholesky(a).sum())
        return len(td.trace(both, td.Spec((n, n))).nodes)

    assert nodes(160) <= nodes(96)


def test_derivatives_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of two: sizes that they divide, and others, twice differentiated."""
    monkeypatch.setattr("treadle.linalg.blocks.BLOCK", 2)
    monkeypatch.setattr("treadle.linalg.triangular.LEAST", 3)
    check_exactly(of_squares("cholesky", SQUARES) | of_systems("lower", RIGHT))
    check_exactly(of_systems("upper, ones", RIGHT))
    test_second_derivatives()
    lower = td.linalg.cholesky(definite(5, 5)).numpy()
    assert np.array_equal(lower, np.tril(lower))
    assert not np.isfinite(td.linalg.cholesky(-definite(5, 5)).numpy()).all()


def test_norms_of_vectors_and_of_what_the_arguments_say() -> None:
    a = normal(2, 3, 4)
    for arguments in ({}, {"dim": 1}, {"dim": (0, 2)}, {"ord": 1, "dim": -1}, {"keepdim": True}):
        found = td.linalg.norm(a, **arguments).numpy()
        np.testing.assert_allclose(found, torch.linalg.norm(torch.tensor(a), **arguments).numpy())
    for arguments in ({"dim": (0, 2)}, {"ord": np.inf, "keepdim": True}):
        found = td.linalg.vector_norm(a, **arguments).numpy()
        expected = torch.linalg.vector_norm(torch.tensor(a), **arguments).numpy()
        np.testing.assert_allclose(found, expected)
    turned = td.linalg.matrix_norm(a, 1, dim=(2, 0), keepdim=True).numpy()
    expected = torch.linalg.matrix_norm(torch.tensor(a), 1, dim=(2, 0), keepdim=True).numpy()
    np.testing.assert_allclose(turned, expected)
    assert td.linalg.norm(a[0], "nuc").item() == pytest.approx(np.linalg.norm(a[0], "nuc"))
    assert td.linalg.cond(a[0]).item() == pytest.approx(np.linalg.cond(a[0]))


def test_whole_factors() -> None:
    a = normal(5, 3)
    q, r = (x.numpy() for x in td.linalg.qr(a, "complete"))
    expected = torch.linalg.qr(torch.tensor(a), "complete")
    np.testing.assert_allclose(q, expected[0].numpy(), atol=1e-12)
    np.testing.assert_allclose(r, expected[1].numpy(), atol=1e-12)
    square = regular(2, 6, 6)
    permutation, lower, upper = td.linalg.lu(square)
    np.testing.assert_allclose((permutation @ lower @ upper).numpy(), square, atol=1e-12)
    x, residuals = td.linalg.lstsq(a, normal(5, 2))
    assert x.shape == (3, 2)
    assert residuals.shape == (2,)


def test_narrow_floats_are_computed_in_float32() -> None:
    a = td.tensor(definite(8, 8)).astype(td.bfloat16)
    found = td.linalg.cholesky(a)
    assert found.dtype is td.bfloat16
    exact = np.linalg.cholesky(a.numpy().astype(np.float64))
    np.testing.assert_allclose(found.numpy().astype(np.float64), exact, rtol=0.01, atol=0.01)


def test_they_are_rendered_for_a_gpu() -> None:
    def everything(a: Any) -> Any:
        values, vectors = td.linalg.eigh(a)
        angles = td.atan2(vectors, td.linalg.solve(a, vectors))
        return td.fft.rfft(angles * values)

    options = td.CompileOptions()
    toolchain = backend("cuda").toolchain(options)
    source = toolchain.render(toolchain.schedule(td.trace(everything, td.Spec((6, 6))), options))
    assert "t_atan2" in "".join(source.parts)


A, B = td.zeros((3, 4)), td.zeros((2, 3, 3))
REFUSALS = [
    (lambda: td.linalg.inv(A), td.ShapeError, "inv", "float32[3,4]", "not square", "pinv"),
    (lambda: td.linalg.qr(A[0]), td.ShapeError, "qr", "float32[4]", "last two axes"),
    (lambda: td.linalg.solve(B, A.T), td.ShapeError, "solve", "(n, k)", "one column"),
    (lambda: td.linalg.qr(A, "r"), td.ArgumentError, "qr", "mode = 'r'", "complete"),
    (lambda: td.linalg.eigh(B, "M"), td.ArgumentError, "eigh", "UPLO = 'M'", '"L"'),
    (lambda: td.linalg.matrix_norm(A, 3), td.ArgumentError, "matrix_norm", "ord = 3", "'nuc'"),
    (lambda: td.linalg.lstsq(A, A.T), td.ShapeError, "lstsq", "numbers of rows"),
    (lambda: td.linalg.solve(B, td.zeros((4, 3, 1))), td.ShapeError, "solve", "broadcast"),
    (lambda: td.linalg.norm(B, "fro"), td.ArgumentError, "norm", "ord = 'fro'", "of matrices"),
]


@pytest.mark.parametrize("row", REFUSALS, ids=lambda row: row[2])
def test_refusals(row: Any) -> None:
    refused(*row)


def test_a_step_learns_through_a_solution() -> None:
    """A layer of least squares in a native program of values and gradients."""
    features, target = normal(12, 3).astype(np.float32), normal(12, 1).astype(np.float32)

    def ridge(x: Any, y: Any, weight: Any) -> Any:
        gram = td.transpose(x, 0, 1) @ x + weight * td.eye(3)
        solution = td.linalg.solve(gram, td.transpose(x, 0, 1) @ y)
        return td.square(x @ solution - y).sum()

    found = compiled(td.value_and_grad(ridge, 2), features, target, np.ones((), np.float32))
    x, y = torch.tensor(features).double(), torch.tensor(target).double()
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    solution = torch.linalg.solve(x.T @ x + weight * torch.eye(3), x.T @ y)
    loss = ((x @ solution - y) ** 2).sum()
    loss.backward()
    np.testing.assert_allclose(found[0], loss.item(), rtol=1e-5)
    np.testing.assert_allclose(found[1], weight.grad.item(), rtol=1e-4)
