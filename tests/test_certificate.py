"""Certificates: what steps say of themselves, and what a program that knows no compiler says of them."""

from __future__ import annotations

import ast
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fuzz_certificates as fuzzing
import treadle as td
import treadle_checker
from treadle import losses, nn, optim
from treadle.base.errors import GraphError
from treadle.cli.main import main
from treadle.ir.graph import Graph
from treadle.ir.op import Attributes, Op
from treadle.ir.ops import reductions
from treadle.ir.types import TensorType
from treadle.verify.certificate.graphs import Records, type_record, use_record
from treadle_checker.certificate import Report, check_bytes
from treadle_checker.reading import MOST_BYTES, digest

CHECKER = Path(treadle_checker.__file__).parent


def small_step(options: td.CompileOptions | None = None, width: int = 2) -> td.TrainStep:
    batch = {"x": td.Spec((3, 4)), "y": td.Spec((3,), td.int32)}
    return td.compile_step(
        nn.Linear(4, width),
        lambda model, b: losses.cross_entropy(model(b["x"]), b["y"]),
        optim.sgd(0.1),
        batch,
        device="cpu",
        options=options,
    )


@pytest.fixture(scope="module")
def data() -> bytes:
    return small_step().certificate.to_bytes()


def changed(data: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    document = json.loads(data)
    change(document)
    return json.dumps(document).encode()


def manifest_of(data: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.loads(data)["manifest"])
    return found


def with_manifest(data: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    manifest = manifest_of(data)
    change(manifest)
    return fuzzing.with_manifest(json.loads(data), json.dumps(manifest))


def with_record(data: bytes, name: str, change: Callable[[Any], Any]) -> bytes:
    """Another record under a hash of its own, in all places."""
    document = json.loads(data)
    record = json.loads(document["records"][name])
    found = change(record)
    record = record if found is None else found
    return fuzzing.renamed(document, name, json.dumps(record))


def optimised_name(data: bytes) -> str:
    (found,) = (p["after"] for p in manifest_of(data)["passages"] if p["stage"] == "optimize")
    return str(found)


def test_a_step_has_a_certificate_that_is_accepted(data: bytes) -> None:
    report = check_bytes(data)
    assert (report.verdict, report.exit_code) == ("accepted", 0), str(report)
    told = str(report)
    for part in (
        "optimize equals",
        "gradients of the loss",
        "in bounds",
        "computes its part",
        "rounding",
    ):
        assert part in told
    assert report.record["claims"]
    assert json.dumps(report.record)


def test_claims_have_condition_evidence_and_scope() -> None:
    certificate = small_step().certificate
    assert {c.claim for c in certificate.claims} >= {
        "the graph after optimize equals the one before over the reals",
        "buffers that live at one time do not overlap",
    }
    assert all(c.evidence and c.scope for c in certificate.claims)
    left = [c for c in certificate.claims if not c.is_established]
    assert left
    assert "not claimed" in certificate.summary()
    assert "rounding" in certificate.summary()
    full = small_step(td.CompileOptions(verify="full")).certificate
    assert all(c.is_established for c in full.claims), full.summary()
    assert any("elements compared" in c.evidence for c in full.claims)


def test_a_step_from_the_plan_cache_has_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path))
    first, second = small_step(width=3), small_step(width=3)
    assert first.report.cache_hits == 0
    assert second.report.cache_hits == 1
    assert first.certificate.to_bytes() == second.certificate.to_bytes()


def test_off_says_that_nothing_was_looked_at() -> None:
    certificate = small_step(td.CompileOptions(verify="off")).certificate
    (one,) = (c for c in certificate.claims if "after optimize" in c.claim)
    assert not one.is_established
    assert "off" in one.evidence
    assert check_bytes(certificate.to_bytes()).verdict == "accepted"


def test_a_forward_program_has_one() -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.GELU())
    forward = td.compile_forward(module, lambda model, x: model(x), td.Spec((2, 4)), device="cpu")
    forward(np.ones((2, 4), np.float32))
    report = check_bytes(forward.certificate.to_bytes())
    assert report.exit_code == 0, str(report)


