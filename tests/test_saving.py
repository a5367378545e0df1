"""Files of steps and forwards, what they refuse, and what is loaded by name."""

from __future__ import annotations

import errno
import json
import os
import random
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save, save_file

import treadle as td
from disks import largest_file, not_permitted
from treadle import losses, nn, optim

SPEC = {"x": td.Spec((4, 2)), "y": td.Spec((4,), td.int32)}
Arrays = dict[str, np.ndarray]


class Net(nn.Module):
    def __init__(self) -> None:
        self.norm, self.fc = nn.BatchNorm1d(2), nn.Linear(2, 3)

    def forward(self, x):
        return self.fc(self.norm(x))


def loss(model, batch):
    return losses.cross_entropy(model(batch["x"]), batch["y"])


def batch(seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(4, 2)).astype(np.float32), "y": np.arange(4, dtype=np.int32) % 3}


def make(**keywords) -> td.TrainStep:
    step = td.compile_step(Net(), loss, optim.adam(0.05), SPEC, device="oracle", **keywords)
    step(batch())
    return step


def forward(model: nn.Module | None = None, **keywords) -> td.Forward:
    spec = td.Spec((4, 2))
    return td.compile_forward(
        model or Net(), lambda m, x: m(x), spec, device="oracle", seed=9, **keywords
    )


def same(a: Arrays, b: Arrays) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[n], b[n]) for n in a)


# Where a file cannot be written


def test_places_where_nothing_can_be_saved(tmp_path: Path) -> None:
    step = make()
    (tmp_path / "file").write_bytes(b"mine")
    (tmp_path / "folder").mkdir()
    os.symlink("one", tmp_path / "two")
    os.symlink("two", tmp_path / "one")
    os.mkfifo(tmp_path / "pipe")
    before = sorted(tmp_path.rglob("*"))
    places = {
        "folder": "folder is a folder. Name a file in it",
        "file/below": "file/below cannot be written: ",
        "two": "two is a link that leads back to itself",
        "pipe": "pipe is a device or a pipe, not a file",
        "new/deep/" + "x" * 300: "cannot be written: File name too long",
        "zero\0byte": "cannot be written: embedded null byte",
    }
    for place, message in places.items():
        with pytest.raises(td.SaveError, match=message) as caught:
            step.save(tmp_path / place)
        assert isinstance(caught.value, OSError)
        assert caught.value.operation == "save"
        assert caught.value.remedy
        with pytest.raises(td.LoadError, match="there is no file|not a file"):
            step.load(tmp_path / place)
    with pytest.raises(td.SaveError, match="/dev/full is a device"):
        step.save("/dev/full")
    for path in (None, 3, b"bytes"):
        for action in (step.save, step.load, forward().save, forward().load):
            with pytest.raises(td.ArgumentError, match="the path is .*Pass a string"):
                action(path)
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "file").read_bytes() == b"mine"


@pytest.mark.parametrize("size", [0, 100, 1000])
def test_a_disk_that_is_full(size: int, tmp_path: Path) -> None:
    step = make()
    file = tmp_path / "step"
    step.save(file)
    old = file.read_bytes()
    step(batch(1))
    for path in (file, tmp_path / "new" / "step"):
        with largest_file(size), pytest.raises(td.SaveError, match=os.strerror(errno.EFBIG)):
            step.save(path)
    assert list(tmp_path.iterdir()) == [file]
    assert file.read_bytes() == old


def test_a_place_that_is_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = make()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        Path(place).chmod(0o755)
        folder.mkdir()
        step.save(folder / "step")
        old = (folder / "step").read_bytes()
        step(batch(1))
        with not_permitted(folder):
            for name in ("step", "other", "new/step"):
                with pytest.raises(td.SaveError, match="cannot be written: Permission denied"):
                    step.save(folder / name)
        assert [p.name for p in folder.iterdir()] == ["step"]
        assert (folder / "step").read_bytes() == old
    step.save(tmp_path / "kept")
    old = (tmp_path / "kept").read_bytes()
    step(batch(2))
    monkeypatch.setattr(os, "access", lambda *_, **__: False)  # the superuser may write anywhere
    with pytest.raises(td.SaveError, match="kept is read-only"):
        step.save(tmp_path / "kept")
    assert (tmp_path / "kept").read_bytes() == old


