"""Bugs put into the compiler, and forged files: neither gets a certificate."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest

import fuzz_certificates as fuzzing
import treadle as td
import treadle.optim.append as append
import treadle.pipeline as pipeline
from treadle import losses, nn, optim
from treadle.autodiff.backward import VJP, Differentiated
from treadle.base.errors import GraphError
from treadle.frontend.coerce import constant
from treadle.frontend.scopes import isolated_tracing
from treadle.ir.graph import Graph, Output, OutputKind
from treadle.ir.ops import elementwise
from treadle.ir.rewrite import inline_into
from treadle.verify.certificate import replay
from treadle_checker.certificate import check_bytes
from treadle_checker.reading import Rejected

UNCHECKED = td.CompileOptions(verify="off")


def compiled(optimizer: Any = None, **more: Any) -> td.TrainStep:
    """Two layers of one width: their biases have one type."""
    batch = {"x": td.Spec((6, 4)), "y": td.Spec((6,), td.int32)}
    return td.compile_step(
        nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)),
        lambda model, b: losses.cross_entropy(model(b["x"]), b["y"]),
        optimizer or optim.adamw(1e-3),
        batch,
        device="cpu",
        **more,
    )


def with_outputs(
    graph: Graph, change: Callable[[dict[tuple[OutputKind, str], Any]], None]
) -> Graph:
    """A graph whose outputs are others; what they are may be changed in a trace."""
    with isolated_tracing(graph.name) as trace:
        values = inline_into(trace.builder, graph, {})
        named = {
            (o.kind, o.name): trace.tensor(v) for o, v in zip(graph.outputs, values, strict=True)
        }
        change(named)
        return trace.finish_outputs([Output(k, n, t.handle) for (k, n), t in named.items()])


GRADIENT, RESULT, UPDATE = OutputKind.GRADIENT, OutputKind.RESULT, OutputKind.UPDATE


def swap_biases(named: dict[tuple[OutputKind, str], Any]) -> None:
    a, b = (key for key in named if key[0] is GRADIENT and key[1].endswith("bias"))
    named[a], named[b] = named[b], named[a]


def negate_gradients(named: dict[tuple[OutputKind, str], Any]) -> None:
    for key in (k for k in named if k[0] is GRADIENT):
        named[key] = -named[key]


def drop_a_gradient(named: dict[tuple[OutputKind, str], Any]) -> None:
    del named[next(k for k in named if k[0] is GRADIENT)]


def zero_the_loss(named: dict[tuple[OutputKind, str], Any]) -> None:
    named[RESULT, "loss"] = named[RESULT, "loss"] * 0


def swap_updates(named: dict[tuple[OutputKind, str], Any]) -> None:
    a, b = (
        key for key in named if key[0] is UPDATE and key[1].endswith("bias") and ":" not in key[1]
    )
    named[a], named[b] = named[b], named[a]


def keep_a_parameter(named: dict[tuple[OutputKind, str], Any]) -> None:
    del named[next(k for k in named if k[0] is UPDATE and k[1].endswith("weight"))]


def write_one_more(named: dict[tuple[OutputKind, str], Any]) -> None:
    named[UPDATE, "another"] = constant(1.0)


DIFFERENTIATED = [swap_biases, negate_gradients, drop_a_gradient]
APPENDED = [zero_the_loss, swap_updates, keep_a_parameter, write_one_more]


def break_stage(monkeypatch: pytest.MonkeyPatch, change: Callable[..., None]) -> None:
    """A compiler in which a stage's result is changed, in the stage that the change is of."""
    if change in DIFFERENTIATED:
        right = pipeline.differentiate

        def differentiated(graph: Graph, wrt: Any) -> Differentiated:
            found = right(graph, wrt)
            return dataclasses.replace(found, graph=with_outputs(found.graph, change))

        monkeypatch.setattr(pipeline, "differentiate", differentiated)
    else:
        made = pipeline.append_updates
        monkeypatch.setattr(
            pipeline, "append_updates", lambda *given: with_outputs(made(*given), change)
        )


