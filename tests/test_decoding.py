"""One more token: values of two bytes, caches that are looked at in part, and their kernels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle as td
from cuda_on_host import run_on_host
from treadle import models
from treadle.base import dtypes
from treadle.kernel.nodes import library_call_of, standalone_matmul
from treadle.kernel.program import phases_of
from treadle.kernel.target import CPU, GPU
from treadle.models import decoding
from treadle.models.decoding import WithCaches, reach_of
from treadle.runtime.held import Room
from treadle.runtime.oracle import OracleProgram
from treadle.schedule.schedule import schedule

CONFIG = models.LlamaConfig(
    vocab_size=1100,  # the best of as many is found by reductions
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=6,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
PROMPT = np.arange(3, 12)


def llama(**sizes: int) -> Any:
    model = models.Llama(replace(CONFIG, **sizes))
    rng = np.random.default_rng(0)
    shapes = {n: d.shape for n, d in model.declarations().items()}
    model.start_from({n: rng.normal(size=s).astype(np.float32) * 0.2 for n, s in shapes.items()})
    model.device = "cpu"
    return model


def rounded(model: Any) -> Any:
    """The same values as bfloat16 has them, in four bytes."""
    bfloat16 = dtypes.bfloat16.numpy
    held = {n: v.astype(bfloat16).astype(np.float32) for n, v in model.values().items()}
    model.start_from(held)
    return model


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_values_of_two_bytes_are_their_rounded_selves(kind: str) -> None:
    """GPT-2 has its weights the other way round: (in, out)."""

    def make() -> Any:
        if kind == "llama":
            return llama()
        sizes = {"vocab_size": 60, "n_positions": 64, "n_embd": 32, "n_layer": 1, "n_head": 4}
        model = models.GPT2(models.GPT2Config(**sizes))
        model.device = "cpu"
        return model

    narrow, wide = make().hold("bfloat16"), rounded(make())
    tokens = PROMPT[None].astype(np.int32)
    np.testing.assert_allclose(narrow(tokens), wide(tokens), 2e-5, 2e-5)
    types = narrow._running.session.types
    assert {types[n].dtype for n, _ in narrow.named_parameters()} == {dtypes.bfloat16}


def test_a_token_reads_weights_as_they_lie() -> None:
    """No copy of a weight in four bytes: beside the weights hardly anything is held."""
    program = schedule(graph_of("bfloat16"), in_place=True, target=CPU)
    made = {a.buffer for call in program.calls() for a in call.written}
    largest = max(b.size for b in program.buffers if b.name in made and ".keys" not in b.name)
    assert largest <= max(CONFIG.vocab_size, 64 * 2 * 8)


def test_narrow_values_are_saved_and_read(tmp_path: Path) -> None:
    model = llama().hold(td.bfloat16)
    models.save(model, tmp_path)
    back = models.load(tmp_path, device="cpu", dtype="bfloat16")
    for name, value in model.values().items():
        assert value.dtype.itemsize == 2
        assert np.array_equal(value, back.values()[name])
    assert '"dtype": "bfloat16"' in (tmp_path / "config.json").read_text()
    assert np.array_equal(back.generate(PROMPT, 3), model.generate(PROMPT, 3))
    with pytest.raises(td.ArgumentError, match="'int8' is not a dtype for values"):
        models.load(tmp_path, dtype="int8")


def test_slots_that_are_not_written_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "NEAREST", 16)
    model = llama()
    found = model.generate(PROMPT, 40, eos_token_id=())
    programs = model._programs[-1]._programs
    assert {reach for _, tokens, reach in programs if tokens == 1} == {32, 64}
    monkeypatch.setattr(decoding, "NEAREST", 256)
    again = llama().generate(PROMPT, 40, eos_token_id=())
    assert np.array_equal(found, again)


def test_numbers_of_slots() -> None:
    assert [reach_of(n, 4096) for n in (1, 256, 257, 513, 4000)] == [256, 256, 512, 1024, 4096]
    assert reach_of(70, 64 * 3) == 192


def graph_of(held: str, precision: str = "float32", **sizes: int) -> Any:
    """One more token, of 64 slots."""
    model = llama(**sizes).hold(held)
    model.precision, model.device = precision, "oracle"
    module = WithCaches(model, 1, 64)
    batch = {"tokens": td.Spec((1, 1), td.int32), "at": td.Spec((), td.int32)}
    batch["first"] = td.Spec((1,), td.int32)

    def run(m: Any, given: Any) -> Any:
        return m.likeliest(given, 64)

    options = td.CompileOptions(check_indices=False)
    program = td.compile_forward(
        module, run, batch, device="oracle", precision=precision, options=options
    )
    return program.graph


def test_a_gpu_has_few_launches_and_no_library_call() -> None:
    target = replace(GPU, has_attention=True, mapping=replace(GPU.mapping, light=0))
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9}
    sizes |= {"num_key_value_heads": 3, "num_hidden_layers": 2}
    graph = graph_of("bfloat16", "bfloat16", **sizes)
    program = schedule(graph, in_place=True, target=target)
    assert not any(library_call_of(k) or standalone_matmul(k) for k in program.distinct())
    calls = sum(len(phase.calls) for phase, _ in phases_of(program.steps))
    joint = sum(sum(n for _, n in run.phases[0]) - 1 for run in program.cooperative)
    assert calls - joint <= 2 * 10 + 8  # ten of each layer, and those around
    functions = {run.symbol for run in program.cooperative}
    assert len(functions) < len(program.cooperative)  # layers share them


@pytest.mark.slow
def test_kernels_of_a_gpu_compute_a_token() -> None:
    """Their text, run here, with kernels of a phase as one launch."""
    graph = graph_of("bfloat16", "float32", num_hidden_layers=2)
    target = replace(GPU, mapping=replace(GPU.mapping, light=0))
    program = schedule(graph, in_place=True, target=target)
    assert program.cooperative
    rng = np.random.default_rng(3)
    arrays = {}
    for name, type_ in program.leaves:
        arrays[name] = (rng.normal(size=type_.shape) * 0.2).astype(type_.dtype.numpy)
    arrays["batch:tokens"], arrays["batch:at"] = np.array([[7]]), np.array(20, np.int32)
    arrays["batch:first"] = np.array([2], np.int32)
    wanted = OracleProgram(graph).run(arrays)
    for output, ours, exact in zip(graph.outputs, run_on_host(program, arrays), wanted):
        exact = np.asarray(exact, np.float32)
        np.testing.assert_allclose(ours.astype(np.float32), exact, 1e-3, 1e-3, err_msg=output.name)


def test_values_that_are_written_together_lie_together() -> None:
    rng = np.random.default_rng(0)
    room = Room()
    shapes = [(300, 200), (7,), (129, 257), (3, 0), (1100, 1000)]
    given = [rng.normal(size=s).astype(np.float32) for s in shapes]
    found = [room.copy(a) for a in given]
    for ours, theirs in zip(found, given, strict=True):
        assert np.array_equal(ours, theirs)
        assert ours.ctypes.data % 64 == 0 or not ours.size
        assert ours.flags.c_contiguous
    blocks = [a.base is found[0].base for a in found]
    assert blocks == [True, False, True, False, False]  # small and large ones are by themselves
    full = [room.copy(np.ones((1 << 19,), np.float32)) for _ in range(17)]
    assert len({id(a.base) for a in full}) == 2