def test_saving_writes_aside(data: bytes, tmp_path: Path) -> None:
    step, path = small_step(), tmp_path / "step.cert"
    step.certificate.save(path)
    assert path.read_bytes() == step.certificate.to_bytes()
    assert [p.name for p in tmp_path.iterdir()] == ["step.cert"]
    with pytest.raises(td.TreadleError, match=r"certificate\.save"):
        step.certificate.save(tmp_path / "missing" / "x.cert")


# What is wrong.


def _as(value: object) -> Callable[[Any], Any]:
    return lambda _: value


HOSTILE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda d: b"", "unreadable"),
    "truncated": (lambda d: d[: len(d) // 2], "unreadable"),
    "huge": (lambda d: b" " * (MOST_BYTES + 1), "unreadable"),
    "many values": (lambda d: b"[" + b"0," * 2**23 + b"0]", "unreadable"),
    "deep": (lambda d: b"[" * 10**6, "unreadable"),
    "deep and closed": (lambda d: b"[" * 5000 + b"]" * 5000, "unreadable"),
    "a pickle": (lambda d: b"\x80\x04cos\nsystem\n.", "unreadable"),
    "twice": (lambda d: d.replace(b'"version":7', b'"version":7,"version":7'), "unreadable"),
    "NaN": (lambda d: d.replace(b'"version":7', b'"version":NaN'), "unreadable"),
    "digits": (lambda d: d.replace(b'"version":7', b'"version":7' + b"0" * 5000), "unreadable"),
    "version": (lambda d: changed(d, lambda x: x.update(version=1)), "unreadable"),
    "format": (lambda d: changed(d, lambda x: x.update(format="x")), "unreadable"),
    "field": (lambda d: changed(d, lambda x: x.update(more=1)), "unreadable"),
    "manifest": (lambda d: d.replace(b"float32", b"float64", 1), "rejected"),
    "no records": (lambda d: changed(d, lambda x: x.update(records={})), "rejected"),
    "records": (lambda d: changed(d, lambda x: x.update(records=[])), "unreadable"),
    "unused": (
        lambda d: changed(d, lambda x: x["records"].update({digest(b"1"): "1"})),
        "rejected",
    ),
    "relation": (
        lambda d: with_manifest(d, lambda m: m["passages"][0].update(relation="similar")),
        "unreadable",
    ),
    "rule": (
        lambda d: with_manifest(d, lambda m: m["rules"][0].update(status="sure")),
        "unreadable",
    ),
    "no passages": (lambda d: with_manifest(d, lambda m: m.update(passages=[])), "rejected"),
    "another graph": (
        lambda d: with_manifest(
            d, lambda m: m["programs"][0].update(graph=m["traced"][0], graphs={})
        ),
        "unreadable",
    ),
    "not linked": (
        lambda d: with_manifest(
            d,
            lambda m: m["passages"].remove(next(p for p in m["passages"] if p["stage"] == "step")),
        ),
        "rejected",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_at_once(name: str, data: bytes) -> None:
    make, verdict = HOSTILE[name]
    given, start = make(data), time.perf_counter()
    report = check_bytes(given)
    assert report.verdict == verdict, str(report)
    assert report.exit_code == {"rejected": 1, "unreadable": 2}[verdict]
    assert time.perf_counter() - start < 30


def _set_node(position: int, **parts: Any) -> Callable[[Any], None]:
    names = ("op", "attributes", "operands", "types", "line")

    def change(record: Any) -> None:
        for name, value in parts.items():
            record["nodes"][position][names.index(name)] = value

    return change


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (_set_node(-1, op="evaluate"), "unreadable"),
        (_set_node(0, operands=[[5, 0]]), "unreadable"),
        (_set_node(-1, operands=[[10**9, 0]]), "unreadable"),
        (_set_node(0, types=[["float32", [2**62]]]), "unreadable"),
        (_set_node(0, types=[["float32", [2, 5]]]), "rejected"),
        (_set_node(0, types=[["complex64", [2, 4]]]), "unreadable"),
        (_set_node(0, attributes={"name": "w"}), "unreadable"),
        (_set_node(0, line=10**6), "unreadable"),
        (_as([]), "unreadable"),
        (_as({"nodes": []}), "unreadable"),
    ],
)
def test_records_that_lie_are_refused(
    change: Callable[[Any], Any], verdict: str, data: bytes
) -> None:
    report = check_bytes(with_record(data, optimised_name(data), change))
    assert report.verdict == verdict, str(report)


def without_updates(data: bytes, part: str, names: list[str]) -> bytes:
    """Its program with a record, `part`, that knows nothing of updates of some parameters."""
    program = manifest_of(data)["programs"][0]

    def change(record: Any) -> None:
        """Outputs are kind, name and value in graphs, and name, value and buffer in programs."""
        gone = [["update", name] for name in names] + [[name, name] for name in names]
        record["outputs"] = [
            o for o in record["outputs"] if o[:2] not in gone and o[::2] not in gone
        ]

    return with_record(
        data, program["graphs"][""] if part == "scheduled" else program[part], change
    )


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["weight"], "the outputs differ: .*'weight'"),
        (["weight", "bias", "step0:count"], "no program makes them"),
    ],
)
def test_a_parameter_that_is_trained_no_more_is_missed(
    names: list[str], told: str, data: bytes
) -> None:
    """However many records say nothing of its update."""
    found = without_updates(data, "program", names)
    assert "outputs of the program" in check_bytes(found, effort=0).reason
    for part in ("graph", "scheduled"):
        found = without_updates(found, part, names)
    report = check_bytes(found, effort=0)
    assert report.verdict == "rejected", str(report)
    assert re.search(told, report.reason), str(report)


