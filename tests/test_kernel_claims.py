"""Kernels against their graph over the finite field: all hold, and defects are found."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import treadle as td
from derived_gradients import compare_gradients
from kernel_mutants import mutants
from models import block_specs, cnn_loss, cnn_specs, gpt_block, mlp_loss, mlp_specs
from treadle import losses
from treadle.autodiff.backward import differentiate
from treadle.backends import stages
from treadle.backends.cpu.backend import CpuToolchain
from treadle.base.errors import GraphError, TreadleError
from treadle.ir.graph import Graph, Output
from treadle.kernel.bindings import Bindings, Copy, Partial, Work
from treadle.kernel.nodes import For, Kernel, Store
from treadle.kernel.program import Call, Phase, Program
from treadle.kernel.text import to_text
from treadle.kernel.verify import verify
from treadle.schedule.schedule import CPU, GPU, Target, schedule
from treadle.verify.claims import Site, sites
from treadle.verify.kernels import check, check_kernels


def block_loss(params, x):
    return (gpt_block(x, params, heads=2) ** 2).mean()


LOSSES = {
    "mlp": (mlp_loss, mlp_specs()),
    "cnn": (cnn_loss, cnn_specs()),
    "block": (block_loss, (block_specs(8), td.Spec((2, 4, 8)))),
}


def graphs(name: str) -> tuple[Graph, Graph]:
    """A loss, and with it its gradients."""
    function, specs = LOSSES[name]
    loss = td.trace(partial(function), *specs, name=name)
    wrt = [n for n in loss.leaves if n.startswith(("arg0", "params"))]
    return loss, differentiate(loss, wrt).graph


def program_of(name: str, target: Target = CPU) -> Program:
    return schedule(graphs(name)[1], target=target)


@pytest.mark.parametrize("target", [CPU, GPU], ids=lambda target: target.name)
@pytest.mark.parametrize("name", LOSSES)
def test_all_kernels_compute_their_part(name: str, target: Target) -> None:
    claims = check_kernels(program_of(name, target))
    assert claims
    assert [str(c) for c in claims if not c.is_established] == []
    assert json.loads(json.dumps(claims[0].record))["kind"] == "kernel"


def masked(x, mask):
    return td.softmax(td.where(mask, x, float("-inf")), axis=-1).sum(0)


def ranked(x):
    return x.argmax(1), td.sort(x, axis=1)[0], td.logsumexp(x, 0), td.cumsum(x, 1)


def states(x, w):
    return td.scan(lambda h, row: (td.tanh(h @ w + row), h), td.zeros((3, 5)), x)[1]


def picked(table, at):
    rows = table[at]
    return td.grad(lambda t: (t[at] ** 2).sum())(table), rows, td.random.uniform((7, 3))


@pytest.mark.parametrize("target", [CPU, GPU], ids=lambda target: target.name)
@pytest.mark.parametrize(
    ("function", "specs"),
    [
        (masked, [td.Spec((6, 9)), td.Spec((6, 9), td.bool_)]),
        (ranked, [td.Spec((5, 19))]),
        (states, [td.Spec((4, 3, 5)), td.Spec((5, 5))]),
        (picked, [td.Spec((11, 6)), td.Spec((8,), td.int32)]),
    ],
    ids=["masked", "ranked", "scan", "picked"],
)
def test_kinds_of_kernels(function, specs, target: Target) -> None:
    claims = check_kernels(schedule(td.trace(function, *specs), target=target))
    assert claims
    assert [str(c) for c in claims if not c.is_established] == []


def variance(x):
    """Of every column, on a GPU from the sums and spreads of parts."""
    gap = x - x.mean(0, keepdims=True)
    return (gap * gap).sum(0)


def longest(x, mask):
    """A scan with infinities, whose rows need nothing of each other but the neighbour."""

    def turn(h, row):
        moved = td.where(mask, td.roll(h, 1, 0), float("-inf"))
        return td.maximum(h, moved) + row, td.exp(h - 1)

    return td.scan(turn, td.zeros((12,)), x)


@pytest.mark.parametrize(
    ("function", "specs", "told"),
    [
        (variance, [td.Spec((16384, 8))], "spread"),
        (lambda x: td.sort(x, 0)[1], [td.Spec((3000,))], "on the way"),
        (longest, [td.Spec((9, 12)), td.Spec((12,), td.bool_)], "holds"),
    ],
    ids=["moments", "merges", "scan"],
)
def test_algorithms_of_a_gpu(function, specs, told: str) -> None:
    program = schedule(td.trace(function, *specs), target=GPU)
    assert any(told in str(b) for b in program.bindings.every)
    claims = check_kernels(program)
    assert [str(c) for c in claims if not c.is_established] == []


def test_a_defect_in_a_chain_is_found() -> None:
    """A merge that is wrong is found where what it made is read."""
    program = schedule(td.trace(lambda x: td.sort(x, 0)[1], td.Spec((3000,))), target=GPU)
    *_, site = sites(program)
    assert site.chain
    first = site.chain[-1]
    kernel = next(k for told, k in mutants(first.kernel) if told == "a store dropped")
    wrong = replace(site, chain=(*site.chain[:-1], replace(first, kernel=kernel)))
    with pytest.raises(GraphError, match="does not compute its part"):
        check(program, wrong)


def plain(w, v, x, y):
    """No maximum, no square, no guard: every defect shows."""
    return ((td.tanh(x @ w) @ v - y) ** 3).mean()


def rejects(program: Program, site: Site, kernel: Kernel, target: Target) -> bool:
    """Whether a kernel in the place of another is refused, by the verifier or by comparing."""
    try:
        verify(kernel, target.mapping)
        check(program, replace(site, call=replace(site.call, kernel=kernel)))
    except (TreadleError, AssertionError, StopIteration):
        return True
    return False


def survivors(programs: Sequence[Program], count: int, target: Target) -> list[str]:
    """Of some random defects, those that nothing finds."""
    pool = [
        (program, site, told, kernel)
        for program in programs
        for site in sites(program)
        for told, kernel in mutants(site.call.kernel)
    ]
    random.Random(0).shuffle(pool)
    return [
        f"{site.call.kernel.name}: {told}"
        for program, site, told, kernel in pool[:count]
        if not rejects(program, site, kernel, target)
    ]


@pytest.mark.parametrize("target", [CPU, GPU], ids=lambda target: target.name)
def test_defects_are_found(target: Target) -> None:
    specs = [td.Spec((19, 23)), td.Spec((23, 5)), td.Spec((37, 19)), td.Spec((37, 5))]
    loss = td.trace(plain, *specs)
    program = schedule(differentiate(loss, ["w", "v"]).graph, target=target)
    assert survivors([program], 60, target) == []


# Changes that nothing finds, by the line that is changed: all but the last give the same numbers.
EXPLAINED = (
    # The maximum that a softmax is shifted by, or anything in its place, drops out over the reals;
    # so does what is added to all of its scores.
    r"= (max|min)\(",
    r"^t\d+(~\d+)? = (add\(s3|mul\(p0\[.*0\.5)",
    r"^for (i1|i4|s)(~\d+)? in \d+ (sequential|subgroup):",
    r"^acc~1 = 0:float32",
    # A difference is squared, and a product is added to zeros.
    r"= sub\(",
    r"^p\d\[.*\+= ",
    # All elements of a broadcast are equal: weights of a mean.
    r"^h\d+ = p\d+\[",
    # Zeros of a padding, and lanes behind the last element.
    r"^s2\[32: 3 step 36 by 4\]",
    r"0 <= 32\*panel \+ lane < 36 else 0",
    # What an argmax begins with is overwritten, is below what follows a ReLU, or asks for NaN.
    r"^best\b.*0(:float32| <= i4)",
    r"^at := where\(or\(not",
    # A threshold of 1 in place of 0, between which no generic element lies: the one that is missed.
    r"= le\(t1, 0:float32\)",
)


def _changed_line(old: Kernel, new: Kernel) -> str:
    """The first line of a kernel that is another in another one, or is not there."""
    before, after = to_text(old).splitlines(), to_text(new).splitlines()
    pairs = zip(before, [*after, ""], strict=False)
    return next(a.strip() for a, b in pairs if a != b)


@pytest.mark.slow
@pytest.mark.parametrize("target", [CPU, GPU], ids=lambda target: target.name)
def test_many_defects_are_found(target: Target) -> None:
    """Of every defect of every kernel of four losses at most 1.5 % survive, each explained."""
    specs = [td.Spec((19, 33)), td.Spec((33, 5)), td.Spec((70, 19)), td.Spec((70, 5))]
    graph = differentiate(td.trace(plain, *specs), ["w", "v"]).graph
    programs = [schedule(graph, target=target), *(program_of(n, target) for n in LOSSES)]
    left = list[str]()
    count = 0
    for program in programs:
        for site in sites(program):
            for told, kernel in mutants(site.call.kernel):
                count += 1
                if not rejects(program, site, kernel, target):
                    left.append(f"{told}: {_changed_line(site.call.kernel, kernel)}")
    assert count >= 2000
    assert len(left) <= 0.015 * count, "\n".join(left)
    lines = [text.rsplit(": ", 1)[-1] if text.startswith("a load") else text for text in left]
    known = [any(re.search(p, t.split(": ", 1)[-1]) for p in EXPLAINED) for t in lines]
    assert all(known), "\n".join(t for t, k in zip(left, known, strict=True) if not k)


def test_scratch_that_is_used_again_too_early() -> None:
    """Sums of three columns as they once were: lanes that shared one element of scratch."""
    graph = td.trace(lambda x: td.logsumexp(x.reshape(40, 3) * 2, 1), td.Spec((120,)))
    program = schedule(graph)
    wrong = 0
    for site in sites(program):
        kernel = site.call.kernel
        shared = _onto_one_element(kernel)
        wrong += shared != kernel and rejects(program, site, shared, CPU)
        assert shared == kernel or rejects(program, site, shared, CPU)
    assert wrong


def _onto_one_element(kernel: Kernel) -> Kernel:
    """Everything that iterations of a row store, stored to where its first element is."""

    def changed(s):
        if isinstance(s, For):
            return replace(s, body=tuple(map(changed, s.body)))
        is_store = isinstance(s, Store) and s.index.terms
        return replace(s, index=replace(s.index, terms=s.index.terms[1:])) if is_store else s

    return replace(kernel, body=tuple(map(changed, kernel.body)))


def _with_call(program: Program, old: Call, new: Call) -> Program:
    phases = [Phase(tuple(new if c is old else c for c in s.calls)) for s in program.steps]
    return replace(program, steps=tuple(phases))


def test_a_call_on_other_buffers_is_found() -> None:
    def twice(x, y):
        return (td.exp(x) - y).reshape(8, 8) @ y.reshape(8, 8)

    program = schedule(td.trace(twice, td.Spec((64,)), td.Spec((64,))), fuse=False)
    for call in program.calls():
        if len(call.kernel.inputs) == 2:
            first, second, *rest = call.arguments
            swapped = _with_call(program, call, replace(call, arguments=(second, first, *rest)))
            with pytest.raises(GraphError, match=call.kernel.name):
                check_kernels(swapped)


def test_every_buffer_says_what_it_holds() -> None:
    sums = td.trace(lambda x, w: (x @ w, x.sum()), td.Spec((256, 512)), td.Spec((512, 80)))
    program = schedule(sums)
    kinds = {type(b.content) for b in program.bindings.every}
    assert {Copy, Partial} <= kinds
    assert Work not in kinds
    assert json.dumps([b.record for b in program.bindings.every])
    with pytest.raises(GraphError, match="nothing says what"):
        Bindings().check(b.name for b in program.buffers)


def test_gradients_are_compared_with_those_that_the_checker_derives() -> None:
    loss, both = graphs("block")
    compare_gradients(loss, both)
    outputs = list(both.outputs)
    a, b = next(
        (i, j)
        for i, x in enumerate(outputs)
        for j, y in enumerate(outputs)
        if i < j and x.kind is y.kind and both.type_of(x.value) == both.type_of(y.value)
        and x.value != y.value
    )  # fmt: skip
    outputs[a], outputs[b] = (
        Output(outputs[a].kind, outputs[a].name, outputs[b].value),
        Output(outputs[b].kind, outputs[b].name, outputs[a].value),
    )
    with pytest.raises(GraphError, match="gradients that are not those of the loss"):
        compare_gradients(loss, Graph(both.nodes, tuple(outputs), both.name))


def test_ways_to_verify() -> None:
    assert td.CompileOptions().verify == "fast"
    assert td.CompileOptions(verify=True).verify == "fast"
    assert td.CompileOptions(verify=False).verify == "off"
    with pytest.raises(td.ArgumentError, match="verify"):
        td.CompileOptions(verify="some")


def _linear_step(options: td.CompileOptions) -> td.TrainStep:
    specs = {"x": td.Spec((6, 5)), "y": td.Spec((6, 3))}
    return td.compile_step(
        td.nn.Linear(5, 3), lambda m, b: ((m(b["x"]) - b["y"]) ** 2).mean(), td.optim.sgd(0.1),
        specs, device="cpu", options=options,
    )  # fmt: skip


def test_a_step_is_verified_in_full() -> None:
    step = _linear_step(td.CompileOptions(verify="full"))
    assert {c.kind for c in step.report.claims} == {"kernel", "gradient"}
    assert all(c.is_established for c in step.report.claims)
    assert "claims established" in str(step.report)
    batch = {"x": np.ones((6, 5), np.float32), "y": np.zeros((6, 3), np.float32)}
    assert np.isfinite(step(batch).loss)


# Gradients that a user wrote

OWN_FULL = td.CompileOptions(verify="full")
OWN_BATCH = {"x": td.Spec((6, 3)), "y": td.Spec((6,))}


class _Tanh(td.nn.Module):
    def __init__(self) -> None:
        self.weight = td.nn.Parameter((3,), td.nn.init.normal(std=0.1))
        self.bias = td.nn.Parameter(())

    def forward(self, x):
        return td.tanh(x @ self.weight + self.bias)


def _own_forward(model, batch):
    return losses.mse(model(batch["x"]), batch["y"]), model(batch["x"])


def _own_backward(slope, scale: float = 1.0):
    def backward(model, batch, out):
        z = batch["x"] @ model.weight + model.bias
        ct = scale * 2 * (out - batch["y"]) * slope(z, out) / 6  # a number of the batch
        return {"weight": ct @ batch["x"], "bias": ct.sum()}

    return backward


OWN_SLOPES = {
    "by its result": lambda z, out: 1 - out * out,
    "otherwise": lambda z, out: 1 / td.square(td.cosh(z)),
}


@pytest.mark.parametrize("more", [{}, {"accumulate": 2}, {"accumulate": 2, "accumulation": "sum"}])
@pytest.mark.parametrize("slope", OWN_SLOPES)
def test_a_backward_of_a_step_is_compared_with_the_derivative(slope: str, more: dict) -> None:
    def compiled(backward, options=OWN_FULL) -> td.TrainStep:
        return td.compile_manual_step(
            _Tanh(), _own_forward, backward, td.optim.sgd(0.1), OWN_BATCH, device="cpu",
            options=options, **more,
        )  # fmt: skip

    step = compiled(_own_backward(OWN_SLOPES[slope]))
    (claim,) = [c for c in step.report.claims if c.kind == "gradient"]
    assert claim.is_established == (slope == "by its result")
    assert claim.is_established or "4 of 4 draws" in claim.reason
    for scale in (-1.0, 10.0, 1.001):
        with pytest.raises(td.GradientError, match=r"the backward is wrong: .* by weight is"):
            compiled(_own_backward(OWN_SLOPES[slope], scale))
    compiled(_own_backward(OWN_SLOPES[slope], -1.0), td.CompileOptions())


def _own_step(function) -> td.TrainStep:
    return td.compile_step(
        _Tanh(), lambda m, b: losses.mse(function(b["x"] @ m.weight + m.bias), b["y"]),
        td.optim.sgd(0.1), OWN_BATCH, device="cpu", options=OWN_FULL,
    )  # fmt: skip


def _symmetric(z):
    return td.linalg.solve(td.eye(6) * 4 + td.outer(z, z), td.ones((6,)))


OWN_RIGHT = {
    "sine": td.custom_vjp(lambda x: td.sin(x), lambda ct, out, x: (ct * td.cos(x),)),
    "of a number of the batch": td.custom_vjp(lambda x: x.mean() * td.ones((6,)), lambda ct, out, x: (ct.sum() / 6 * td.ones((6,)),)),
    "tanh": td.custom_vjp(lambda x: td.tanh(x), lambda ct, out, x: (ct / td.square(td.cosh(x)),)),
    "relu": td.custom_vjp(lambda x: td.relu(x), lambda ct, out, x: (td.where(out > 0, ct, 0.0),)),
    "logarithm": td.custom_vjp(lambda x: td.log(x), lambda ct, out, x: (ct / td.exp(out),)),
    "solve": _symmetric,
    "eigh": lambda z: td.linalg.eigh(td.eye(6) * 4 + td.outer(z, z))[0],
}  # fmt: skip
OWN_WRONG = {
    "sine": td.custom_vjp(lambda x: td.sin(x), lambda ct, out, x: (-ct * td.cos(x),)),
    "where it is negative": td.custom_vjp(lambda x: td.abs(x), lambda ct, out, x: (ct,)),
    "straight through": td.custom_vjp(lambda x: td.round(x * 4) / 4, lambda ct, out, x: (ct,)),
}


@pytest.mark.parametrize("name", OWN_RIGHT)
def test_a_right_backward_of_a_function_is_no_error(name: str) -> None:
    (claim,) = [c for c in _own_step(OWN_RIGHT[name]).report.claims if c.kind == "gradient"]
    assert claim.is_established or "compared in float64" in claim.reason


@pytest.mark.parametrize("name", OWN_WRONG)
def test_a_wrong_backward_of_a_function_is_named(name: str) -> None:
    with pytest.raises(td.GradientError, match=r'the backward of .* is wrong: .*verify="fast"'):
        _own_step(OWN_WRONG[name])


def test_a_wrong_kernel_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(toolchain, program, report):
        raise AssertionError("the stages after the schedule must not be reached")

    monkeypatch.setattr(stages, "built_of", spoiled)

    def wrong_schedule(self, graph, options):
        program = schedule(graph, True, 16, True)
        call = next(c for c in program.calls() if any(mutants(c.kernel)))
        _, kernel = next(m for m in mutants(call.kernel) if "load" in m[0] and _verifies(m[1]))
        return _with_call(program, call, replace(call, kernel=kernel))

    monkeypatch.setattr(CpuToolchain, "schedule", wrong_schedule)
    with pytest.raises(
        GraphError, match=r"kernel .* does not compute its part .*test_kernel_claims"
    ):
        _linear_step(td.CompileOptions(verify="full"))


def _verifies(kernel: Kernel) -> bool:
    try:
        verify(kernel)
    except TreadleError:
        return False
    return True