@pytest.mark.parametrize("name", ["fsync", "replace", "chmod"])
def test_a_save_that_fails_leaves_no_trace(name: str, tmp_path: Path, monkeypatch) -> None:
    step = make()
    step.save(tmp_path / "step")
    old = (tmp_path / "step").read_bytes()
    step(batch(1))
    for error in (OSError(errno.EIO, "I/O error"), KeyboardInterrupt()):

        def fails(*_: object, error: BaseException = error, **__: object) -> None:
            raise error

        expected = td.SaveError if isinstance(error, OSError) else KeyboardInterrupt
        with monkeypatch.context() as patch:
            patch.setattr(os, name, fails)
            with pytest.raises(expected):
                step.save(tmp_path / "step")
            with pytest.raises(expected):
                step.save(tmp_path / "a" / "b" / "step")
    assert [p.name for p in tmp_path.rglob("*")] == ["step"]
    assert (tmp_path / "step").read_bytes() == old


def test_links_and_permissions_stay(tmp_path: Path) -> None:
    step = make()
    (tmp_path / "runs").mkdir()
    target, link, dangling = tmp_path / "runs" / "1", tmp_path / "last", tmp_path / "next"
    step.save(target)
    target.chmod(0o600)
    old = target.read_bytes()
    os.symlink("runs/1", link)
    os.symlink("runs/2", dangling)
    step(batch(1))
    step.save(link)
    step.save(dangling)
    assert os.readlink(link) == "runs/1"
    assert os.readlink(dangling) == "runs/2"
    assert target.read_bytes() == dangling.read_bytes() != old
    assert target.stat().st_mode & 0o777 == 0o600
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["1", "2"]
    step.load(link)


# What a file holds


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    step, view = make(), forward()
    step.save(tmp_path / "step")
    view.save(tmp_path / "model")
    here, params = step.state_dict(), view.params
    rng = random.Random(16)
    file = tmp_path / "flipped"
    for name, loads in (("step", (step.load, view.load)), ("model", (view.load,))):
        good = (tmp_path / name).read_bytes()
        places = [rng.randrange(8 * len(good)) for _ in range(200)]
        places += range(8 * 8, 8 * 60)  # the key of the metadata, and the first of those in it
        for place in places:
            data = bytearray(good)
            data[place // 8] ^= 1 << place % 8
            file.write_bytes(data)
            for load in loads:
                with pytest.raises(td.LoadError):
                    load(file)
        for length in range(0, len(good), 97):
            file.write_bytes(good[:length])
            for load in loads:
                with pytest.raises(td.LoadError, match="damaged"):
                    load(file)
    assert same(step.state_dict(), here)
    assert same(view.params, params)


def test_a_changed_number_does_not_match_the_checksum(tmp_path: Path) -> None:
    step = make()
    step.save(tmp_path / "step")
    data = bytearray((tmp_path / "step").read_bytes())
    data[-1] ^= 1  # of the last array
    (tmp_path / "step").write_bytes(data)
    with pytest.raises(td.LoadError, match="is damaged: it does not match its checksum"):
        step.load(tmp_path / "step")


def test_files_of_before_checksums_load(tmp_path: Path) -> None:
    step = make()
    here = step.state_dict()
    header = {"schema": 1, "kind": "step"}
    (tmp_path / "old").write_bytes(save(here, {"treadle": json.dumps(header)}))
    step(batch(1))
    step.load(tmp_path / "old")
    assert same(step.state_dict(), here)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("[" * 10_000 + "]" * 10_000, "damaged: its metadata is nested too deep"),
        ('{"a":' * 10_000 + "1" + "}" * 10_000, "damaged: its metadata is nested too deep"),
        ("1" * 10_000, "damaged or not a safetensors file"),
        ("[]", "was not written by Treadle's save"),
        ('{"schema": 9, "kind": "step"}', "has schema 9, this version reads 1"),
        ('{"schema": 1, "kind": ["step"]}', "holds a"),
        ('{"schema": 1, "kind": "step", "sha": ""}', "metadata has the keys schema, kind, sha"),
    ],
)
def test_metadata_is_not_trusted(said: str, message: str, tmp_path: Path) -> None:
    step = make()
    here = step.state_dict()
    (tmp_path / "file").write_bytes(save(here, {"treadle": said}))
    step(batch(1))
    after = step.state_dict()
    for load in (step.load, forward().load):
        with pytest.raises(td.LoadError, match=message):
            load(tmp_path / "file")
    assert same(step.state_dict(), after)