def test_a_changed_text_has_another_hash(data: bytes) -> None:
    text = data.decode()
    at = text.index("contract")
    report = check_bytes((text[:at] + "kontract" + text[at + 8 :]).encode())
    assert report.verdict == "rejected"
    assert "content" in report.reason


def huge_reduction(data: bytes, use: list[Any], reduced: list[Any], size: int) -> bytes:
    """A stage that puts a sum over very many elements in place of another."""

    def graph(first: int) -> dict[str, Any]:
        leaf = ["input", {"name": "x", "type": ["float32", [size]]}, [], [["float32", [size]]], -1]
        nodes = [leaf, ["neg", {}, [[0, 0]], leaf[3], -1], ["exp", {}, [[1, 0]], leaf[3], -1]]
        nodes.append([*use, [[first, 0]], [reduced], -1])
        return {"name": "huge", "lines": [], "nodes": nodes, "outputs": [["result", "0", [3, 0]]]}

    texts = [json.dumps(r) for r in (graph(1), graph(2), [[3, 0, 3, 0]])]
    names = [digest(t.encode()) for t in texts]

    def change(m: dict[str, Any]) -> None:
        passage = dict.fromkeys(("cotangents", "plan"), "") | {"frozen": [], "assumptions": []}
        passage |= dict(zip(("before", "after", "pairs"), names, strict=True))
        m["passages"].append({**passage, "stage": "huge", "relation": "equal"})

    grown = changed(data, lambda d: d["records"].update(zip(names, texts, strict=True)))
    return with_manifest(grown, change)


@pytest.mark.parametrize(
    ("op", "attributes"),
    [
        (reductions.REDUCE_SUM, reductions.Reduce((0,))),
        (reductions.REDUCE_MAX, reductions.Reduce((0,))),
        (reductions.ARGMAX, reductions.ArgReduce(0)),
        (reductions.CUMSUM, reductions.Cumulate(0)),
    ],
    ids=lambda given: getattr(given, "name", ""),
)
def test_sizes_bound_the_time(op: Op, attributes: Attributes, data: bytes) -> None:
    """Tensors of a trillion elements are compared at a few, or not at all."""
    start, size = time.perf_counter(), 2**40
    type_ = TensorType((size,), td.float32)
    name, record, _ = use_record(op, attributes, (type_,), Records())
    (result,) = op.infer(attributes, type_)
    given = huge_reduction(data, [name, record], type_record(result), size)
    report = check_bytes(given, effort=0)
    assert report.exit_code in (1, 3), str(report)
    assert time.perf_counter() - start < 30


