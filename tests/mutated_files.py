"""Files of each format that is read, and mutations of them: what no reader may trip over."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np

import treadle as td
from treadle import models
from treadle.interop import gguf, hdf5, npz, torch_files

LLAMA = models.LlamaConfig(
    vocab_size=12,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    head_dim=16,
    max_position_embeddings=8,
)
GPT2 = models.GPT2Config(vocab_size=7, n_positions=8, n_embd=4, n_layer=1, n_head=2)
NUMBERS = (0, 1, 2, 7, 8, 255, 1 << 15, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 63, (1 << 64) - 1)


@dataclass(frozen=True)
class Format:
    """How a whole file is made, what mutates it, and what reads it."""

    make: Callable[[Path], bytes]
    mutate: Callable[[bytes, Random], bytes]
    read: Callable[[Path], object]
    refusals: tuple[type[Exception], ...] = (td.TreadleError,)
    ending: str = ""
    is_limited: bool = False  # read in a process that is ended where it crashes or takes long


def mutated(data: bytes, rng: Random) -> bytes:
    """Some bytes changed, removed, inserted, repeated or replaced by numbers that are edges."""
    found = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        near = rng.random() < 0.7  # headers are at the beginning
        at = rng.randrange(max(1, min(len(found), 1500 if near else len(found))))
        kind = rng.randrange(7)
        if kind == 0 and found:
            found[at] = rng.randrange(256)
        elif kind == 1 and found:
            found[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            del found[at : at + rng.randint(1, 20)]
        elif kind == 3:
            found[at:at] = rng.randbytes(rng.randint(1, 9))
        elif kind == 4:
            del found[len(found) - rng.randint(1, 60) :]
        elif kind == 5:
            found[at:at] = found[at : at + rng.randint(1, 40)]
        else:
            code, mask = rng.choice((("<I", (1 << 32) - 1), ("<Q", (1 << 64) - 1), ("<H", 65535)))
            number = struct.pack(code, rng.choice(NUMBERS) & mask)
            found[at : at + len(number)] = number
    return bytes(found)


def mutated_archive(data: bytes, rng: Random) -> bytes:
    """Half of the time an archive itself, else an entry in one that is whole."""
    if rng.random() < 0.5:
        at = data.rindex(b"PK\x01\x02") if rng.random() < 0.5 else 0
        return data[:at] + mutated(data[at:], rng)
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as whole, zipfile.ZipFile(stream, "w") as archive:
        names = [n for n in whole.namelist() if len(whole.read(n)) > 8]
        chosen = rng.choice(names)
        for name in whole.namelist():
            content = whole.read(name)
            archive.writestr(name, mutated(content, rng) if name == chosen else content)
    return stream.getvalue()


def _gguf(folder: Path) -> bytes:
    model = models.Llama(LLAMA)
    models.save(model, folder / "whole.gguf", dtype="q8_0")
    file = gguf.load(folder / "whole.gguf")
    told = {**file.metadata, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b"]}
    told |= {"tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.token_type": [1, 3]}
    gguf.save(folder / "whole.gguf", file.arrays(), told, dtype="q4_0")
    return (folder / "whole.gguf").read_bytes()


def _read_gguf(path: Path) -> object:
    gguf.load(path).arrays()
    return models.load(path, device="oracle")


def _npz(folder: Path) -> bytes:
    arrays = {"a.weight": np.arange(12.0).reshape(3, 4), "b": np.ones(5, np.float32)}
    npz.save(folder / "whole.npz", arrays, is_compressed=True)
    return (folder / "whole.npz").read_bytes()


STORAGE = (
    b"((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x0ctQ"
)
REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n" + STORAGE
PICKLE = (
    b"\x80\x02ccollections\nOrderedDict\nq\x00)Rq\x01(X\x01\x00\x00\x00aq\x02"
    + REBUILD
    + b"K\x00K\x03K\x04\x86q\x03K\x04K\x01\x86\x89h\x00)RtRX\x01\x00\x00\x00b"
    + REBUILD
    + b"K\x04K\x05\x85K\x01\x85\x89h\x00)RtRu}X\x09\x00\x00\x00_metadatah\x00)Rsb."
)


def _pt(folder: Path) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("a/data.pkl", PICKLE)
        archive.writestr("a/byteorder", b"little")
        archive.writestr("a/data/0", np.arange(12, dtype=np.float32).tobytes())
    return stream.getvalue()


def _read_pt(path: Path) -> object:
    return {n: np.array(a) for n, a in torch_files.load(path).items()}


def _h5(folder: Path) -> bytes:
    import h5py

    with h5py.File(folder / "whole.h5", "w") as file:
        for layer in ("conv2d", "dense"):
            group = file.create_group(f"layers/{layer}/vars")
            group.attrs["name"] = layer
            group.create_dataset("0", data=np.ones((4, 5), np.float32))
            group.create_dataset("1", data=np.ones(5, np.float32), chunks=True, compression="gzip")
    return (folder / "whole.h5").read_bytes()


def _read_h5(path: Path) -> object:
    return hdf5.read(str(path), 1 << 24)


def _shards(folder: Path) -> bytes:
    """A folder of config.json, an index and several files, one after the other."""
    models.save(models.GPT2(GPT2), folder / "whole", shard_bytes=400)
    files = sorted((folder / "whole").iterdir())
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for file in files:
            archive.writestr(file.name, file.read_bytes())
    return stream.getvalue()


def _mutated_folder(data: bytes, rng: Random) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as whole, zipfile.ZipFile(stream, "w") as archive:
        chosen = rng.choice(whole.namelist())
        for name in whole.namelist():
            content = whole.read(name)
            archive.writestr(name, mutated(content, rng) if name == chosen else content)
    return stream.getvalue()


def _read_folder(path: Path) -> object:
    folder = path.with_suffix(".folder")
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            (folder / name).write_bytes(archive.read(name))
    return models.load(folder, device="oracle")


HDF5_ERRORS = (hdf5.RefusedError, OSError, RuntimeError, ValueError, KeyError, TypeError)
HDF5_ERRORS += (OverflowError, MemoryError, UnicodeError, AttributeError, NotImplementedError)

FORMATS: dict[str, Format] = {
    "gguf": Format(_gguf, mutated, _read_gguf, ending=".gguf"),
    "npz": Format(_npz, mutated_archive, npz.load, ending=".npz"),
    "torch": Format(_pt, mutated_archive, _read_pt, ending=".pt"),
    # A child of keras.load runs this.
    "hdf5": Format(_h5, mutated, _read_h5, HDF5_ERRORS, ".h5", is_limited=True),
    "folder": Format(_shards, _mutated_folder, _read_folder, ending=".zip"),
}


def refusals(name: str, folder: Path, count: int, seed: int) -> int:
    """How many of some mutated files were refused; whatever else happens is raised."""
    format_ = FORMATS[name]
    whole = format_.make(folder)
    path = folder / f"mutated{format_.ending}"
    path.write_bytes(whole)
    format_.read(path)  # the file itself is read
    rng = Random(seed)
    found = 0
    for _ in range(count):
        path.write_bytes(format_.mutate(whole, rng))
        try:
            format_.read(path)
        except format_.refusals:
            found += 1
    return found