def test_a_header_that_is_nested(tmp_path: Path) -> None:
    header = b'{"__metadata__":' + b'{"a":' * 10_000 + b'"b"' + b"}" * 10_001
    (tmp_path / "file").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(td.LoadError, match="damaged or not a safetensors file"):
        forward().load(tmp_path / "file")


# Parameters by name


@pytest.mark.parametrize("values", [None, 3, [1.0], "weights.safetensors"])
def test_values_are_a_dict(values: object) -> None:
    step = make()
    for load in (step.load_params, step.load_state_dict, forward().load_params):
        with pytest.raises(td.LoadError, match=f"{type(values).__name__}, not a dict of arrays"):
            load(values)


def test_values_are_arrays() -> None:
    step = make()
    before = step.params
    for wrong in ([[1.0], [1.0, 2.0]], None, object()):
        with pytest.raises(td.LoadError, match="fc.weight "):
            step.load_params({"fc.weight": wrong}, strict=False)
    assert same(step.params, before)


def test_a_part_is_loaded_and_the_rest_is_said() -> None:
    for target in (make(), forward()):
        before = target.params
        found = target.load_params({"fc.bias": np.ones(3), "head.bias": np.ones(9)}, strict=False)
        assert found.unexpected == ("head.bias",)
        assert found.missing == tuple(n for n in before if n != "fc.bias")
        assert (target.params["fc.bias"] == 1).all()
        assert tuple(target.load_params(before)) == ((), ())
        with pytest.raises(td.LoadError, match="unexpected: head.bias. Load a part with strict=F"):
            target.load_params({**before, "head.bias": np.ones(9)})
        with pytest.raises(td.LoadError, match="mismatched: fc.bias has the shape"):
            target.load_params({"fc.bias": np.ones(9)}, strict=False)


class Tied(nn.Module):
    def __init__(self) -> None:
        self.wte, self.head = nn.Embedding(5, 2), nn.Linear(2, 5, bias=False)
        self.head.weight = self.wte.weight
        self.parts = {"again": [self.head]}  # a module under two names

    def forward(self, x):
        return self.head(x)


@pytest.mark.parametrize(
    "names",
    [
        ["wte.weight"],
        ["head.weight"],
        ["parts.again.0.weight"],
        ["wte.weight", "head.weight"],
        ["head.weight", "wte.weight", "parts.again.0.weight"],
    ],
)
def test_tied_names(names: list[str]) -> None:
    view, value = forward(Tied()), np.arange(10.0).reshape(5, 2)
    value[0, 0] = np.nan  # which equals itself here
    assert tuple(view.load_params({n: value.copy() for n in names})) == ((), ())
    np.testing.assert_array_equal(view.params["wte.weight"], value)
    assert list(view.params) == ["wte.weight"]


def test_tied_names_that_differ() -> None:
    view, value = forward(Tied()), np.ones((5, 2))
    before = view.params
    for other, message in (
        (value + 1, "and head.weight are one"),
        (value.T, "head.weight has the"),
    ):
        for strict in (True, False):
            with pytest.raises(td.LoadError, match=message):
                view.load_params({"wte.weight": value, "head.weight": other}, strict)
    with pytest.raises(td.LoadError, match="unexpected: head.bias, parts.again.1.weight, wte"):
        view.load_params({"head.bias": 1, "parts.again.1.weight": 1, "wte": 1, "wte.weight": value})
    assert same(view.params, before)


