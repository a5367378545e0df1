"""Files of other libraries: PyTorch's, NumPy's and Keras's, whole, damaged and hostile."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle as td
from treadle import models, nn
from treadle.interop import archives, hdf5, keras, npz, torch_files


def zipped(path: Path, entries: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return path


# NumPy's archives.


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=True)
    return stream.getvalue()


def test_npz_both_ways(tmp_path: Path) -> None:
    arrays = {
        "a.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
        "scalar": np.array(2.5),
        "empty": np.zeros((0, 3), np.float32),
        "turned": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "yes": np.array([True, False]),
    }
    for is_compressed in (False, True):
        npz.save(tmp_path / "a.npz", arrays, is_compressed=is_compressed)
        for found in (npz.load(tmp_path / "a.npz"), dict(np.load(tmp_path / "a.npz"))):
            assert list(found) == list(arrays)
            for name, array in arrays.items():
                assert found[name].dtype == array.dtype
                assert np.array_equal(found[name], array)
    zeros = {"x": np.zeros(1000)}
    npz.save(tmp_path / "a.npz", zeros, is_compressed=True)
    assert (tmp_path / "a.npz").stat().st_size < 1000
    npz.save(tmp_path / "a.npz", zeros)
    assert (tmp_path / "a.npz").stat().st_size > 8000
    np.savez_compressed(tmp_path / "b.npz", x=np.arange(3, dtype=">i4"))
    assert npz.load(tmp_path / "b.npz")["x"].tolist() == [0, 1, 2]
    with pytest.raises(td.ArgumentError, match="array of object"):
        npz.save(tmp_path / "c.npz", {"x": np.array([None])})


def test_npz_of_parameters(tmp_path: Path) -> None:
    model = models.MLP([3, 4, 2])
    values = {n: a + 1 for n, a in model.values().items()}
    npz.save(tmp_path / "a.npz", values)
    found = models.load_weights(models.MLP([3, 4, 2]), tmp_path / "a.npz").values()
    assert all(np.array_equal(found[n], a) for n, a in values.items())
    step = td.compile_step(
        models.MLP([3, 4, 2]),
        lambda m, b: m(b).sum(),
        td.optim.sgd(0.1),
        td.Spec((1, 3)),
        device="oracle",
    )
    step.load_params(npz.load(tmp_path / "a.npz"))
    assert all(np.array_equal(np.asarray(step.params[n]), a) for n, a in values.items())


def _lying(shape: str, descr: str = "'<f4'", data: bytes = b"\0" * 8) -> bytes:
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


ARRAYS: dict[str, tuple[bytes, str]] = {
    "objects": (npy(np.array([{"a": 1}], object)), "pickled objects never are"),
    "records": (npy(np.zeros(2, [("a", "<f4")])), "array of"),
    "text": (npy(np.array(["abc"])), "array of"),
    "too large": (_lying("(10**12,)"), "no .npy file"),
    "10^12 elements": (_lying("(1000000, 1000000)"), r"\(1000000, 1000000\) in 8 bytes"),
    "overflowing": (_lying("(4611686018427387904, 4)"), "in 8 bytes"),
    "huge and empty": (_lying(f"(0, {1 << 62}, {1 << 62})", data=b""), "in 0 bytes"),
    "negative": (_lying("(-1,)"), "no .npy file"),
    "too small": (_lying("(1,)"), "in 8 bytes"),
    "no tuple": (_lying("3"), "no .npy file"),
    "a call": (_lying("(__import__('os').getpid(),)"), "no .npy file"),
    "a bad dtype": (_lying("(2,)", "'nonsense'"), "array of 'nonsense'"),
    "nested": (_lying("(2,)", "[" * 3000 + "]" * 3000), "no .npy file"),
    "commas": (_lying("(2,,1)"), "in 8 bytes"),
    "a long number": (_lying("(" + "9" * 5000 + ",)"), "no .npy file"),
    "no header": (b"\x93NUMPY\x01\x00\xff\xff", "no .npy file"),
    "version 9": (b"\x93NUMPY\x09\x00" + b"\0" * 30, "no .npy file"),
    "empty": (b"", "no .npy file"),
    "a pickle": (pickle.dumps([1]), "no .npy file"),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_that_lie(tmp_path: Path, name: str) -> None:
    content, message = ARRAYS[name]
    zipped(tmp_path / "a.npz", {"x.npy": content})
    with pytest.raises(td.LoadError, match=message):
        npz.load(tmp_path / "a.npz")


def test_archives_that_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.npz"

    def refused(message: str) -> None:
        with pytest.raises(td.TreadleError, match=message):
            npz.load(file)

    bomb = npy(np.zeros(1 << 20, np.uint8))
    zipped(file, {f"x{i}.npy": bomb for i in range(20)}, zipfile.ZIP_DEFLATED)
    assert len(npz.load(file)) == 20
    monkeypatch.setattr(archives, "ALWAYS", 1 << 20)
    refused("promises 20.97 MB, more than .*largest=")
    assert len(npz.load(file, largest=1 << 25)) == 20
    whole = file.read_bytes()
    at = whole.index(b"PK\x01\x02")
    grown = bytearray(whole)
    grown[at + 24 : at + 28] = struct.pack("<I", 0xFFFFFFF0)  # the directory promises 4 GB
    file.write_bytes(grown)
    refused("promises 4.3")
    shrunk = bytearray(whole)
    shrunk[at + 24 : at + 28] = struct.pack("<I", 5)
    file.write_bytes(shrunk)
    monkeypatch.undo()
    refused("damaged")
    zipped(file, {"x.npy": bomb}, zipfile.ZIP_BZIP2)
    refused("packed by method 12")
    zipped(file, {"x.npy": npy(np.ones(2)), "y.txt": b""})
    refused("'y.txt' is no array")
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x.npy", b"")
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("x.npy", b"")
    refused("two of one name")
    for content in (b"", b"PK\x05\x06" + b"\xff" * 18, b"nonsense" * 100):
        file.write_bytes(content)
        refused("damaged")
    refused_at = tmp_path / "pipe"
    os.mkfifo(refused_at)
    for place, message in ((refused_at, "a pipe"), (tmp_path, "a folder"), (file / "x", "no file")):
        with pytest.raises(td.LoadError, match=message):
            npz.load(place)


# PyTorch's files.


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch owned",)


def pt(pickled: bytes, storages: dict[str, bytes] | None = None) -> dict[str, bytes]:
    data = {f"a/data/{k}": v for k, v in (storages or {}).items()}
    return {"a/data.pkl": pickled, "a/byteorder": b"little", **data}


def test_files_of_pytorch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    file = tmp_path / "a.pt"
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    state = net.state_dict()
    state |= {"turned": torch.arange(6.0).reshape(2, 3).T, "part": torch.arange(10.0)[3:7:2]}
    state |= {"half": torch.ones(3).half(), "bf16": torch.ones(2).bfloat16()}
    state["strided"] = torch.zeros(2).as_strided((1, 1, 2), (1 << 30, 1 << 30, 1))
    state |= {"empty": torch.zeros(0, 3), "yes": torch.tensor([True]), "own": net[0].weight}
    torch.save(state, file)
    found = torch_files.load(file)
    assert list(found) == list(state)
    for name, tensor in state.items():
        assert np.array_equal(found[name].astype(np.float64), tensor.detach().double().numpy())
        assert not found[name].flags.writeable
    torch.save({"net": state, "epoch": 3, "args": {1: [None, 2.5, "x"]}}, file)
    assert list(torch_files.load(file, "net")) == list(state)
    for key, message in ((None, "Pass key=, one of net, epoch, args"), ("no", "has no 'no'")):
        with pytest.raises(td.LoadError, match=message):
            torch_files.load(file, key)


def test_weights_of_torchvision_are_loaded(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    model = models.LeNet()
    values = {n: a + 1 for n, a in model.values().items()}
    torch.save({n: torch.tensor(a) for n, a in values.items()}, tmp_path / "a.pth")
    found = models.load_weights(model, tmp_path / "a.pth").values()
    assert all(np.array_equal(found[n], a) for n, a in values.items())


def test_objects_of_pytorch_are_refused(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    file = tmp_path / "a.pt"
    cases: list[tuple[object, str]] = [
        (torch.nn.Linear(2, 2), "calls torch.nn.modules.linear.Linear"),
        ({"x": np.float64(3)}, "calls numpy.dtype"),
        ({"x": torch.zeros(2, dtype=torch.complex64)}, "ComplexFloatStorage"),
        ({"x": torch.zeros(2).expand(9, 2)}, "not within storage"),
        ([torch.zeros(2)], "holds a list"),
        (torch.zeros(2), "holds a Tensor"),
        ({"x": Evil()}, "calls posix.system"),
        ({(1, 2): torch.zeros(1)}, "tuple as a key"),
        ({"x": {1, 2}}, "calls __builtin__.set"),
    ]
    for given, message in cases:
        torch.save(given, file)
        with pytest.raises(td.LoadError, match=message):
            torch_files.load(file)
    torch.save({}, file, _use_new_zipfile_serialization=False)
    with pytest.raises(td.LoadError, match="PyTorch 1.6"):
        torch_files.load(file)
    assert not Path("owned").exists()


HEAD = b"\x80\x02}q\x00X\x01\x00\x00\x00xctorch._utils\n_rebuild_tensor_v2\n"
FLOATS = b"((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu"


def tensor(offset: bytes, shape: bytes, strides: bytes, size: bytes = b"K\x02") -> bytes:
    """The pickle of {"x": a tensor}, from instructions that push its numbers."""
    return HEAD + FLOATS + size + b"tQ" + offset + shape + strides + b"\x89NtRs."


TERA = b"\x8a\x06" + struct.pack("<Q", 1 << 40)[:6]
SHARED = b")" + b"q\x00h\x00\x86" * 100  # of 2^100 elements, were they not shared
PICKLES: dict[str, tuple[bytes, str]] = {
    "offset past the end": (tensor(b"K\x05", b"K\x02\x85", b"K\x01\x85"), "not within storage"),
    "shape past the end": (tensor(b"K\x00", b"K\x03\x85", b"K\x01\x85"), "not within storage"),
    "strides past the end": (tensor(b"K\x00", b"K\x02\x85", b"K\x09\x85"), "not within storage"),
    "10^12 elements": (
        tensor(b"K\x00", b"\x8a\x06\x00\x10\xa5\xd4\xe8\x00\x85", b"K\x00\x85"),
        "not within storage",
    ),
    "huge and empty": (
        tensor(b"K\x00", b"K\x00\x8a\x07" + b"\x7f" * 7 + b"\x86", b"K\x01K\x01\x86"),
        "more elements",
    ),
    "a size that lies": (
        tensor(b"K\x00", b"K\x02\x85", b"K\x01\x85", b"K\x03"),
        "storage 0 is said to have 3 float32, and has 8 bytes",
    ),
    "a size that lies, and stride 0": (
        tensor(b"K\x00", TERA + b"\x85", b"K\x00\x85", TERA),
        "is said to have 1,099,511,627,776 float32",
    ),
    "a size that lies, and no element": (
        tensor(b"K\x00", b"K\x00\x85", b"K\x01\x85", TERA),
        "is said to have 1,099,511,627,776 float32",
    ),
    "stride 0": (tensor(b"K\x00", b"K\x03\x85", b"K\x00\x85"), "not within storage"),
    "past a smaller size": (
        tensor(b"K\x01", b"K\x01\x85", b"K\x01\x85", b"K\x01"),
        "not within storage",
    ),
    "negative": (tensor(b"J\xff\xff\xff\xff", b"K\x02\x85", b"K\x01\x85"), "else than a storage"),
    "negative shape": (tensor(b"K\x00", b"J\xff\xff\xff\xff\x85", b"K\x01\x85"), "whole numbers"),
    "more strides": (tensor(b"K\x00", b"K\x02\x85", b"K\x01K\x01\x86"), "1 axes and 2 strides"),
    "no shape": (tensor(b"K\x00", b"K\x02", b"K\x01\x85"), "whole numbers"),
    "a call": (b"cos\nsystem\n(X\x0b\x00\x00\x00touch ownedtR.", "calls os.system"),
    "an old call": (b"(S'touch owned'\nios\nsystem\n.", "instruction STRING|instruction INST"),
    "an object": (b"c__builtin__\neval\n(X\x01\x00\x00\x001t\x81.", "calls __builtin__.eval"),
    "extension": (b"\x82\x01.", "instruction EXT1"),
    "no storage": (b"X\x01\x00\x00\x00xQ.", "no storage"),
    "storage path": (
        b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x05\x00\x00\x00../..X\x00\x00\x00\x00K\x01tQ.",
        "plain name",
    ),
    "no stop": (b"}", "pickle"),
    "empty stack": (b"s.", "pickle"),
    "no mark": (b"}u.", "pickle"),
    "unknown memo": (b"h\x07.", "pickle"),
    "long string": (b"X\xff\xff\xff\x7fab.", "pickle"),
    "nonsense": (b"\xff\xfe\xfd", "pickle"),
    "empty": (b"", "pickle"),
    "shared tuples": (SHARED + b".", "holds a tuple"),
    "a name of shared tuples": (SHARED + b"q\x00h\x00\x93.", "else than text"),
    "a key of shared tuples": (b"}" + SHARED + b"Ns.", "tuple as a key"),
    "a call of shared tuples": (SHARED + b")R.", "calls tuple"),
    "storage of shared tuples": (SHARED + b"Q.", "no storage"),
    "a long shape": (tensor(b"K\x00", b"(" + b"K\x01" * 33 + b"t", b")"), "at most 32 whole"),
    "a large key": (b"}\x8a\x08" + struct.pack("<q", (1 << 61) - 1) + b"Ns.", "int as a key"),
    "a long key": (b"}X\x01\x04\x00\x00" + b"a" * 1025 + b"Ns.", "a key of 1,025 characters"),
    "a far memo": (b"}r\x00\x00\x01\x00.", "keeps its value 0 as 65,536"),
    "a size of none": (b"ctorch\nSize\n(Nt\x85R.", "whole numbers"),
}


@pytest.mark.parametrize("name", PICKLES)
def test_pickles_that_lie(tmp_path: Path, name: str) -> None:
    pickled, message = PICKLES[name]
    zipped(tmp_path / "a.pt", pt(pickled, {"0": b"\0" * 8}))
    with pytest.raises(td.LoadError, match=message):
        torch_files.load(tmp_path / "a.pt")
    assert not Path("owned").exists()


MANY = b"(" + b"K\x01" * 3000 + b"t"
LONG = b"X" + struct.pack("<I", 100000) + b"a" * 100000
REPEATED: dict[str, tuple[bytes, bytes, str]] = {  # something large, and what copies it
    "sizes": (MANY + b"\x85", b"ctorch\nSize\nh\x00R", "at most 32 whole numbers"),
    "sizes of lists": (b"](" + MANY[1:-1] + b"e\x85", b"ctorch\nSize\nh\x00R", "at most 32 whole"),
    "arguments": (MANY, b"ctorch._utils\n_rebuild_parameter\nh\x00R", "with 3,000 arguments"),
    "names": (LONG, b"h\x00h\x00\x93", "more than 1024 characters"),
    "storages": (
        b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\n" + LONG + b"NK\x01t",
        b"h\x00Q",
        "plain name",
    ),
}


@pytest.mark.parametrize("name", REPEATED)
def test_what_a_pickle_keeps_is_not_copied_again_and_again(tmp_path: Path, name: str) -> None:
    large, copied, message = REPEATED[name]
    file = zipped(tmp_path / "a.pt", pt(large + b"q\x00" + copied * 1000 + b"."))
    tracemalloc.start()
    with pytest.raises(td.LoadError, match=message):
        torch_files.load(file)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 8 << 20


def test_keys_of_a_pickle_are_kept_as_text() -> None:
    """The hashes of integers are the integers: a file could choose them so that all collide."""
    items = b"K\x07NJ\xff\xff\xff\xffNX\x01\x00\x00\x007K\x01"
    found = torch_files._Machine(b"}(" + items + b"u.", 20).run()
    assert found == {"7": 1, "-1": None}


def test_instructions_of_a_pickle_are_counted(tmp_path: Path) -> None:
    machine = torch_files._Machine(b"}" * (1 << 22), 1000)
    with pytest.raises(torch_files._RefusedError, match="more than 1,000 instructions"):
        machine.run()
    assert machine.at == len(machine.stack) == 1000
    zipped(tmp_path / "a.pt", pt(b"}" * (1 << 22)))
    with pytest.raises(td.LoadError, match="more than 1,048,832 instructions"):
        torch_files.load(tmp_path / "a.pt")


def test_archives_of_pytorch_that_lie(tmp_path: Path) -> None:
    whole = tensor(b"K\x00", b"K\x02\x85", b"K\x01\x85")
    file = zipped(tmp_path / "a.pt", pt(whole, {"0": b"\0" * 8}))
    assert torch_files.load(file)["x"].shape == (2,)
    cases: list[tuple[dict[str, bytes], str]] = [
        (pt(whole), "no entry 'a/data/0'"),
        ({**pt(whole, {"0": b"\0" * 8}), "a/byteorder": b"big"}, "big-endian"),
        ({"data.pkl": whole}, "no data.pkl"),
        ({**pt(whole), "b/data.pkl": whole}, "no data.pkl, or several"),
    ]
    for entries, message in cases:
        zipped(file, entries)
        with pytest.raises(td.LoadError, match=message):
            torch_files.load(file)
    zipped(file, pt(whole, {"0": b"\0" * 8}), zipfile.ZIP_DEFLATED)
    with pytest.raises(td.LoadError, match="packed by method 8"):
        torch_files.load(file)


# Keras's files.


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What Keras 3 writes, with h5py: a convolution, a dense layer and an embedding."""
    h5py = pytest.importorskip("h5py")
    path = tmp_path_factory.mktemp("keras") / "a.weights.h5"
    rng = np.random.default_rng(0)
    shapes = {"conv2d": ((3, 3, 2, 4), (4,)), "dense": ((4, 5), (5,)), "embedding": ((5, 5),)}
    with h5py.File(path, "w") as file:
        for layer, arrays in shapes.items():
            group = file.create_group(f"layers/{layer}/vars")
            group.attrs["name"] = "stem" if layer == "conv2d" else layer
            for i, shape in enumerate(arrays):
                group.create_dataset(str(i), data=rng.normal(size=shape).astype(np.float32))
    return path


