"""PyTorch modules through torch.export: every row, whole models, training, what is refused."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch_rows
from torch_rows import Sample

import treadle as td
from treadle.interop.torch.exported import LEFT_OUT, dtype_of
from treadle.interop.torch.program import Call, Known, Program, Ref
from treadle.interop.torch.rows.all import ROWS

SAMPLES = list(torch_rows.samples())
PYTHON = ("operator.", "python.")  # rows that are Python's own functions


def treadle_s(value: Any) -> Any:
    """An argument as rows take it."""
    if isinstance(value, torch.Tensor):
        plain = value.float() if value.dtype is torch.bfloat16 else value
        return td.tensor(plain.numpy(), dtype_of(value.dtype))
    if isinstance(value, torch.dtype):
        return dtype_of(value)
    if isinstance(value, (list, tuple)):
        return [treadle_s(v) for v in value]
    return None if isinstance(value, torch.device) else value


def known(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return Known(tuple(value.shape), dtype_of(value.dtype))
    return tuple(map(known, value)) if isinstance(value, (list, tuple)) else None


def torch_s(sample: Sample, arguments: Any) -> Any:
    name, _, overload = sample.op.partition(".")
    op = getattr(getattr(torch.ops.aten, name), overload)
    return op(*arguments, **sample.keywords)


def by_row(sample: Sample, arguments: Any, expected: Any) -> Any:
    keywords = {k: treadle_s(v) for k, v in sample.keywords.items() if k not in LEFT_OUT}
    call = Call(sample.op, ROWS[sample.op], tuple(arguments), keywords, known(expected))
    return Program(0, (call,), (Ref(0),)).run([])[0]


def compare(found: Any, expected: Any, sample: Sample) -> None:
    if isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        chosen = sample.compared or range(len(expected))
        for i in chosen:
            compare(found[i], expected[i], sample)
    elif isinstance(expected, torch.Tensor):
        assert found.shape == tuple(expected.shape)
        assert found.dtype is dtype_of(expected.dtype)
        if not sample.is_random:
            narrow = expected.dtype in (torch.bfloat16, torch.float16)
            plain = expected.detach().double() if expected.is_floating_point() else expected
            given = found.numpy().astype(plain.numpy().dtype)
            np.testing.assert_allclose(given, plain.numpy(), 1e-2 if narrow else 2e-5, 2e-6)
    else:
        assert found == expected


def test_every_row_has_a_sample() -> None:
    sampled = {s.op for s in SAMPLES}
    assert [op for op in ROWS if op not in sampled and not op.startswith(PYTHON)] == []
    assert len(sampled) >= 150


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_rows_are_pytorch_s_ops(sample: Sample) -> None:
    expected = torch_s(sample, sample.arguments)
    td.random.seed(3)
    compare(by_row(sample, treadle_s(list(sample.arguments)), expected), expected, sample)


def differentiable(sample: Sample) -> bool:
    return not sample.is_random and any(
        isinstance(a, torch.Tensor) and a.is_floating_point() for a in sample.arguments
    )


def first_float(value: Any) -> Any:
    """The first result that has a gradient."""
    found = value if isinstance(value, (list, tuple)) else [value]
    for i, one in enumerate(found):
        if isinstance(one, torch.Tensor) and one.requires_grad:
            return i if isinstance(value, (list, tuple)) else None
    return "none"


def torch_gradients(sample: Sample, at: list[int]) -> Any:
    """(results, which of them, weights of its elements, gradients); None where it has none."""
    arguments = list(sample.arguments)
    for i in at:
        arguments[i] = arguments[i].clone().requires_grad_()
    expected = torch_s(sample, arguments)
    chosen = first_float(expected)
    if chosen == "none":
        return None
    result = expected if chosen is None else expected[chosen]
    weights = torch.randn(result.shape, generator=torch.Generator().manual_seed(1))
    total = (result.float() * weights).sum()
    grads = torch.autograd.grad(total, [arguments[i] for i in at], allow_unused=True)
    return expected, chosen, weights, grads


@pytest.mark.slow
@pytest.mark.parametrize("sample", [s for s in SAMPLES if differentiable(s)], ids=str)
def test_rows_have_pytorch_s_gradients(sample: Sample) -> None:
    floats = [isinstance(a, torch.Tensor) and a.is_floating_point() for a in sample.arguments]
    at = [i for i, is_float in enumerate(floats) if is_float]
    try:
        try:
            theirs = torch_gradients(sample, at)
        except RuntimeError as error:  # for some arguments, as running statistics
            if "not differentiable with respect to" not in str(error):
                raise
            at = at[:1]
            theirs = torch_gradients(sample, at)
    except RuntimeError as error:
        # Its derivative is missing, or is for a source of the shape of the index alone.
        assert "not implemented" in str(error) or "scatter_add" in sample.op  # noqa: PT017
        return
    if theirs is None:
        return
    expected, chosen, weights, grads = theirs

    def loss(*floats: Any) -> Any:
        given = treadle_s([None if i in at else a for i, a in enumerate(sample.arguments)])
        for i, x in zip(at, floats, strict=True):
            given[i] = x
        found = by_row(sample, given, expected)
        one = found if chosen is None else found[chosen]
        return (one * td.tensor(weights.numpy())).sum()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", td.UnreachedWarning)
        inputs = [treadle_s(sample.arguments[i]) for i in at]
        found = td.grad(loss, range(len(at)))(*inputs)
    result = expected if chosen is None else expected[chosen]
    narrow = result.dtype in (torch.bfloat16, torch.float16)
    for mine, other, x in zip(found, grads, inputs, strict=True):
        all_of_it = np.zeros(x.shape) if other is None else other.numpy(force=True)
        np.testing.assert_allclose(mine.numpy(), all_of_it, 5e-3 if narrow else 2e-4, 2e-5)
