"""How functions are written for kernels: what they do without, and the lanes they fill."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import treadle as td
from treadle.codegen.llvm.driver import render_kernel
from treadle.frontend.convolutions import conv_grad_x
from treadle.ir import composites as c
from treadle.kernel.machine import Machine
from treadle.kernel.nodes import For, Matmul, Role
from treadle.kernel.target import CPU
from treadle.kernel.text import to_text
from treadle.kernel.traverse import walk
from treadle.memory.assemble import assemble
from treadle.memory.plan import plan_buffers
from treadle.rules.expansion import expand
from treadle.runtime.cpu.script import planned_calls
from treadle.schedule.schedule import schedule
from treadle.schedule.templates import has_kernels


def ops(function, *specs):
    graph = expand(td.trace(function, *specs), CPU, has_kernels)
    return {node.op.name for node in graph.nodes}


def kernels(function, *specs):
    return [call.kernel for call in schedule(td.trace(function, *specs)).calls()]


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
@pytest.mark.parametrize("factor", [1, 2, 3])
def test_whole_factors_of_resizing_need_no_indices(mode, factor):
    def loss(x):
        return (td.interpolate(x, scale_factor=factor, mode=mode) ** 2).sum()

    found = ops(td.grad(loss), td.Spec((1, 2, 5, 7)))
    assert not found & {"gather", "scatter_add"}


def test_other_factors_of_resizing_are_gathers():
    found = ops(lambda x: td.interpolate(x, 9, mode="linear"), td.Spec((1, 2, 6)))
    assert "gather" in found


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_many_results_of_one_element(mode):
    """More than are written one by one; and an axis of one element."""
    x = np.random.default_rng(0).normal(size=(1, 2, 3, 1))
    found = td.interpolate(x, scale_factor=12, mode=mode).numpy()
    expected = F.interpolate(torch.tensor(x), scale_factor=12, mode=mode)
    assert np.allclose(found, expected.numpy(), atol=1e-5)


CONVOLUTIONS = list(itertools.product((1, 3, 4), (1, 2, 3, 10), (1, 2, 3), (1, 2), (0, 4)))


def test_gradients_of_convolutions_by_phases():
    """Every stride, dilation and padding, elements that no window meets among them."""
    rng = np.random.default_rng(0)
    for kernel, stride, dilation, groups, padding in CONVOLUTIONS:
        x, w = rng.normal(size=(2, 4, 11)), rng.normal(size=(6, 4 // groups, kernel))
        image = torch.tensor(x, requires_grad=True)
        given = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        out = F.conv1d(image, torch.tensor(w), **given)
        ct = rng.normal(size=out.shape)
        out.backward(torch.tensor(ct))
        conv = c.Conv((stride,), ((padding, padding),), (dilation,), groups)
        found = conv_grad_x(c.ConvGrad(conv, x.shape), td.tensor(ct), td.tensor(w))
        assert np.allclose(found.numpy(), image.grad.numpy(), atol=1e-5), given


def test_strided_convolutions_collect_no_windows():
    def image_gradient(x, w):
        return td.grad(lambda x: td.conv(x, w, stride=2, padding=1).sum())(x)

    assert "unwindow" not in ops(image_gradient, td.Spec((2, 4, 8, 8)), td.Spec((4, 4, 3, 3)))

    def patches(x, w):
        return td.grad(lambda x: td.conv(x, w, stride=4).sum())(x)

    assert "unwindow" in ops(patches, td.Spec((2, 4, 8, 8)), td.Spec((4, 4, 4, 4)))


def matmuls(found):
    """Those of some kernels, each with whether a thread copied its right operand."""
    return [
        (s, s.right.buffer in {b.name for b in kernel.scratch})
        for kernel in found
        for s in walk(kernel.body)
        if isinstance(s, Matmul)
    ]


def conv(outputs, channels, size, panel=32, **options):
    """The kernels of a convolution by windows of 3 × 3."""
    rank = len(size)
    specs = td.Spec((2, channels, *size)), td.Spec((outputs, channels, *(3,) * rank))
    graph = td.trace(lambda x, w: td.conv(x, w, padding=1, **options), *specs)
    return [call.kernel for call in schedule(graph, panel=panel).calls()]


@pytest.mark.parametrize(
    ("size", "options"),
    [
        ((16, 16), {}),
        ((8, 8), {}),
        ((7, 7), {}),
        ((32, 32), {"stride": 2}),
        ((64,), {"stride": 2}),
        ((4, 4, 4), {}),
    ],
)
def test_short_or_strided_runs_of_windows_are_copied_by_who_multiplies_them(size, options):
    """Lanes are full, and no memory holds the windows of all images."""
    found = conv(32, 32, size, **options)
    every = matmuls(found)
    assert all(is_own for _, is_own in every)
    assert max(m.target.columns.count for m, _ in every) == 32
    assert all(m.left.rows.count == 32 for m, _ in every)
    windows = 2 * 32 * np.prod(size) * 3 ** len(size) // options.get("stride", 1) ** len(size)
    assert all(b.size < windows for k in found for b in (*k.inputs, *k.outputs))


def test_long_runs_and_few_channels_are_read_where_they_are():
    assert not any(is_own for _, is_own in matmuls(conv(32, 32, (32, 32))))
    assert not any(is_own for _, is_own in matmuls(conv(8, 32, (8, 8))))
    assert any(is_own for _, is_own in matmuls(conv(32, 32, (8, 8), panel=16)))


def test_a_scattered_weight_is_put_in_order_once():
    """The gradient of images goes along the outputs of a weight: not in every task."""

    def gradient(ct, w):
        x = td.tensor(np.zeros((2, 32, 8, 8), np.float32))
        return td.grad(lambda x: (td.conv(x, w, padding=1) * ct).sum())(x)

    found = kernels(gradient, td.Spec((2, 48, 8, 8)), td.Spec((48, 32, 3, 3)))
    ((product, _),) = matmuls(found)
    assert not product.left.columns.listed
    assert product.left.columns.stride == 1
    assert [k.name for k in found if k.name.endswith("_left")]


@pytest.mark.parametrize(("padding", "stride"), [(0, 1), (1, 1), (1, 2)])
def test_depthwise_convolutions_are_loops_along_rows(padding, stride):
    def depthwise(x, w):
        return td.conv(x, w, padding=padding, stride=stride, groups=6)

    specs = td.Spec((2, 6, 34, 34)), td.Spec((6, 1, 3, 3))
    found = kernels(depthwise, *specs)
    assert not matmuls(found)
    (text,) = [t for t in (render_kernel(k, Machine(8)) for k in found) if "llvm.fma" in t]
    assert text.count("call <16 x float> @llvm.fma") == 9, "all taps are written out"
    x, w = (np.random.default_rng(i).normal(size=s.shape) for i, s in enumerate(specs))
    expected = td.compile(depthwise, *specs, device="oracle")(x, w)
    native = td.compile(depthwise, *specs, device="cpu")
    assert np.allclose(native(*(a.astype(np.float32) for a in (x, w))), expected, atol=1e-4)


def test_borders_are_cut_off_padded_rows():
    """Lanes of what is inside need no choice, and load and store whole vectors."""
    (kernel,) = kernels(lambda x: td.pad(x, ((0, 0), (1, 1))), td.Spec((64, 40)))
    extents = [s.var.extent for s in walk(kernel.body) if isinstance(s, For)]
    assert extents == [64, 1, 40, 1]


def test_lanes_of_a_sum_are_folded_in_halves():
    (kernel,) = kernels(lambda x: x.sum(1), td.Spec((64, 256)))
    text = render_kernel(kernel, Machine(8))
    assert text.count("extractelement") <= 4, "the last two of each width of vectors"


def test_factors_of_channels_are_read_once_for_all_lanes():
    """Rows of a group's channels: no lane divides by an image's pixels."""

    def normed(x, scale):
        rows = td.layer_norm(x.reshape(8, -1)).reshape(x.shape)
        return (rows * scale.reshape(16, 1, 1)).reshape(8, -1).sum(1)

    shapes = td.Spec((4, 16, 8, 8)), td.Spec((16,))
    texts = [to_text(kernel) for kernel in kernels(normed, *shapes)]
    assert not [t for t in texts if re.search(r"\(i\d[^)]*\)/", t)], texts
    loops = [s for k in kernels(normed, *shapes) for s in walk(k.body) if isinstance(s, For)]
    assert not [s for s in loops if s.role is Role.SEQUENTIAL and s.var.extent == 512]
    x, scale = (np.random.default_rng(i).normal(size=s.shape) for i, s in enumerate(shapes))
    native = td.compile(normed, *shapes, device="cpu")
    found = native(x.astype(np.float32), scale.astype(np.float32))
    expected = td.compile(normed, *shapes, device="oracle")(x, scale)
    assert np.allclose(found, expected, atol=1e-3)


@pytest.mark.parametrize("columns", [48, 8])
def test_rows_found_by_data_are_added_to_whole(columns):
    """Lanes along a row agree on which it is: the sum is one of vectors, if narrow ones."""

    def added(rows, index):
        return td.segment_sum(rows, index, 5)

    shape = (40, columns)
    specs = td.Spec(shape), td.Spec((40,), td.int32)
    rng = np.random.default_rng(0)
    rows, index = rng.normal(size=shape).astype(np.float32), rng.integers(0, 5, 40, np.int32)
    expected = np.zeros((5, columns))
    np.add.at(expected, index, rows.astype(float))
    assert np.allclose(td.compile(added, *specs, device="cpu")(rows, index), expected, atol=1e-5)
    texts = [render_kernel(kernel, Machine(16)) for kernel in kernels(added, *specs)]
    (text,) = [t for t in texts if "fadd" in t]
    assert re.search(rf"fadd <{min(16, columns)} x float>", text)


@pytest.mark.parametrize(("columns", "tasks"), [(64, 4), (24, 1), (4096, 128)])
def test_tasks_are_whole_vectors(columns, tasks):
    """A thread that had four columns of a sum would take them one by one."""
    specs = td.Spec((8000, columns)), td.Spec((8000,), td.int32)
    program = schedule(td.trace(lambda rows, index: td.segment_sum(rows, index, 5), *specs))
    plan = assemble(program, plan_buffers(program))
    calls = planned_calls(plan.steps)
    entries = [(plan.entries[call.entry], call.tasks) for call in calls]
    assert (columns, tasks) in [(e.iterations, n) for e, n in entries if e.is_vector]


def test_windows_are_not_copied_to_be_multiplied_once():
    """The gradient of a depthwise weight is sums of products, where both operands lie."""

    def weight_gradient(x, w):
        return td.grad(lambda w: (td.conv(x, w, padding=1, groups=8) ** 2).sum())(w)

    specs = td.Spec((2, 8, 16, 16)), td.Spec((8, 1, 3, 3))
    names = [kernel.name for kernel in kernels(weight_gradient, *specs)]
    assert not [name for name in names if "pack" in name], names
    x, w = (np.random.default_rng(0).normal(size=s.shape).astype(np.float32) for s in specs)
    found = td.compile(weight_gradient, *specs, device="cpu")(x, w)
    weight = torch.tensor(w, dtype=torch.float64, requires_grad=True)
    (F.conv2d(torch.tensor(x).double(), weight, padding=1, groups=8) ** 2).sum().backward()
    assert np.allclose(found, weight.grad.numpy(), rtol=1e-4, atol=1e-2)