class Net(nn.Module):
    def __init__(self) -> None:
        self.stem = nn.Conv2d(2, 4, 3)
        self.head = nn.Linear(4, 5)
        self.table = nn.Embedding(5, 5)


NAMES = {"stem/0": "stem.weight", "stem/1": "stem.bias", "dense/0": "head.weight"}


def test_weights_of_keras(weights: Path, tmp_path: Path) -> None:
    found = keras.load(weights)
    assert sorted(found) == ["dense/0", "dense/1", "embedding/0", "stem/0", "stem/1"]
    zipped(tmp_path / "a.keras", {"config.json": b"{}", "model.weights.h5": weights.read_bytes()})
    again = keras.load(tmp_path / "a.keras")
    assert all(np.array_equal(again[n], a) for n, a in found.items())
    net = Net()
    loaded = keras.load_into(net, weights, {**NAMES, "embedding/0": "table.weight"})
    assert loaded.missing == ("head.bias",)
    assert loaded.unexpected == ("dense/1",)
    values = net.init(0)
    assert np.array_equal(values["stem.weight"], found["stem/0"].transpose(3, 2, 0, 1))
    assert np.array_equal(values["head.weight"], found["dense/0"].T)
    assert np.array_equal(values["table.weight"], found["embedding/0"])
    names = {"embedding/0": "table.weight"}
    keras.load_into(net, weights, names, transpose=["table.weight"])
    assert np.array_equal(net.init(0)["table.weight"], found["embedding/0"].T)


