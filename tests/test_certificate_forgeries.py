"""Forged certificates and wrong kernels that the checker must not accept."""

from __future__ import annotations

import itertools
import json
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle as td
from checked_programs import graphs_of, record_of
from test_certificate import changed, small_step, with_manifest
from test_lanes import kernel as lanes_kernel
from treadle.cli.main import main
from treadle.kernel.index import Var, variable
from treadle.kernel.nodes import For, Literal, Role, Store
from treadle.schedule.schedule import CPU, schedule
from treadle.verify.certificate.programs import kernel_record
from treadle_checker import randomness
from treadle_checker.certificate import check_bytes, check_file
from treadle_checker.coverage import Runs, Touched, is_covered, runs_of
from treadle_checker.field import Field
from treadle_checker.index import Atom, Index, read_index, summed
from treadle_checker.kernel_checks import check_program
from treadle_checker.program import read_kernel, read_program
from treadle_checker.races import check_races
from treadle_checker.reading import Rejected


@pytest.fixture(scope="module")
def data() -> bytes:
    return small_step().certificate.to_bytes()


# Signatures


def forged(data: bytes) -> bytes:
    signature = {"algorithm": "ed25519", "key": "ab" * 32, "value": "cd" * 64}
    return changed(data, lambda d: d.update(signature=signature))


