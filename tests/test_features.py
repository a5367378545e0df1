"""Every public layer, function, loss and metric: rows, the oracle, machine code, texts for GPUs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import reference_pages
import sizes
import support_page
import treadle as td
from cuda_backend import needs_gpu
from features import FEATURES, LEAST, TESTED, Feature, public
from sizes import Problem, check, reference, values_and_gradients
from treadle.backends.registry import backend
from treadle.backends.webgpu.backend import WebGpuToolchain
from treadle.base.errors import DTypeError
from treadle.ir.graph import Graph

BY_TITLE = {f.title: f for f in FEATURES}
FUNCTIONS = [f for f in FEATURES if f.kind == "td"]
# Layers and most losses are compared in float64 by tests of their own.
ON_THE_ORACLE = [f for f in FEATURES if f.kind in ("td", "losses")]
EVERY = 8  # of so many features one is taken by default, where all take too long

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def test_every_public_name_has_rows_or_a_test() -> None:
    assert not public() - BY_TITLE.keys() - TESTED.keys(), "add rows, or a line to TESTED"
    assert not (BY_TITLE.keys() | TESTED.keys()) - public(), "these are not public"
    assert not BY_TITLE.keys() & TESTED.keys()


def test_what_has_no_rows_has_a_test() -> None:
    folder = Path(__file__).parent
    for title, place in TESTED.items():
        file, _, name = place.partition("::")
        text = (folder / file).read_text(encoding="utf-8")
        assert re.search(rf"^def {name}\(", text, re.MULTILINE), f"{title}: no {place}"
        own = title.rpartition(".")[2]
        assert re.search(rf"\b{own}\b", text), f"{title}: {file} does not mention it"


def test_every_feature_has_five_configurations() -> None:
    few = {f.title: len(f.rows()) for f in FEATURES if len(f.rows()) < LEAST}
    assert not few


def compare(make: Callable[[], Problem], title: str) -> None:
    """Values and gradients in float64: the oracle's and PyTorch's differ by rounding alone."""
    problem = make()
    known = reference(problem)
    given = problem.floats, problem.constants, known.cotangents
    values, gradients = values_and_gradients(problem.ours, *given)
    for found, expected in zip(values, known.values, strict=True):
        close(found.numpy(), expected, title)
    for name, found in gradients.items():
        close(found.numpy(), known.gradients[name], f"{title}: gradient of {name}")


def close(found: np.ndarray, expected: np.ndarray, title: str) -> None:
    # Numbers made from nothing are float32 unless asked for otherwise.
    limit = 1e-6 if title.startswith("td.logspace") else 1e-8
    np.testing.assert_allclose(found, expected, rtol=limit, atol=limit, err_msg=title)


@pytest.mark.parametrize("feature", FUNCTIONS, ids=lambda f: f.title)
def test_a_row_on_the_oracle(feature: Feature) -> None:
    compare(feature.problems[-1], feature.title)


@pytest.mark.slow
@pytest.mark.parametrize("feature", ON_THE_ORACLE, ids=lambda f: f.title)
def test_on_the_oracle(feature: Feature) -> None:
    for i, make in enumerate(feature.problems):
        compare(make, f"{feature.title} {i}")


def problems(feature: Feature) -> dict[str, Problem]:
    return {f"{feature.title} {i}": make() for i, make in enumerate(feature.problems)}


@pytest.mark.parametrize("feature", FUNCTIONS[:: 12 * EVERY], ids=lambda f: f.title)
def test_some_natively(feature: Feature) -> None:
    check(problems(feature))


@pytest.mark.slow
@pytest.mark.parametrize("feature", [f for f in FEATURES if f.problems], ids=lambda f: f.title)
def test_natively(feature: Feature) -> None:
    """All rows of a feature in one program: their values, and their values and gradients."""
    check(problems(feature))


def render(graph: Graph) -> None:
    """Scheduled for a GPU and printed: every kernel is a launch, and no stage refuses."""
    options = td.CompileOptions()
    toolchain = backend("cuda").toolchain(options)
    program = toolchain.schedule(graph, options)
    source = toolchain.render(program)
    assert len(source.launches) == len(program.distinct())


@pytest.mark.parametrize("feature", FEATURES[::EVERY], ids=lambda f: f.title)
def test_some_for_cuda(feature: Feature) -> None:
    render(feature.rows()[-1]())


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES, ids=lambda f: f.title)
def test_for_cuda(feature: Feature) -> None:
    for make in feature.rows():
        render(make())


def for_webgpu(feature: Feature, rows: list[Callable[[], Graph]]) -> int:
    """Printed as WGSL within the least limits; how many are refused for values of 64 bits."""
    toolchain, options, refused = WebGpuToolchain(), td.CompileOptions(), 0
    for make in rows:
        try:
            program = toolchain.schedule(make(), options)
        except DTypeError:
            refused += 1
            continue
        assert len(toolchain.render(program)) == len(program.distinct())
    return refused


@pytest.mark.parametrize("feature", FEATURES[:: 8 * EVERY], ids=lambda f: f.title)
def test_some_for_webgpu(feature: Feature) -> None:
    assert not for_webgpu(feature, feature.rows()[-1:])


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES, ids=lambda f: f.title)
def test_for_webgpu(feature: Feature) -> None:
    assert for_webgpu(feature, feature.rows()) == support_page.WIDE.get(feature.title, 0)


# Methods that PyTorch's tensors do not have, or not as ours: NumPy's names, sizes that must be known.
OWN_METHODS = {
    "astype",
    "cast",
    "cdist",
    "take_along_axis",
    "dtype",
    "size",
    "bincount",
    "bfloat16",
}


def parts(found: Any) -> list[np.ndarray]:
    is_several = isinstance(found, tuple) and not isinstance(found[0], int)
    return [np.asarray(x, np.float64) for x in (found if is_several else [found])]


@pytest.mark.parametrize("name", sorted(reference_pages.methods().keys() - OWN_METHODS))
def test_methods_beside_pytorch(name: str) -> None:
    """The example of the reference, with PyTorch's tensor in place of ours."""
    call = reference_pages.method_call(name, reference_pages.methods()[name])
    assert call is not None
    values = np.array([1.0, 4.0])
    ours = eval(call, {"x": td.tensor(values), "td": td})
    theirs = eval(call, {"x": torch.tensor(values), "td": torch})
    for found, expected in zip(parts(ours), parts(theirs), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12)


@needs_gpu
@pytest.mark.slow
@pytest.mark.parametrize("feature", [f for f in FEATURES if f.problems], ids=lambda f: f.title)
def test_on_a_gpu(feature: Feature, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "DEVICE", "cuda")
    check(problems(feature))


def test_support_page_is_up_to_date() -> None:
    text = support_page.page(FEATURES, TESTED)
    assert support_page.PAGE.read_text(encoding="utf-8") == text, "run tools/support_page.py"
    assert not support_page.NOT_CLAIMED.keys() - BY_TITLE.keys(), "notes about no feature"