def test_names_of_keras_that_do_not_fit(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = keras.load(weights)
    monkeypatch.setattr(keras, "load", lambda path, largest=None: found)
    cases: list[tuple[dict[str, str], str]] = [
        ({"nothing": "stem.weight"}, "no 'nothing'. There are: dense/0"),
        ({"dense/0": "nothing"}, "no 'nothing'. There are: stem.weight"),
        ({"dense/1": "head.weight"}, r"dense/1 \(5,\) is \(5,\) here, and head.weight is float32"),
    ]
    for names, message in cases:
        with pytest.raises(td.LoadError, match=message):
            keras.load_into(Net(), weights, names)


def test_names_of_older_files() -> None:
    full = ["model_weights/dense/dense/kernel:0", "model_weights/dense/dense/bias:0"]
    full += ["model_weights/b/forward/lstm/kernel:0", "model_weights/b/backward/lstm/kernel:0"]
    arrays = {name: np.zeros(i) for i, name in enumerate(full)}
    assert list(keras._short(arrays)) == ["dense/kernel", "dense/bias", *full[2:]]


def test_hdf5_that_lies(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    target = tmp_path / "target.h5"
    with h5py.File(target, "w") as file:
        file["x"] = np.ones(3)

    def made(fill: Any) -> str:
        with h5py.File(tmp_path / "a.h5", "w") as file:
            fill(file)
        return str(tmp_path / "a.h5")

    def soft(file: Any) -> None:
        file["x"] = np.ones(3)
        file["y"] = h5py.SoftLink("/x")

    def elsewhere(file: Any) -> None:
        file["y"] = h5py.ExternalLink(str(target), "/x")

    def virtual(file: Any) -> None:
        layout = h5py.VirtualLayout((3,), "f8")
        layout[:] = h5py.VirtualSource(str(target), "x", (3,))
        file.create_virtual_dataset("y", layout)

    def external(file: Any) -> None:
        file.create_dataset("y", (3,), "f8", external=[(str(target), 0, 24)])

    def cycle(file: Any) -> None:
        inner = file.create_group("a/b")
        inner["c"] = file["a"]

    def deep(file: Any) -> None:
        file.create_group("a/" * 40)

    def huge(file: Any) -> None:
        file.create_dataset("y", (10**6, 10**6), "f8")

    def bomb(file: Any) -> None:
        file.create_dataset("y", data=np.zeros(1 << 20), chunks=True, compression="gzip")

    def text(file: Any) -> None:
        file["y"] = ["a", "b"]

    def records(file: Any) -> None:
        file["y"] = np.zeros(2, [("a", "f4")])

    def filtered(file: Any) -> None:
        file.create_dataset("y", data=np.zeros(100), chunks=True, scaleoffset=2)

    def long_name(file: Any) -> None:
        file.create_group("a/vars").attrs["name"] = np.bytes_(b"n" * 5000)

    cases = {soft: "link", elsewhere: "link", virtual: "other files", external: "other files"}
    cases |= {cycle: "groups in groups", deep: "groups in groups", huge: "are allowed"}
    cases |= {bomb: "are allowed", text: "'y', object", records: "'y'", filtered: "packed by"}
    cases |= {long_name: "a long name"}
    for fill, message in cases.items():
        with pytest.raises(hdf5.RefusedError, match=message):
            hdf5.read(made(fill), 1 << 20)
    with pytest.raises(td.LoadError, match="has a link to elsewhere, 'y'"):
        keras.load(made(elsewhere))


def test_keras_files_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.h5").write_bytes(b"nonsense" * 100)
    with pytest.raises(td.LoadError, match="damaged"):
        keras.load(tmp_path / "a.h5")
    zipped(tmp_path / "a.keras", {"config.json": b"{}"})
    with pytest.raises(td.LoadError, match="no entry 'model.weights.h5'"):
        keras.load(tmp_path / "a.keras")
    monkeypatch.setattr(hdf5, "__file__", str(tmp_path / "crash.py"))
    (tmp_path / "crash.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    with pytest.raises(td.LoadError, match="HDF5's library ended with -11"):
        keras.load(tmp_path / "a.h5")


@pytest.mark.slow
def test_hdf5_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file at which HDF5's library of 2026 loops for ever: its B-tree leads back to itself."""
    packed = Path(__file__).parent / "corpus" / "endless.h5.gz"
    (tmp_path / "a.h5").write_bytes(gzip.decompress(packed.read_bytes()))
    monkeypatch.setattr(keras, "SECONDS", 1)
    with pytest.raises(td.LoadError, match="took more than|damaged"):
        keras.load(tmp_path / "a.h5", largest=1 << 20)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:keras")
@pytest.mark.parametrize("ending", [".weights.h5", ".keras", ".h5"])
def test_a_model_of_keras_gives_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    library = pytest.importorskip("keras")
    layers = library.layers
    twin = library.Sequential(
        [
            library.Input((6, 6, 2)),
            layers.Conv2D(4, 3, name="stem"),
            layers.BatchNormalization(name="norm"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(5, name="head"),
        ]
    )
    rng = np.random.default_rng(0)
    twin.set_weights([rng.uniform(0.5, 1, w.shape) for w in twin.weights])
    file = tmp_path / f"a{ending}"
    if ending == ".weights.h5":
        twin.save_weights(file)
    else:
        twin.save(file)

    class Own(nn.Module):
        def __init__(self) -> None:
            self.stem, self.norm = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, eps=1e-3)
            self.head = nn.Linear(4, 5)

        def forward(self, x: Any) -> Any:
            return self.head(td.mean(self.norm(self.stem(x)), (2, 3)))

    kinds = {"stem": ["kernel", "bias"], "head": ["kernel", "bias"]}
    kinds["norm"] = ["gamma", "beta", "moving_mean", "moving_variance"]
    own = {"kernel": "weight", "gamma": "weight", "beta": "bias"}
    own |= {"moving_mean": "running_mean", "moving_variance": "running_var"}
    names = {
        f"{layer}/{kind if ending == '.h5' else i}": f"{layer}.{own.get(kind, kind)}"
        for layer, those in kinds.items()
        for i, kind in enumerate(those)
    }
    net = Own()
    loaded = keras.load_into(net, file, names)
    assert set(loaded.missing) <= {"norm.num_batches_tracked"}
    images = rng.normal(size=(3, 6, 6, 2)).astype(np.float32)
    forward = td.compile_forward(net, lambda m, x: m(x), td.Spec((3, 2, 6, 6)), device="oracle")
    found = np.asarray(forward(np.ascontiguousarray(images.transpose(0, 3, 1, 2))))
    wanted = twin(images).detach().cpu().numpy()
    assert np.abs(found - wanted).max() < 1e-4
