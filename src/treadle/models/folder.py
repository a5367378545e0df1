"""Folders of `transformers`: config.json, safetensors in one file or several, tokenizer.json."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from treadle.base.errors import ArgumentError, LoadError, TreadleError
from treadle.base.numbers import check_whole
from treadle.interop import npz, torch_files
from treadle.models.architectures import ARCHITECTURES, Architecture
from treadle.models.causal import CausalModel
from treadle.models.config import MOST, Json
from treadle.models.gguf import load_gguf, save_gguf
from treadle.models.model import Model
from treadle.models.seq2seq import SourceModel
from treadle.models.tokenizer import LARGEST, Tokenizer
from treadle.models.weights import (
    LARGEST_CONFIG,
    STEMS,
    encoded,
    index_file,
    named_values,
    read_json,
    read_weights,
    weights_file,
)
from treadle.nn.lora import Extra
from treadle.nn.quantization import Quantized
from treadle.runtime.files import as_path, write_file
from treadle.step.loading import load_model

GGUF = ".gguf"
READERS = dict.fromkeys((".pt", ".pth", ".bin"), torch_files.load) | {".npz": npz.load}
CONFIG, TOKENIZER, GENERATION = "config.json", "tokenizer.json", "generation_config.json"
TEMPLATES = "additional_chat_templates"
# Files that readers of a folder look for beside its weights, whatever the model.
COMPANIONS = (
    *(TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "normalizer.json"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
    *(GENERATION, "chat_template.jinja", "chat_template.json"),
    *("preprocessor_config.json", "processor_config.json"),
)
VERSION = "0.35.0"  # of `diffusers`, whose format is written
VALUES = "Build the model and call models.load_weights(model, file), or name the folder with its "
VALUES += "config.json."
OTHERS = dict.fromkeys((".safetensors", *READERS), VALUES)  # files that are no model by themselves
OTHERS[".onnx"] = "Use td.interop.onnx.load(file)."
SHARD = 5_000_000_000  # bytes of a file that `save` writes, as `transformers` has it


def load(
    path: str | Path,
    *,
    device: str = "auto",
    precision: str = "float32",
    dtype: object = "float32",
) -> Any:
    """The model of a folder that `transformers` or `models.save` wrote, or of a GGUF file.

    Values lie in memory as `dtype`, and products are computed in `precision`.
    Nothing in it is executed, the pickles in PyTorch's files neither. Names, shapes and sizes are
    compared with the configuration before any value is taken.
    """
    folder = as_path("load", path)
    if folder.is_dir():
        model, values = _from_folder(folder)
    elif folder.is_file() and folder.suffix in OTHERS:
        cause = f"{folder} is neither a folder nor a GGUF file"
        raise LoadError("load", cause, OTHERS[folder.suffix])
    elif folder.suffix == GGUF or folder.is_file():
        model, values = load_gguf(folder)
    else:
        remedy = "Name one with a config.json, or a GGUF file."
        raise LoadError("load", f"there is no folder {folder}", remedy)
    model.device, model.precision = device, precision
    model.hold(dtype).start_from(values)
    return model


def _from_folder(folder: Path) -> tuple[Model, dict[str, np.ndarray]]:
    given = read_json(folder / CONFIG, LARGEST_CONFIG)
    architecture = _architecture(folder, given)
    try:
        model = architecture.build(given)
    except TreadleError as error:
        cause = f"{folder / CONFIG}: {error.cause}"
        raise LoadError("load", cause, error.remedy) from error
    model.source, model.companions = given, _companions(folder)
    values = read_weights(folder, model)
    if isinstance(model, (CausalModel, SourceModel)):
        _attach(folder, model)
    return model, values


def load_weights(model: Model, path: str | Path) -> Model:
    """Give a model the values of one file, by name; torchvision's state dicts fit.

    It is a safetensors file, or by its ending PyTorch's (.pt, .pth, .bin) or NumPy's (.npz).
    """
    if not isinstance(model, Model):
        raise ArgumentError("load_weights", f"{model!r} is no model", "Pass one of td.models.")
    read = READERS.get(as_path("load_weights", path).suffix, load_model)
    model.start_from(named_values(model, read(path)))
    return model


def save(
    model: Model,
    path: str | Path,
    values: Mapping[str, object] | None = None,
    *,
    shard_bytes: int = SHARD,
    dtype: str | None = None,
) -> None:
    """Write a folder that `transformers` and `models.load` open, or a GGUF file.

    `values` are those of a step, `step.params`; without, what the model was loaded with. The
    tokenizer, chat templates and settings of generation are those of the folder it was loaded from.
    Files are written aside and renamed, the configuration last. Folders have float32; a path that
    ends in `.gguf` is a file in the format `dtype`: f32, f16 (the default), bf16, q8_0 or q4_0.
    """
    if not isinstance(model, Model) or not model.architecture:
        cause = f"{type(model).__name__} has no folder format"
        raise ArgumentError("save", cause, "Write its values with Forward.save or TrainStep.save.")
    _check_plain(model)
    folder = as_path("save", path)
    if values is not None:
        model.start_from(values)
    if folder.suffix == GGUF:
        save_gguf(model, folder, dtype or "f16")
        return
    if dtype not in (None, "f32"):
        cause = f"dtype = {dtype!r} for the folder {folder}, which has float32"
        raise ArgumentError("save", cause, 'Name a file, "model.gguf".')
    arrays = model.values()
    shards = _shards(arrays, shard_bytes)
    stem = STEMS[model.library]
    names = _shard_names(stem, len(shards))
    for name, part in zip(names, shards, strict=True):
        chosen = {n: arrays[n] for n in part}
        write_file(folder / name, partial(encoded, chosen))
    if len(shards) > 1:
        weight_map = {n: name for name, part in zip(names, shards, strict=True) for n in part}
        total = sum(a.nbytes for a in arrays.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_file(folder / index_file(stem), partial(_json_bytes, index))
    _remove_others(folder, stem, {*names, *([index_file(stem)] if len(shards) > 1 else [])})
    beside: dict[str, Callable[[], bytes]] = {
        name: partial(bytes, content) for name, content in model.companions.items()
    }
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is not None:
        beside[TOKENIZER] = tokenizer.file
    for name, content in beside.items():
        write_file(folder / name, content)
    write_file(folder / CONFIG, partial(_json_bytes, _described(model)))


def _check_plain(model: Model) -> None:
    """Refuse what no folder has: adapters beside the layers, and weights of few bits."""
    for name, part in model.named_modules():
        if isinstance(part, Extra):
            remedy = "Call nn.merge(model) first, or write them alone: models.save_adapter."
            raise ArgumentError("save", f"{name} is an adapter's", remedy)
        if isinstance(part, Quantized):
            cause = f"{name} is in blocks of {part.form.name}"
            raise ArgumentError("save", cause, "Call nn.dequantize(model) first.")


def _architecture(folder: Path, given: Json) -> Architecture:
    named = given.get("architectures")
    name = named[0] if isinstance(named, list) and named else given.get("_class_name")
    if isinstance(name, str) and name in ARCHITECTURES:
        return ARCHITECTURES[name]
    known = ", ".join(sorted(ARCHITECTURES))
    cause = f"{folder / CONFIG} names the architecture {str(name)[:80]!r}"
    raise LoadError("load", cause, f"Known are: {known}.")


def _companions(folder: Path) -> dict[str, bytes]:
    """What a folder has beside the configuration and the weights, of the names that are known."""
    paths = [folder / name for name in COMPANIONS]
    paths += sorted((folder / TEMPLATES).glob("*.jinja"))
    found = {}
    for path in paths:
        if path.is_file():
            if path.stat().st_size > LARGEST:
                cause = f"{path} has {path.stat().st_size:,} bytes, more than {LARGEST:,}"
                raise LoadError("load", cause, "It belongs to no model. Remove it.")
            found[path.relative_to(folder).as_posix()] = path.read_bytes()
    return found


def _attach(folder: Path, model: CausalModel | SourceModel) -> None:
    if TOKENIZER in model.companions:
        content = model.companions[TOKENIZER]  # held: the folder may be gone when it is used
        text = partial(content.decode, "utf-8", "surrogateescape")
        model.tokenizer = Tokenizer(folder / TOKENIZER, text)
    if (folder / GENERATION).is_file():
        given = read_json(folder / GENERATION, LARGEST_CONFIG)
        found = given.get("eos_token_id")
        ends = tuple(found) if isinstance(found, list) else (found,)
        if all(type(t) is int and 0 <= t <= MOST for t in ends):  # else the configuration's
            model.ends = ends
        if isinstance(model, SourceModel):
            model.configure(given)


def _shards(arrays: Mapping[str, np.ndarray], most: int) -> list[list[str]]:
    """Names in files of at most so many bytes, in their order."""
    check_whole("save", "shard_bytes", most)
    found: list[list[str]] = [[]]
    size = 0
    for name, array in arrays.items():
        if found[-1] and size + array.nbytes > most:
            found.append([])
            size = 0
        found[-1].append(name)
        size += array.nbytes
    return found


def _shard_names(stem: str, count: int) -> list[str]:
    if count == 1:
        return [weights_file(stem)]
    return [f"{stem}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def _remove_others(folder: Path, stem: str, written: set[str]) -> None:
    """What an earlier `save` left: a reader would take one file before several."""
    part = re.compile(rf"{stem}-\d{{5}}-of-\d{{5}}\.safetensors")
    whole = weights_file(stem), index_file(stem)
    for file in (*(folder / n for n in whole), *folder.glob(f"{stem}-*-of-*.safetensors")):
        if file.name not in written and (file.name in whole or part.fullmatch(file.name)):
            file.unlink(missing_ok=True)


def _described(model: Model) -> dict[str, Any]:
    """What was read, with what the model is."""
    held = {p.dtype.name for p in model.parameters() if p.dtype.is_float}
    dtype = held.pop() if len(held) == 1 else "float32"
    own: dict[str, Any] = {"architectures": [model.architecture], "dtype": dtype}
    if model.library == "diffusers":
        own = {"_class_name": model.architecture, "_diffusers_version": VERSION}
    kept = {k: v for k, v in model.source.items() if k != "torch_dtype"}
    return {**kept, **model.config.json(), **own}


def _json_bytes(value: object) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