SWAPS = {"sub": "add", "add": "sub", "mul": "add", "div": "mul", "exp": "tanh", "neg": "abs"}


def verdicts_of(data: bytes, step: int) -> list[str]:
    """Of certificates in which a node of the optimised graph computes something else."""
    name = optimised_name(data)
    nodes = json.loads(json.loads(data)["records"][name])["nodes"]
    wrong = [(i, SWAPS[node[0]]) for i, node in enumerate(nodes) if node[0] in SWAPS]
    given = (with_record(data, name, _set_node(i, op=op)) for i, op in wrong[::step])
    return [check_bytes(g, effort=0).verdict for g in given]


def test_some_wrong_graphs_are_rejected_although_all_hashes_are_right(data: bytes) -> None:
    assert verdicts_of(data, 8) == ["rejected"] * 3


@pytest.mark.slow
def test_wrong_graphs_are_rejected_although_all_hashes_are_right(data: bytes) -> None:
    """Three of them change nothing: two divide by one, and one is the shift of a softmax."""
    found = verdicts_of(data, 1)
    assert (len(found), found.count("rejected")) == (23, 20)


def test_a_wrong_gradient_is_rejected(data: bytes) -> None:
    passages = {p["relation"]: p for p in manifest_of(data)["passages"]}

    def change(r: Any) -> None:
        """Twice the gradient of the bias."""
        (at,) = (o[2][0] for o in r["outputs"] if o[:2] == ["gradient", "bias"])
        types, line = r["nodes"][at][3:]
        r["nodes"].append(["add", {}, [[at, 0], [at, 0]], types, line])
        for output in r["outputs"]:
            if output[:2] == ["gradient", "bias"]:
                output[2] = [len(r["nodes"]) - 1, 0]

    report = check_bytes(with_record(data, passages["gradients"]["after"], change), effort=0)
    assert report.verdict == "rejected", str(report)
    assert "the gradient 'bias' could not be shown" in report.reason