@pytest.mark.parametrize("change", [*DIFFERENTIATED, *APPENDED])
def test_a_default_compile_refuses_a_wrong_stage(
    change: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_stage(monkeypatch, change)
    with pytest.raises(GraphError, match="not those of the loss|another step"):
        compiled()


@pytest.mark.parametrize("change", [*DIFFERENTIATED, *APPENDED])
def test_no_certificate_of_a_wrong_stage(
    change: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_stage(monkeypatch, change)
    report = check_bytes(compiled(options=UNCHECKED).certificate.to_bytes(), effort=0)
    assert report.exit_code == 1, str(report)


def test_the_right_compiler_is_accepted() -> None:
    report = check_bytes(compiled().certificate.to_bytes())
    assert report.exit_code == 0, str(report)
    assert "the update is adamw as the checker defines it" in str(report)


OPTIMIZERS = {
    "sgd": lambda: optim.sgd(0.1),
    "momentum": lambda: optim.sgd(0.1, momentum=0.9),
    "nesterov": lambda: optim.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optim.adam(1e-3, weight_decay=0.1),
    "amsgrad": lambda: optim.adamw(1e-3, amsgrad=True, decay="*weight"),
    "adagrad": lambda: optim.adagrad(1e-2, lr_decay=0.1),
    "rmsprop": lambda: optim.rmsprop(1e-2),
    "centered": lambda: optim.rmsprop(1e-2, centered=True, momentum=0.9),
    "adadelta": lambda: optim.adadelta(),
    "lion": lambda: optim.lion(1e-4, weight_decay=0.1),
    "a schedule": lambda: optim.adamw(optim.cosine(1e-3, 100)),
    "maximize": lambda: optim.adam(1e-3, maximize=True),
    "a chain": lambda: optim.chain(optim.clip_by_value(1.0), optim.adam(1e-3)),
    "another": lambda: optim.nadam(1e-3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_of_optimizers_are_established(name: str) -> None:
    step = compiled(OPTIMIZERS[name]())
    report = check_bytes(step.certificate.to_bytes(), effort=0)
    left = [c for c in report.claims if not c.is_established]
    assert {c.claim for c in left} == {"its kernels compute its graph"}, str(report)


@pytest.mark.parametrize("more", [{"accumulate": 3}, {"clip_norm": 1.0}, {"precision": "float16"}])
def test_ways_to_train_are_established(more: dict[str, Any]) -> None:
    step = compiled(**more)
    report = check_bytes(step.certificate.to_bytes(), effort=0)
    left = [c for c in report.claims if not c.is_established]
    assert {c.claim for c in left} == {"its kernels compute its graph"}, str(report)


def test_a_wrong_clip_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(append, "scaled_to_norm", lambda gradients, norm, limit: gradients)
    with pytest.raises(GraphError, match="another step"):
        compiled(clip_norm=1.0)


def test_a_wrong_optimizer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own formula is not what it is compared with."""
    from treadle.optim import standard

    monkeypatch.setattr(standard, "corrected_root", lambda one, v: v)
    with pytest.raises(GraphError, match="another step"):
        compiled(optim.adam(1e-3))


def test_a_wrong_derivative_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the sizes of the step: of one batch size alone, too."""
    right = VJP[elementwise.TANH]

    def wrong(ct: Any, out: Any, x: Any) -> Any:
        return (ct,) if out.shape[0] == 6 else right(ct, out, x)

    monkeypatch.setitem(VJP._entries, elementwise.TANH, wrong)
    with pytest.raises(GraphError, match="not those of the loss"):
        compiled()


# Files


def forged(change: Callable[[dict[str, Any]], None], data: bytes) -> bytes:
    """A file with another manifest; records that nothing uses are gone, and all hashes right."""
    document = json.loads(data)
    manifest = json.loads(document["manifest"])
    change(manifest)
    used: set[str] = set()

    def note(value: Any) -> None:
        if isinstance(value, str):
            used.add(value) if value in document["records"] and value not in used else None
        for part in (
            value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        ):
            note(part)

    note(manifest)
    while True:
        before = len(used)
        for name in list(used):
            note(json.loads(document["records"][name]))
        if len(used) == before:
            break
    document["records"] = {n: t for n, t in document["records"].items() if n in used}
    return fuzzing.with_manifest(document, json.dumps(manifest))


def _without(*relations: str) -> Callable[[dict[str, Any]], None]:
    def change(m: dict[str, Any]) -> None:
        m["passages"] = [p for p in m["passages"] if p["relation"] not in relations]

    return change


def _later_trace(m: dict[str, Any]) -> None:
    """The graph with gradients is what was traced, it says."""
    (at,) = (i for i, p in enumerate(m["passages"]) if p["relation"] == "updates")
    m["traced"] = [m["passages"][at]["before"]]
    m["passages"] = m["passages"][at:]


FORGED: dict[str, Callable[[dict[str, Any]], None]] = {
    "no gradients": _without("gradients"),
    "no updates": _without("updates"),
    "no programs": lambda m: m.update(programs=[]),
    "a later trace": _later_trace,
    "frozen": lambda m: next(p for p in m["passages"] if p["relation"] == "gradients").update(
        frozen=["0.weight"]
    ),
}


@pytest.fixture(scope="module")
def data() -> bytes:
    return compiled().certificate.to_bytes()


@pytest.mark.parametrize("name", FORGED)
def test_files_without_a_part_are_not_accepted(name: str, data: bytes) -> None:
    """Rejected, or the claim that what was traced leads to the program is not established."""
    report = check_bytes(forged(FORGED[name], data), effort=0)
    reasons = [c.reason for c in report.claims if c.claim.startswith("it comes from")]
    assert report.verdict == "rejected" or any(reasons), str(report)


def test_names_are_data() -> None:
    """Parameters whose names look like dtypes are not one."""

    class Two(nn.Module):
        def __init__(self) -> None:
            self.float_a, self.float_b = nn.Parameter((4,)), nn.Parameter((4,))

        def forward(self, x: td.Tensor) -> td.Tensor:
            return (td.tanh(x * self.float_a) - x * x * self.float_b).sum()

    step = td.compile_step(
        Two(), lambda m, b: m(b["x"]), optim.sgd(0.1), {"x": td.Spec((4,))}, device="cpu",
        options=UNCHECKED,
    )  # fmt: skip
    data = step.certificate.to_bytes()
    assert check_bytes(data, effort=0).verdict == "accepted"
    passages = {p["stage"]: p for p in json.loads(json.loads(data)["manifest"])["passages"]}
    document = json.loads(data)
    name = passages["optimize"]["after"]
    text = document["records"][name]
    swapped = text.replace("float_a", "@").replace("float_b", "float_a").replace("@", "float_b")
    report = check_bytes(fuzzing.renamed(document, name, swapped), effort=0)
    assert report.verdict == "rejected", str(report)


class Function(nn.Module):
    """A loss of one parameter."""

    def __init__(self, loss: Callable[[td.Tensor], td.Tensor], shape: tuple[int, ...]):
        self.w, self.loss = nn.Parameter(shape), loss

    def forward(self) -> td.Tensor:
        return self.loss(self.w)


def positive(w: td.Tensor) -> td.Tensor:
    return w @ w.T + td.eye(w.shape[0]) * 3


LINALG: dict[str, tuple[Callable[[td.Tensor], td.Tensor], tuple[int, ...]]] = {
    "cholesky of one": (lambda w: td.linalg.cholesky(positive(w)).sum(), (1, 1)),
    "cholesky": (lambda w: (td.linalg.cholesky(positive(w)) ** 2).sum(), (3, 3)),
    "slogdet": (lambda w: td.linalg.slogdet(positive(w))[1], (3, 3)),
    "qr": (lambda w: (td.linalg.qr(w)[1] ** 3).sum(), (4, 3)),
    "eigvalsh": (lambda w: (td.linalg.eigvalsh(positive(w)) ** 2).sum(), (3, 3)),
    "solve": (lambda w: (td.linalg.solve(positive(w), w) ** 2).sum(), (3, 3)),
}


@pytest.mark.parametrize("name", LINALG)
def test_gradients_through_linear_algebra_are_accepted(name: str) -> None:
    """They have gradients of their own, and the claim is under the condition that these are right."""
    options = td.CompileOptions(verify="full")
    model = Function(*LINALG[name])
    step = td.compile_step(
        model, lambda m, b: m(), optim.sgd(0.1), {}, device="cpu", options=options
    )
    (known,) = (c for c in step.report.claims if c.kind == "gradient")
    assert known.is_established or "float64 alone" in known.reason, known.reason
    report = check_bytes(step.certificate.to_bytes(), effort=0)
    assert report.verdict == "accepted", str(report)
    (claim,) = (c for c in report.claims if "gradients of the loss" in c.claim)
    assert claim.is_established
    assert "is the one that it has in the file" in claim.condition


def test_labels_are_drawn_where_they_have_a_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right gradients of a head over classes are not refused, nor left to the second opinion."""

    def loss(model: Any, batch: Any) -> td.Tensor:
        return losses.linear_cross_entropy(batch["x"], model["w"], batch["y"])

    def unexpected(passage: Any) -> bool:
        raise AssertionError(passage.stage)

    monkeypatch.setattr(replay, "_is_right", unexpected)
    batch = {"x": td.Spec((3, 2)), "y": td.Spec((3,), td.int32)}
    for classes in (2, 5):
        model = {"w": nn.Parameter((classes, 2))}
        td.compile_step(model, loss, optim.sgd(0.1), batch, device="oracle")


def test_a_refusal_has_a_second_opinion(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the checker takes for wrong and forward mode finds right is not established."""

    def rejected(*arguments: Any) -> None:
        raise Rejected("a value differs")

    monkeypatch.setattr(replay, "check_derived", rejected)
    model = {"w": nn.Parameter((3, 2))}
    step = td.compile_step(
        model, lambda m, x: td.tanh(x @ m["w"].T).mean(), optim.sgd(0.1), td.Spec((4, 2)),
        device="oracle",
    )  # fmt: skip
    reasons = [p.reason or "" for p in step.report.evidence.passages]
    assert any("forward mode finds no difference" in reason for reason in reasons)
