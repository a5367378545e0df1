"""Folders that are incomplete, damaged, hostile or lie: clear errors, little time and memory."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import treadle as td
from treadle import models
from treadle.models.architectures import ARCHITECTURES

CONFIG = models.GPT2Config(vocab_size=7, n_positions=8, n_embd=4, n_layer=1, n_head=2)
LLAMA = models.LlamaConfig(
    vocab_size=7,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    max_position_embeddings=8,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    models.save(models.GPT2(CONFIG), tmp_path)
    return tmp_path


def changed(folder: Path, file: str = "config.json", **changes: Any) -> None:
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**content, **changes}))


def refused(folder: Path, message: str) -> None:
    with pytest.raises(td.TreadleError, match=message) as caught:
        models.load(folder, device="oracle")
    assert len(str(caught.value)) < 2000


def _deep(folder: Path) -> None:
    (folder / "config.json").write_text("[" * 100_000)


def _binary(folder: Path) -> None:
    (folder / "config.json").write_bytes(b"\xff\xfe\x00" * 10)


def _huge(folder: Path) -> None:
    with (folder / "config.json").open("wb") as file:
        file.truncate(1 << 40)  # a file with a hole


def _long_number(folder: Path) -> None:
    (folder / "config.json").write_text('{"n_layer": ' + "9" * 100_000 + "}")


def _no_folder(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()


CONFIGS: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (lambda f: (f / "config.json").unlink(), "config.json"),
    "a folder": (_no_folder, "config.json"),
    "empty": (lambda f: (f / "config.json").write_text("") and None, "damaged"),
    "no object": (lambda f: (f / "config.json").write_text("[1]") and None, "no object"),
    "not a number": (lambda f: (f / "config.json").write_text('{"n": NaN}') and None, "NaN"),
    "nested": (_deep, "damaged"),
    "binary": (_binary, "damaged"),
    "huge": (_huge, "more than"),
    "long number": (_long_number, "damaged"),
    "no architecture": (lambda f: changed(f, architectures=None), "Known are: .*GPT2LMHeadModel"),
    "unknown": (lambda f: changed(f, architectures=["Nowhere"]), "'Nowhere'.*LlamaForCausalLM"),
    "no name": (lambda f: changed(f, architectures=[{"a": 1}]), "Known are"),
    "text for a number": (lambda f: changed(f, n_layer="1"), "n_layer = '1'"),
    "negative": (lambda f: changed(f, n_embd=-4), "n_embd = -4"),
    "zero": (lambda f: changed(f, n_head=0), "n_head = 0"),
    "a bool": (lambda f: changed(f, n_head=True), "n_head = True"),
    "a fraction": (lambda f: changed(f, n_head=2.5), "n_head = 2.5"),
    "many layers": (lambda f: changed(f, n_layer=10**9), "blocks"),
    "large": (lambda f: changed(f, n_embd=10**12), "n_embd"),
    "wide": (lambda f: changed(f, n_embd=10**9, n_head=1), "by the configuration"),
    "heads": (lambda f: changed(f, n_head=3), "multiple of n_head"),
    "activation": (lambda f: changed(f, activation_function="__import__"), "Known are"),
    "a list for a number": (lambda f: changed(f, layer_norm_epsilon=[1]), "layer_norm_epsilon"),
    "infinite": (lambda f: changed(f, layer_norm_epsilon=1e300), "layer_norm_epsilon"),
    "other sizes": (lambda f: changed(f, vocab_size=8), "transformer.wte.weight is F32 .7, 4."),
    "more layers": (lambda f: changed(f, n_layer=2), "no values for transformer.h.1"),
    "cross attention": (lambda f: changed(f, add_cross_attention=True), "add_cross_attention"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_wrong_configurations(folder: Path, name: str) -> None:
    spoil, message = CONFIGS[name]
    spoil(folder)
    refused(folder, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": ["x"]}}, "scaling of positions"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor = 0"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "2"}}, "factor = '2'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ({"rope_parameters": [1], "rope_scaling": 3}, "rope_scaling = 3"),
        ({"num_key_value_heads": 0}, "kv_heads"),
        ({"num_key_value_heads": 3}, "kv_heads"),
        ({"num_local_experts": 10**8}, "blocks"),
        ({"layer_types": ["sideways"]}, "full_attention"),
        ({"layer_types": ["full_attention"] * 2}, "one for each layer"),
        ({"head_dim": 3}, "head_width"),
        ({"head_dim": 2**31 - 2}, "a head has 2,147,483,646 elements"),
        ({"rope_theta": -1.0, "rope_parameters": None}, "rope_theta = -1.0"),
        ({"model_type": "gemma"}, "model_type"),
    ],
)
def test_wrong_configurations_of_llama(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    models.save(models.Llama(LLAMA), tmp_path)
    changed(tmp_path, **changes)
    refused(tmp_path, message)


def _safetensors(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def _entry(shape: list[int], start: int, stop: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


NAME = "transformer.wte.weight"
WEIGHTS: dict[str, bytes] = {
    "empty": b"",
    "short": b"\x01\x02",
    "header past the end": _safetensors({}, length=1 << 20),
    "header of 2^63 bytes": _safetensors({}, length=(1 << 63) - 1),
    "no header": _safetensors(b"nonsense"),
    "nested header": _safetensors(b"[" * 200_000),
    "data past the end": _safetensors({NAME: _entry([7, 4], 0, 112)}, b"\0" * 8),
    "too much data": _safetensors({NAME: _entry([1], 0, 4)}, b"\0" * 400),
    "overlapping": _safetensors({NAME: _entry([2], 0, 8), "b": _entry([2], 4, 12)}, b"\0" * 12),
    "10^12 elements": _safetensors({NAME: _entry([10**6, 10**6], 0, 4)}, b"\0" * 4),
    "overflowing shape": _safetensors({NAME: _entry([1 << 62, 8], 0, 0)}),
    "negative offset": _safetensors({NAME: _entry([1], -4, 0)}, b"\0" * 4),
    "backward": _safetensors({NAME: _entry([1], 4, 0)}, b"\0" * 4),
    "unknown dtype": _safetensors({NAME: _entry([1], 0, 4, "Q7")}, b"\0" * 4),
    "shape is text": _safetensors({NAME: {**_entry([1], 0, 4), "shape": "x"}}, b"\0" * 4),
    "a pickle": b"\x80\x04cos\nsystem\n(S'touch /tmp/owned'\ntR.",
    "a zip": b"PK\x03\x04" + b"\0" * 60,
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_damaged_weights(folder: Path, name: str) -> None:
    (folder / "model.safetensors").write_bytes(WEIGHTS[name])
    refused(folder, "damaged|has no values|by the configuration")


def _arrays(folder: Path) -> dict[str, np.ndarray]:
    return models.GPT2(CONFIG).values()


def _index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors").unlink(missing_ok=True)
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


@pytest.mark.parametrize(
    "file",
    [
        "../model.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "a\\b.safetensors",
        "..",
        ".safetensors",
        "model.safetensors\0x.safetensors",
        "model.bin",
        "model.safetensors\n",
        "~/model.safetensors",
        "C:model.safetensors",
        7,
        None,
        {"a": 1},
    ],
)
def test_an_index_names_plain_files(folder: Path, file: object) -> None:
    _index(folder, {NAME: file})
    refused(folder, "names the file")


def test_an_index_that_lies(folder: Path) -> None:
    arrays = _arrays(folder)
    for weight_map in ([], {}, None, "x"):
        _index(folder, weight_map)
        refused(folder, "no weight_map")
    _index(folder, dict.fromkeys(arrays, "absent.safetensors"))
    refused(folder, "there is no file")
    save_file({NAME: arrays[NAME]}, folder / "part.safetensors")
    _index(folder, dict.fromkeys(arrays, "part.safetensors"))
    refused(folder, "promises transformer.wpe.weight")
    _index(folder, {f"n{i}": f"f{i}.safetensors" for i in range(10_001)})
    refused(folder, "more than 10000 files")
    _index(folder, {NAME: "part.safetensors"})
    refused(folder, "no values for transformer.wpe.weight")
    os.mkfifo(folder / "pipe.safetensors")
    _index(folder, dict.fromkeys(arrays, "pipe.safetensors"))
    refused(folder, "there is no file")


def test_weights_that_do_not_fit(folder: Path) -> None:
    arrays = _arrays(folder)
    file = folder / "model.safetensors"
    save_file({**arrays, "transformer.extra": np.zeros(3, np.float32)}, file)
    refused(folder, "GPT2 has no transformer.extra")
    save_file({**arrays, NAME: arrays[NAME].T.copy()}, file)
    refused(folder, r"wte.weight is F32 \(4, 7\), and by the configuration float32\[7,4\]")
    save_file({**arrays, NAME: np.zeros((7, 4), np.int32)}, file)
    refused(folder, "wte.weight is I32")
    save_file({n: a for n, a in arrays.items() if n != NAME}, file)
    refused(folder, f"no values for {NAME}")
    many = {f"n{i}": np.zeros(1, np.float32) for i in range(2000)}
    save_file({**arrays, **many}, file)
    refused(folder, "and 1992 more")


def test_one_file_and_several_in_turn(folder: Path) -> None:
    """A folder has what was saved last, and nothing of before."""
    model = models.GPT2(CONFIG)
    for shard_bytes, files in ((200, 7), (10**9, 1), (400, 4), (10**9, 1)):
        changed_values = {n: a + 1 for n, a in model.values().items()}
        models.save(model, folder, changed_values, shard_bytes=shard_bytes)
        assert len(list(folder.glob("*.safetensors"))) >= min(files, 2)
        assert (len(list(folder.glob("*.safetensors"))) == 1) == (files == 1)
        found = models.load(folder).values()
        assert all(np.array_equal(found[n], a) for n, a in changed_values.items())


def test_files_of_pytorch(folder: Path) -> None:
    torch = pytest.importorskip("torch")
    wanted = models.load(folder).values()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, "not a file of PyTorch")
    tensors = {n: torch.tensor(a) for n, a in wanted.items()}
    torch.save(tensors, folder / "pytorch_model.bin")
    found = models.load(folder).values()
    assert all(np.array_equal(found[n], a) for n, a in wanted.items())
    del tensors[NAME]
    torch.save(tensors, folder / "pytorch_model.bin")
    refused(folder, f"no values for {NAME}")
    (folder / "pytorch_model.bin").rename(folder / "a.bin")
    torch.save({NAME: torch.tensor(wanted[NAME])}, folder / "b.bin")
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {NAME: "b.bin", "x": "a.bin"}}))
    assert np.array_equal(models.load(folder).values()[NAME], wanted[NAME])
    index.write_text(json.dumps({"weight_map": {NAME: "../b.bin"}}))
    refused(folder, "names the file")


def test_other_places(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "there is no folder")
    refused(tmp_path, "config.json")
    with pytest.raises(td.ArgumentError, match="the path is 7"):
        models.load(7)  # type: ignore[arg-type]


def test_tokenizers_that_are_none(folder: Path) -> None:
    pytest.importorskip("tokenizers")
    for content in (b"", b"{}", b"[" * 10_000, b"\xff" * 9, b'{"model": {"type": "BPE"}}'):
        (folder / "tokenizer.json").write_bytes(content)
        model = models.load(folder, device="oracle")  # tokens can be used without
        assert len(model.generate([1], 1, eos_token_id=())) == 2
        with pytest.raises(td.LoadError, match="tokenizer.json"):
            model.generate("text", 1)


def test_generation_settings_that_are_none(folder: Path) -> None:
    for ends in ("x", [None], -1, {"a": 1}, 1e9):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        assert models.load(folder).ends is None
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert models.load(folder).ends == (3, 4)


def test_nothing_is_saved_by_halves(tmp_path: Path) -> None:
    model = models.GPT2(CONFIG)
    with pytest.raises(td.LoadError, match="missing"):
        models.save(model, tmp_path / "a", {})
    assert not (tmp_path / "a").exists()
    with pytest.raises(td.ArgumentError, match="MLP has no folder format"):
        models.save(models.MLP([2, 2]), tmp_path / "b")
    (tmp_path / "file").write_text("")
    with pytest.raises(td.SaveError):
        models.save(model, tmp_path / "file")


SMALL: dict[str, tuple[Any, ...]] = {
    "mamba": (models.Mamba, models.MambaConfig(vocab_size=7, hidden_size=4, num_hidden_layers=1)),
    "whisper": (
        models.Whisper,
        models.WhisperConfig(
            vocab_size=7,
            d_model=4,
            num_mel_bins=3,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=1,
            decoder_attention_heads=2,
            encoder_ffn_dim=3,
            decoder_ffn_dim=3,
            max_source_positions=4,
            max_target_positions=4,
        ),
    ),
    "unet": (
        models.UNet2D,
        models.UNet2DConfig(
            block_out_channels=(4, 8),
            norm_num_groups=2,
            attention_head_dim=2,
            layers_per_block=1,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        ),
    ),
}
HOSTILE: tuple[Any, ...] = (
    *(0, 1, 2, 3, -1, 63, 2**31, 10**12, 1e-9, 0.5, -0.5, 1e29, 1e308),
    *("", "x", "auto", None, True, [], [0], [-1, 2], [4, 8, 16], [10**9] * 3, ["x"], [[]], {}),
    {"a": [1]},
)


def hostile(name: str, count: int, seed: int = 0) -> int:
    """How many configurations with some wrong values were refused; others build a model."""
    make, config = SMALL[name]
    known, source = config.json(), {**config.json()}
    architecture = ARCHITECTURES[make.architecture]
    rng, refusals = np.random.default_rng(seed), 0
    fields = sorted(known)
    for _ in range(count):
        chosen = rng.choice(len(fields), int(rng.integers(1, 3)), replace=False)
        changes = {fields[i]: HOSTILE[int(rng.integers(0, len(HOSTILE)))] for i in chosen}
        try:
            architecture.build({**source, **changes}).declarations()
        except td.TreadleError:
            refusals += 1
    return refusals


@pytest.mark.parametrize("name", SMALL)
def test_hostile_configurations(name: str) -> None:
    assert 60 < hostile(name, 150) < 150


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_many_hostile_configurations(name: str) -> None:
    assert hostile(name, 40_000, seed=1) > 15_000


def _mutated(data: bytes, rng: np.random.Generator) -> bytes:
    """Some bytes changed, removed or inserted, most of them near the beginning."""
    found = bytearray(data)
    for _ in range(rng.integers(1, 4)):
        at = int(rng.integers(0, max(1, min(len(found), 400))))
        kind = rng.integers(0, 4)
        if kind == 0 and found:
            found[at % len(found)] = int(rng.integers(0, 256))
        elif kind == 1:
            del found[at : at + int(rng.integers(1, 20))]
        elif kind == 2:
            found[at:at] = bytes(rng.integers(0, 256, int(rng.integers(1, 9))).astype(np.uint8))
        else:
            del found[len(found) - int(rng.integers(1, 50)) :]
    return bytes(found)


def mutate(folder: Path, count: int, seed: int = 0) -> int:
    """How many of some mutated folders were refused; whatever else happens is raised."""
    rng = np.random.default_rng(seed)
    files = ["config.json", "model.safetensors"]
    whole = {name: (folder / name).read_bytes() for name in files}
    refusals = 0
    for _ in range(count):
        name = files[int(rng.integers(0, 2))]
        (folder / name).write_bytes(_mutated(whole[name], rng))
        try:
            models.load(folder, device="oracle")
        except td.TreadleError:
            refusals += 1
        (folder / name).write_bytes(whole[name])
    return refusals


def test_mutated_folders(folder: Path) -> None:
    assert mutate(folder, 150) > 75


@pytest.mark.slow
def test_many_mutated_folders(folder: Path) -> None:
    assert mutate(folder, 20_000, seed=1) > 10_000


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("m.safetensors", "models.load_weights"),
        ("m.pt", "models.load_weights"),
        ("m.onnx", r"interop\.onnx\.load"),
    ],
)
def test_files_that_are_no_model_name_their_reader(tmp_path: Path, name: str, remedy: str) -> None:
    (tmp_path / name).write_bytes(bytes(64))
    with pytest.raises(td.LoadError, match=f"neither a folder nor a GGUF.*{remedy}"):
        models.load(tmp_path / name)