def test_tied_names_of_pytorch() -> None:
    import torch

    class Theirs(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte, self.head = torch.nn.Embedding(5, 2), torch.nn.Linear(2, 5, bias=False)
            self.head.weight = self.wte.weight

    values = Theirs().state_dict()
    assert list(values) == ["wte.weight", "head.weight"]
    view = forward(Tied())
    view.load_params(values)
    np.testing.assert_array_equal(view.params["wte.weight"], values["wte.weight"].numpy())


# For inference


def test_a_forward_loads_what_a_step_saved(tmp_path: Path) -> None:
    step, view = make(), forward()
    step.save(tmp_path / "step")
    assert tuple(view.load(tmp_path / "step")) == ((), ())
    assert same(view.params, step.params)
    assert (view.params["norm.running_mean"] != 0).any()
    x = batch()["x"]
    expected = step.attach(lambda m, x: m(x), td.Spec((4, 2)))(x)
    np.testing.assert_array_equal(view(x), expected)


def test_a_forward_saves_the_model(tmp_path: Path) -> None:
    view, other = forward(), forward()
    other.load_params(make().params)
    other.save(tmp_path / "model")
    assert tuple(view.load(tmp_path / "model")) == ((), ())
    assert same(view.params, other.params)
    assert same(load_file(tmp_path / "model"), other.params)
    with pytest.raises(td.LoadError, match="holds a model, not a step"):
        make().load(tmp_path / "model")


def test_a_forward_loads_files_of_other_programs(tmp_path: Path) -> None:
    view, values = forward(), make().params
    values["extra"] = np.zeros(2)
    save_file(values, tmp_path / "theirs", {"format": "pt"})
    before = view.params
    with pytest.raises(td.LoadError, match="load: unexpected: extra. Load a part"):
        view.load(tmp_path / "theirs")
    assert same(view.params, before)
    assert view.load(tmp_path / "theirs", strict=False).unexpected == ("extra",)
    assert all(np.array_equal(v, values[n]) for n, v in view.params.items())
    header = b'{"fc.bias":{"dtype":"F8_E4M3","shape":[3],"data_offsets":[0,3]}}'
    (tmp_path / "narrow").write_bytes(struct.pack("<Q", len(header)) + header + b"\0\0\0")
    with pytest.raises(td.LoadError, match="of a dtype that NumPy does not have"):
        view.load(tmp_path / "narrow")


def test_checkpoints_of_a_step_are_restored_into_a_forward(tmp_path: Path) -> None:
    step, view = make(), forward()
    with td.CheckpointManager(tmp_path, keep_last=None) as checkpoints:
        for value in (1.0, 3.0):
            checkpoints.save(step, metrics={"loss": value})
            step(batch(int(value)))
        for which, number in (("best", 1), ("latest", 2), ("000001-step-1", 1)):
            found = checkpoints.restore(view, which)
            assert found is not None
            assert found.number == number
            assert same(view.params, found.params())
            assert "step:counters" not in found.params()
        other = forward(nn.Linear(2, 3))
        with pytest.raises(td.CheckpointError, match="does not fit the step: missing: weight"):
            checkpoints.restore(other)
        for wrong in (None, 3, "best", {"step": object()}, {}):
            with pytest.raises(td.ArgumentError, match="not a step by a plain name"):
                checkpoints.restore(wrong)
        with pytest.raises(td.ArgumentError, match="'step': Forward is not a step"):
            checkpoints.save(view)
        with pytest.raises(td.ArgumentError, match="there is no step 'g'. There are: step"):
            found.params("g")
        file = found.path / "step.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"\7")
        with pytest.raises(td.CheckpointError, match="is damaged: step.safetensors does not"):
            found.params()
        with pytest.warns(td.CheckpointWarning, match="000001-step-1 is damaged"):
            checkpoints.restore(view, "best")
        assert same(view.params, checkpoints.latest().params())


def test_one_of_several_steps_is_restored_into_a_forward(tmp_path: Path) -> None:
    one, two, view = make(), make(seed=4), forward()
    with td.CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save({"one": one, "two": two})
        with pytest.raises(td.CheckpointError, match="is of the steps one, two, not of one step"):
            checkpoints.restore(view)
        checkpoints.restore({"two": view})
        assert same(view.params, two.params)
        assert same(checkpoints.latest().params("one"), one.params)
        with pytest.raises(td.CheckpointError, match="not of the steps one"):
            checkpoints.restore({"one": one})
        checkpoints.save(one)
        checkpoints.restore(view)
        assert same(view.params, one.params)


# Numbers of optimizers


def test_a_flag_is_true_or_false() -> None:
    optimizer = optim.groups(("fc.*", optim.sgd(0.1)), ("*", optim.sgd(0.1)))
    step = td.compile_step(Net(), loss, optimizer, SPEC, device="oracle")
    before = step.params
    step.hyperparameters["group0.frozen"] = True
    step(batch())
    assert step.hyperparameters["group0.frozen"] == 1
    assert (step.params["fc.weight"] == before["fc.weight"]).all()
    assert (step.params["norm.weight"] != before["norm.weight"]).any()
    step.hyperparameters["group0.frozen"] = np.bool_(False)
    step(batch())
    assert (step.params["fc.weight"] != before["fc.weight"]).any()
    for wrong in (0.5, 2, "yes", None):
        with pytest.raises(td.ArgumentError, match="It is 0 or 1, False or True"):
            step.hyperparameters["group0.frozen"] = wrong
    with pytest.raises(td.ArgumentError, match="is a bool, not a number"):
        step.hyperparameters["group0.lr"] = True