def test_a_wrong_stage_is_an_error_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the stage and the line of the model."""
    import treadle.pipeline as pipeline

    right = pipeline.optimize

    def wrong(graph: Graph, *arguments: Any, **named: Any) -> Graph:
        found = right(graph, *arguments, **named)
        nodes = list(found.nodes)
        at = max(i for i, n in enumerate(nodes) if n.op.name == "sub")
        from treadle.ir.ops.elementwise import ADD

        old = nodes[at]
        nodes[at] = type(old)(ADD, old.attributes, old.operands, old.types, old.origin)
        return Graph(tuple(nodes), found.outputs, found.name)

    monkeypatch.setattr(pipeline, "optimize", wrong)
    with pytest.raises(GraphError, match=r"optimize.*test_certificate\.py"):
        small_step()
    small_step(td.CompileOptions(verify="off"))


# The checker by itself.


def checker_modules() -> list[Path]:
    return sorted(CHECKER.glob("*.py"))


def test_the_pages_say_how_long_the_checker_is() -> None:
    lines = sum(len(path.read_text().splitlines()) for path in checker_modules())
    for page in ("certificate.md", "not-claimed.md"):
        text = (CHECKER.parent.parent / "docs" / page).read_text()
        (told,) = re.findall(r"([\d,]+) lines of Python", text)
        assert abs(int(told.replace(",", "")) - lines) < lines / 10


def test_the_checker_imports_numpy_and_python_alone() -> None:
    allowed = {*sys.stdlib_module_names, "numpy", "treadle_checker"}
    for path in checker_modules():
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                top = name.partition(".")[0]
                late = top == "cryptography" and path.name == "certificate.py"
                assert top in allowed or late, f"{path.name} imports {name}"
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            assert not is_call or node.func.id not in ("eval", "exec", "__import__", "compile")


def test_the_checker_runs_where_treadle_cannot_be_imported(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "step.cert"
    path.write_bytes(data)
    blocked = (
        "import sys; sys.modules.update(treadle=None, ml_dtypes=None, llvmlite=None, torch=None);"
        "from treadle_checker.__main__ import main; code = main(sys.argv[1:]);"
        "assert not [m for m in sys.modules if m.partition('.')[0] == 'treadle' and sys.modules[m]];"
        "sys.exit(code)"
    )
    environment = {**os.environ, "PYTHONPATH": str(CHECKER.parent)}

    def ran(*arguments: str) -> subprocess.CompletedProcess[str]:
        given = [sys.executable, "-c", blocked, *arguments]
        return subprocess.run(given, capture_output=True, text=True, env=environment, check=False)

    found = ran(str(path), "--json")
    assert found.returncode == 0, found.stdout + found.stderr
    assert json.loads(found.stdout)["verdict"] == "accepted"


def test_the_command(data: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "step.cert"
    path.write_bytes(data)
    assert main(["check", str(path), "--effort", "0"]) == 3
    assert "accepted" in capsys.readouterr().out
    path.write_bytes(data[:1000])
    assert main(["check", str(path), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["verdict"] == "unreadable"
    assert main(["check", str(tmp_path / "missing")]) == 2
    assert main(["check", str(tmp_path)]) == 2


def test_signatures(data: bytes, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    public = key.public_key().public_bytes_raw()
    signed = small_step().certificate.to_bytes(key=key.private_bytes_raw())

    def checked(given: bytes, with_key: bytes | None) -> Report:
        return check_bytes(given, with_key, effort=0)

    assert checked(signed, public).signature == "by the key that was given"
    assert "nobody" in checked(signed, None).signature
    other = Ed25519PrivateKey.generate().public_key().public_bytes_raw()
    assert checked(signed, other).verdict == "rejected"
    assert checked(data, public).verdict == "rejected"  # not signed
    forged = with_manifest(signed, lambda m: m.update(device="gpu"))
    assert checked(forged, public).reason == "its signature is wrong"
    with pytest.raises(td.TreadleError, match="key"):
        small_step().certificate.save(tmp_path / "x", key=b"short")


def test_damaged_certificates(data: bytes) -> None:
    """A few; tools/fuzz_certificates.py gives it as many as one likes."""
    for _, given in fuzzing.inputs(data, 120, seed=int(os.environ.get("SEED", "1"))):
        report = check_bytes(given, effort=0)
        assert report.verdict in ("accepted", "rejected", "unreadable")


@pytest.mark.slow
def test_many_damaged_certificates(data: bytes) -> None:
    for _, given in fuzzing.inputs(data, 20_000, seed=2):
        start = time.perf_counter()
        check_bytes(given, effort=0)
        assert time.perf_counter() - start < fuzzing.LIMIT


def test_damage_is_the_same_for_a_seed(data: bytes) -> None:
    first, second = (list(fuzzing.inputs(data, 20, seed=3)) for _ in range(2))
    assert first == second
    assert fuzzing.damaged([1, 2], random.Random(0)) is not None


def test_the_checker_can_be_read() -> None:
    """Its files are short enough for one sitting each."""
    assert max(len(path.read_text().splitlines()) for path in checker_modules()) <= 440


def test_sizes_of_tensors_are_recorded_as_integers() -> None:
    """A tensor's size can be called; graphs are compared with numbers as a file would have them."""

    def written_out(x, y):
        grid = td.meshgrid(x, y, indexing="xy")[0]  # which takes sizes for a shape
        weights = td.exp(grid)
        return weights / weights.sum(-1, keepdims=True)

    program = td.compile(written_out, td.Spec((3,)), td.Spec((4,)), device="cpu")
    assert [found.name for found in program.report.recognised] == ["softmax"]
