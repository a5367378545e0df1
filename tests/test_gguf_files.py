"""GGUF files that are damaged, hostile or lie: clear errors, little time and memory."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import treadle as td
from treadle import models
from treadle.interop import gguf

CONFIG = models.LlamaConfig(
    vocab_size=8,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    head_dim=16,
    max_position_embeddings=8,
)


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def tensor(name: str, shape: list[int], offset: int = 0, kind: int = 0) -> bytes:
    head = text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
    return head + struct.pack("<IQ", kind, offset)


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def whole(
    pairs: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    data: bytes = b"",
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    pairs, tensors = pairs or [], tensors or []
    given = counts or (len(tensors), len(pairs))
    head = b"GGUF" + struct.pack("<IQQ", version, *given) + b"".join(pairs + tensors)
    return head + bytes(-len(head) % 32) + data


DEEP = struct.pack("<IQ", 9, 1) * 50
FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "short": (b"GG", "no GGUF file"),
    "another": (b"PK\x03\x04" + bytes(60), "no GGUF file"),
    "only magic": (b"GGUF", "not 4"),
    "version 1": (whole(version=1), "of version 1"),
    "version 7": (whole(version=7), "of version 7"),
    "big-endian": (whole(version=3 << 24), "big-endian"),
    "many tensors": (whole(counts=(1 << 60, 0)), "1,152,921,504,606,846,976 tensors"),
    "many keys": (whole(counts=(0, 1 << 60)), "keys of metadata"),
    "one tensor too many": (whole(counts=(1, 0), data=bytes(64)), "name has 0 letters"),
    "string past the end": (
        whole([struct.pack("<Q", 1 << 40) + b"abc" + bytes(40)]),
        "not 1,099,511,627,776",
    ),
    "string of 2^64": (whole([struct.pack("<Q", (1 << 64) - 1) + bytes(40)]), "there are"),
    "no UTF-8": (whole([pair(b"\xff\xfe", 4, bytes(4))]), "not UTF-8"),
    "unknown kind": (whole([pair("a", 13, bytes(8))]), "of kind 13"),
    "a long array": (whole([pair("a", 9, struct.pack("<IQ", 4, 1 << 50))]), "elements"),
    "a long array of texts": (whole([pair("a", 9, struct.pack("<IQ", 8, 1 << 50))]), "elements"),
    "arrays in arrays": (whole([pair("a", 9, DEEP)]), "more than 4 deep"),
    "a key twice": (whole([pair("a", 0, b"\1")] * 2, data=bytes(32)), "'a' is there twice"),
    "alignment 0": (whole([pair("general.alignment", 4, bytes(4))]), "general.alignment is 0"),
    "alignment 7": (whole([pair("general.alignment", 4, b"\7\0\0\0")]), "alignment is 7"),
    "alignment 2^31": (whole([pair("general.alignment", 4, b"\0\0\0\x80")]), "general.alignment"),
    "alignment is text": (whole([pair("general.alignment", 8, text("x"))]), "general.alignment"),
    "five axes": (whole(tensors=[tensor("x", [1] * 5)], data=bytes(32)), "5 axes"),
    "unknown format": (whole(tensors=[tensor("x", [32], 0, 19)]), "with the number 19"),
    "data past the end": (whole(tensors=[tensor("x", [9])], data=bytes(32)), "36 bytes at 0"),
    "10^12 elements": (whole(tensors=[tensor("x", [10**6, 10**6])], data=bytes(32)), "bytes at"),
    "overflowing": (whole(tensors=[tensor("x", [1 << 63, 1 << 63])], data=bytes(9)), "bytes at"),
    "huge and empty": (whole(tensors=[tensor("x", [1 << 62, 0])], data=bytes(9)), "bytes at"),
    "offset past the end": (whole(tensors=[tensor("x", [1], 1 << 40)]), "bytes at"),
    "not aligned": (whole(tensors=[tensor("x", [1], 4)], data=bytes(64)), "4 bytes at 4"),
    "overlapping": (
        whole(tensors=[tensor("x", [9]), tensor("y", [9], 32)], data=bytes(96)),
        "'x' and 'y' overlap",
    ),
    "the same place": (
        whole(tensors=[tensor("x", [1]), tensor("y", [1])], data=bytes(32)),
        "overlap",
    ),
    "one name": (
        whole(tensors=[tensor("x", [1]), tensor("x", [1], 32)], data=bytes(64)),
        "one name",
    ),
    "part of a block": (
        whole(tensors=[tensor("x", [33], 0, 8)], data=bytes(96)),
        "no whole blocks of q8_0",
    ),
    "a long name": (whole(tensors=[tensor("x" * 5000, [1])], data=bytes(32)), "5,000 letters"),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_lie(tmp_path: Path, name: str) -> None:
    content, message = FILES[name]
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(td.LoadError, match=message) as caught:
        gguf.load(tmp_path / "a.gguf")
    assert len(str(caught.value)) < 1000


def test_small_files(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(whole())
    assert not gguf.load(tmp_path / "a.gguf").tensors
    content = whole(tensors=[tensor("x", []), tensor("y", [0, 3], 32)], data=b"\0\0\x80\x3f")
    (tmp_path / "a.gguf").write_bytes(content + bytes(28))
    file = gguf.load(tmp_path / "a.gguf")
    assert file.array("x").shape == ()
    assert file.array("x") == 1
    assert file.array("y").shape == (3, 0)
    with pytest.raises(td.LoadError, match="no tensor z"):
        file.array("z")


def test_other_places(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    places = {"nothing.gguf": "no file", "pipe.gguf": "a pipe"}
    for name, message in places.items():
        with pytest.raises(td.LoadError, match=message):
            models.load(tmp_path / name)
    with pytest.raises(td.LoadError, match="a folder"):
        gguf.load(tmp_path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "a.gguf"
    models.save(models.Llama(CONFIG), path, dtype="q8_0")
    return path


CHANGES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"general.architecture": "mamba"}, {}, "'mamba'. Known are: llama"),
    ({"general.architecture": [1]}, {}, "Known are"),
    ({"llama.block_count": None}, {}, "has no llama.block_count"),
    ({"llama.block_count": 10**9}, {}, "block_count is 1000000000, and there are tensors for 12"),
    ({"llama.block_count": 9999}, {}, "block_count is 9999"),
    ({"llama.block_count": 2}, {}, "missing: blk.1.attn_k.weight"),
    ({"llama.block_count": "1"}, {}, "num_hidden_layers = '1'"),
    ({"llama.embedding_length": 2**40}, {}, "hidden_size"),
    ({"llama.embedding_length": 64}, {}, "token_embd.weight is q8_0 .8, 32., and by the metadata"),
    ({"llama.attention.head_count": 0}, {}, "num_attention_heads|kv_heads|head"),
    ({"llama.attention.head_count": 3}, {}, "."),
    ({"llama.attention.head_count_kv": [1, 2]}, {}, "Models whose layers differ"),
    ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, {}, "rms_norm_eps"),
    ({"llama.rope.freq_base": float("inf")}, {}, "rope_theta"),
    ({"llama.rope.scaling.type": "longrope"}, {}, "'longrope'"),
    ({"llama.rope.scaling.type": "linear"}, {}, "factor"),
    ({"llama.expert_count": 3}, {}, "expert_count is 3, and there are tensors for 0"),
    ({}, {"token_embd.weight": None}, "no token_embd.weight"),
    ({}, {"output_norm.weight": None}, "missing: output_norm.weight"),
    ({}, {"extra.weight": np.zeros(3, np.float32)}, "unexpected: extra.weight"),
    ({}, {"output_norm.weight": np.zeros(3, np.float32)}, "output_norm.weight is f32 .3,"),
    ({}, {"output_norm.weight": np.zeros(32, np.int32)}, "output_norm.weight is i32"),
    ({}, {"token_embd.weight": np.array(1, np.float32)}, "by the metadata"),
    ({}, {"rope_freqs.weight": np.full(8, 2.5, np.float32)}, "not those of Llama 3"),
    ({}, {"rope_freqs.weight": np.full((8, 2), 2.5, np.float32)}, "not those of Llama 3"),
    ({}, {"rope_freqs.weight": np.full(8, np.nan, np.float32)}, "not those of Llama 3"),
]


@pytest.mark.parametrize("case", range(len(CHANGES)))
def test_models_that_do_not_fit(tmp_path: Path, saved: Path, case: int) -> None:
    metadata, arrays, message = CHANGES[case]
    file = gguf.load(saved)
    told = {k: v for k, v in {**file.metadata, **metadata}.items() if v is not None}
    given = {n: a for n, a in {**file.arrays(), **arrays}.items() if a is not None}
    gguf.save(tmp_path / "b.gguf", given, told, dtype="q8_0")
    with pytest.raises(td.TreadleError, match=message) as caught:
        models.load(tmp_path / "b.gguf")
    assert len(str(caught.value)) < 2000


def test_models_that_have_no_place_in_a_file(tmp_path: Path) -> None:
    cases: list[tuple[models.Model, str]] = [
        (models.GPT2(models.GPT2Config(n_layer=1, activation_function="relu")), "'relu'"),
        (models.Llama(models.LlamaConfig(**{**vars(CONFIG), "hidden_act": "gelu"})), "hidden_act"),
        (models.ViT(models.ViTConfig(hidden_size=8, num_attention_heads=2)), "ViT has no GGUF"),
    ]
    for model, message in cases:
        with pytest.raises(td.ArgumentError, match=message):
            models.save(model, tmp_path / "a.gguf")
    with pytest.raises(td.ArgumentError, match="Written are: f32, f16, bf16, q4_0, q8_0"):
        models.save(models.Llama(CONFIG), tmp_path / "a.gguf", dtype="q6_k")
    big = models.Llama(CONFIG)
    big.start_from({n: a + np.float32(1e5) for n, a in big.values().items()})
    with pytest.raises(td.ArgumentError, match="f16 does not hold"):
        models.save(big, tmp_path / "a.gguf", dtype="f16")
    assert not (tmp_path / "a.gguf").exists()
    assert not list(tmp_path.iterdir())  # nothing is left of what was written aside


def test_narrow_floats_are_written(tmp_path: Path) -> None:
    half = np.array([[0.5, 1e5]] * 2, ml_dtypes.bfloat16)
    gguf.save(tmp_path / "a.gguf", {"x": half}, dtype="bf16")
    assert np.array_equal(gguf.load(tmp_path / "a.gguf").array("x"), half)
    with pytest.raises(td.ArgumentError, match="x has numbers that f16 does not hold"):
        gguf.save(tmp_path / "a.gguf", {"x": half}, dtype="f16")


def test_what_cannot_be_written(tmp_path: Path) -> None:
    one = np.zeros(1, np.float32)
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"x" * 64: one}, {}, "at most 63 bytes"),
        ({"x": np.zeros((1,) * 5, np.float32)}, {}, "at most 4 axes"),
        ({"x": np.zeros(2, np.complex64)}, {}, "array of complex64"),
        ({"x": one}, {"a": [[1], [2]]}, "Metadata are"),
        ({"x": one}, {"a": {"b": 1}}, "Metadata are"),
        ({"x": one}, {"a": 2**70}, "Metadata are|64 bits"),
    ]
    for arrays, metadata, message in cases:
        with pytest.raises(td.ArgumentError, match=message):
            gguf.save(tmp_path / "a.gguf", arrays, metadata)