def test_a_signature_that_cannot_be_verified(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `cryptography`: unreadable if the signature is demanded, else not established."""
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    demanded = check_bytes(forged(data), bytes.fromhex("ab" * 32), effort=0)
    assert (demanded.verdict, demanded.exit_code) == ("unreadable", 2)
    assert "cryptography is not installed" in demanded.reason
    read = check_bytes(forged(data))
    assert (read.verdict, read.exit_code) == ("accepted", 3), str(read)
    assert "not established: the key that it names has signed it" in str(read)


def test_a_forged_signature(data: bytes) -> None:
    pytest.importorskip("cryptography")
    assert check_bytes(forged(data), effort=0).exit_code == 1


# What a terminal is given

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\r\naccepted\ud800"


@pytest.mark.parametrize("name", ["treadle", "device", "stage", "rule", "program", "field"])
def test_control_characters_do_not_reach_a_terminal(name: str, data: bytes, tmp_path: Path) -> None:
    def change(m: dict[str, Any]) -> None:
        if name == "stage":
            m["passages"][0]["stage"] = HOSTILE
        elif name == "program":
            m["programs"][0]["name"] = HOSTILE
        elif name == "rule":
            words = {"name": HOSTILE, "statement": HOSTILE, "count": 1, "class": "exact"}
            m["rules"].append({**words, "status": "assumption"})
        else:
            m[name] = HOSTILE

    path = tmp_path / "hostile.cert"
    path.write_bytes(with_manifest(data, change))
    report = check_file(str(path), effort=0)
    for text in (str(report), json.dumps(report.record)):
        assert all(c.isprintable() or c == "\n" for c in text)
        assert "\naccepted" not in text
    python = [sys.executable, "-m", "treadle_checker", str(path), "--effort", "0"]
    ended = subprocess.run(python, capture_output=True, check=False)
    assert ended.returncode == report.exit_code
    assert not ended.stderr
    assert not set(ended.stdout) & {0x1B, 0x07, 0x0D, 0x9B}


# Randomness


def test_primes_keys_and_samples_are_drawn_by_each_run() -> None:
    seen = set[tuple[int, int, int]]()
    for _ in range(20):
        with randomness.seeded(randomness.fresh()):
            field = Field()
            sample = int(randomness.generator(2, 0, 7).integers(2**62))
            seen.add((field.p.modulus, field.p.key, sample))
    assert all(len(set(numbers)) == 20 for numbers in zip(*seen, strict=True))


def test_a_seed_repeats_a_run(data: bytes) -> None:
    first, again = check_bytes(data), check_bytes(data)
    assert first.seed != again.seed
    assert check_bytes(data, seed=first.seed).record == first.record
    assert "--seed" not in str(first)  # all of it holds
    left = check_bytes(data, effort=0)
    assert f"--seed {left.seed}" in str(left)


def test_the_command_takes_a_seed(
    data: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "step.cert"
    path.write_bytes(data)
    assert main(["check", str(path), "--effort", "0", "--seed", "7", "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["seed"] == 7


def test_no_factor_is_one_in_every_run() -> None:
    """A fraction that is 1 modulo the primes of one run is another number in the next."""
    with randomness.seeded(1):
        moduli = [Field(trial).p.modulus for trial in range(4)]
        forged_number = 1 - 2 * math.prod(moduli)
        assert all(Field(trial).p.number(forged_number) == 1 for trial in range(4))
    with randomness.seeded(2):
        assert all(Field(trial).p.number(forged_number) != 1 for trial in range(4))


# Races


def test_a_repeated_variable_is_merged() -> None:
    index = read_index([3, [1, "i"], [16, "j"], [-16, "j"], [2, "i"]])
    assert index.terms == ((3, "i"),)
    assert index.offset == 3


def test_iterations_that_store_to_one_element() -> None:
    """At i + 16j − 16j, with parallel i and sequential j, and the other way round."""
    for outer, inner in (("i", "j"), ("j", "i")):
        store = Store("y", variable(Var("i", 16)), Literal(0.0, td.float32))
        extents = {"i": 16, "j": 8}
        loop = For(Var(inner, extents[inner]), Role.SEQUENTIAL, (store,))
        record = kernel_record(
            lanes_kernel(For(Var(outer, extents[outer]), Role.PARALLEL, (loop,)))
        )
        (store_record,) = stores_of(record["body"])
        at = store_record.index([0, [1, "i"]])
        store_record[at] = [0, [1, "i"], [16, "j"], [-16, "j"]]
        if outer == "i":
            check_races(read_kernel(record))
        else:
            with pytest.raises(Rejected, match="may meet"):
                check_races(read_kernel(record))


def stores_of(body: Any) -> list[Any]:
    """All stores in a record."""
    if not isinstance(body, (list, dict)):
        return []
    if isinstance(body, list) and body[:1] == ["store"]:
        return [body]
    return [
        s for part in (body.values() if isinstance(body, dict) else body) for s in stores_of(part)
    ]


# What is never stored


def of_elements(body: list[Any], index: list[Any], extent: int) -> list[Any]:
    """The loop of an elementwise kernel, over other elements."""
    text = json.dumps(body).replace(json.dumps([0, [1, "i0"]]), json.dumps(index))
    (loop,) = json.loads(text)
    loop[2] = extent
    return loop


@pytest.mark.parametrize("index", [[1, [2, "i0"]], [32, [1, "i0"]]], ids=["even", "half"])
@pytest.mark.parametrize("effort", [0, 1])
def test_elements_that_are_never_stored(index: list[Any], effort: int) -> None:
    """Half of the elements are stored twice: as many stores as there are elements."""
    program = schedule(td.trace(td.exp, td.Spec((64,))), target=CPU)
    record = record_of(program, CPU)
    check_program(read_program(record), graphs_of(program), effort)
    (kernel,) = record["kernels"]
    kernel["body"] = [of_elements(kernel["body"], index, 32)] * 2
    with pytest.raises(Rejected, match="never stored"):
        check_program(read_program(record), graphs_of(program), effort)


def test_half_of_a_second_buffer_is_never_stored() -> None:
    """A right call of a kernel says nothing of another one of equal form that stores less."""
    graph = td.trace(lambda x, y: (td.exp(x), td.exp(y)), td.Spec((64,)), td.Spec((64,)))
    program = schedule(graph, fuse=False, target=CPU)
    record = record_of(program, CPU)
    calls = [call for step in record["steps"] for call in step[1]]
    claims = check_program(read_program(record), graphs_of(program))
    assert all(c.is_established for c in claims)
    half = json.loads(json.dumps(record["kernels"][calls[1][0]]))
    half["body"] = [of_elements(half["body"], [32, [1, "i0"]], 32)] * 2
    record["kernels"].append(half)
    calls[1][0] = len(record["kernels"]) - 1
    with pytest.raises(Rejected, match="never stored"):
        check_program(read_program(record), graphs_of(program))


def test_sets_of_addresses_agree_with_counting() -> None:
    """Random indices and guards of small loops, all of their iterations written out."""
    rng = random.Random(0)
    for _ in range(2000):
        extents = {name: rng.randint(1, 5) for name in "ijk"}
        terms: list[Any] = [(rng.choice([-3, -1, 0, 1, 2, 3, 4, 6, 12, 25]), n) for n in "ijk"]
        if rng.random() < 0.3:
            inner = Index(0, ((2, "i"), (1, "j")))
            terms.append((rng.choice([1, 7]), Atom("quotient", inner, 3)))
        factors = tuple((rng.choice([0, 1, 2, 5]), n) for n in "ijk" if rng.random() < 0.7)
        guard = (Index(rng.randint(-2, 2), factors), rng.randint(0, 3), rng.randint(3, 20))
        guards = (guard,) if rng.random() < 0.5 else ()
        index = summed(rng.randint(0, 9), terms)
        found = runs_of(Touched(index, extents, guards))
        wanted = set()
        for at in itertools.product(*map(range, extents.values())):
            values = {n: np.array(x) for n, x in zip(extents, at, strict=True)}
            if all(low <= i.at(values) < high for i, low, high in guards):
                wanted.add(int(index.at(values)))
        assert {int(s) + d for s in found.starts for d in range(found.length)} == wanted
        whole = Runs(np.array(sorted(wanted), np.int64), 1)
        assert is_covered(whole, [found])
        for left in sorted(wanted)[:3]:
            rest = np.array(sorted(wanted - {left}), np.int64)
            assert not is_covered(found, [Runs(rest, 1)])
