"""Adapters alone, in PEFT's files: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from treadle.base.errors import ArgumentError, LoadError
from treadle.base.memory import refuse_beyond
from treadle.models.causal import CausalModel
from treadle.models.config import Json
from treadle.models.decoding import KeyShape
from treadle.models.model import listed
from treadle.models.prefix import PREFIX, Prefix, prefix_of, prefix_tuning
from treadle.models.weights import (
    FLOATS,
    LARGEST_CONFIG,
    Entry,
    encoded,
    header,
    read_entries,
    read_json,
)
from treadle.nn.bottleneck import ACTIVATIONS, Bottleneck, bottleneck, bottlenecks, width_of
from treadle.nn.lora import Adapted, LoRA, adapters, is_linear, lora, take_values
from treadle.nn.module import Declaration, Module
from treadle.nn.targets import is_target
from treadle.runtime.files import as_path, write_file
from treadle.runtime.foreign import readable

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FIRST = "base_model.model."  # begins the names in PEFT's files
PROMPT = "prompt_embeddings"
PLAIN = re.compile(r"[A-Za-z0-9_.\-]+")  # keys of patterns that are names, not expressions
OTHER_LORA = (  # settings of PEFT that make of a layer something else than W + scale · B A
    "alora_invocation_tokens",
    "bias",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "target_parameters",
    "trainable_token_indices",
    "use_dora",
    "use_qalora",
)
SAME_START = (True, False, None, "gaussian", "eva", "orthogonal")  # others change the base's values
MOST_PATTERNS = 10_000
LARGEST = 1e9  # of strengths: beyond it are files that were tampered with


def save_adapter(
    model: Module,
    path: str | Path,
    values: Mapping[str, object] | None = None,
    *,
    base: str | None = None,
) -> None:
    """Write a model's low-rank adapters, or its prefix, without the model, as `peft` reads them.

    `values` are those of a step, `step.params`; without, those that the model starts from. `base`
    is the name or path of the model that `peft` looks for by itself.
    """
    if not isinstance(model, Module):
        raise ArgumentError("save_adapter", f"{model!r} is no module", "Pass a module.")
    low, narrow, prefix = adapters(model), bottlenecks(model), prefix_of(model)
    if bool(low) + bool(narrow) + (prefix is not None) != 1:
        kinds = {"low-rank adapters": low, "bottleneck adapters": narrow, "a prefix": prefix}
        there = " and ".join(name for name, found in kinds.items() if found) or "no adapters"
        cause = f"{type(model).__name__} has {there}"
        remedy = "A folder has one kind: nn.lora, nn.bottleneck or models.prefix_tuning makes it."
        raise ArgumentError("save_adapter", cause, remedy)
    folder, given = as_path("save_adapter", path), values or {}
    config, arrays = _described(model, given)
    config |= {
        "base_model_name_or_path": base,
        "inference_mode": True,
        "task_type": "CAUSAL_LM" if isinstance(model, CausalModel) else None,
    }
    write_file(folder / WEIGHTS, partial(encoded, arrays))
    write_file(folder / CONFIG, partial(_json_bytes, config))


def _described(
    model: Module, given: Mapping[str, object]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The configuration and the values of a model's one kind of adapters."""
    low, narrow, prefix = adapters(model), bottlenecks(model), prefix_of(model)
    if prefix is not None:
        return _prefix_config(prefix), {PROMPT: _value(prefix.embeddings, PREFIX, given)}
    config = _lora_config(model, low) if low else _bottleneck_config(narrow)
    named: Mapping[str, Adapted] = {**low, **narrow}
    arrays = {
        f"{FIRST}{path}.{name}.{own}": _value(value, f"{path}.{name}.{own}", given)
        for path, part in named.items()
        for name, layer in part.added()
        for own, value in layer.named_parameters()
    }
    return config, arrays


def load_adapter(model: Module, path: str | Path) -> Module:
    """The model with the adapters, or the prefix, of a folder that `peft` or `save_adapter` wrote.

    What is in the model already is frozen. Names, shapes and sizes are compared with the model
    before any value is read, and nothing in the folder is executed: expressions neither.
    """
    if not isinstance(model, Module):
        raise ArgumentError("load_adapter", f"{model!r} is no module", "Pass a module.")
    folder = as_path("load_adapter", path)
    config = read_json(folder / CONFIG, LARGEST_CONFIG)
    entries = header(folder / WEIGHTS)
    refuse_beyond("load_adapter", f"what is in {folder}", sum(e.nbytes for e in entries.values()))
    odd = [n for n, e in entries.items() if e.dtype not in FLOATS]
    if odd:
        raise _wrong(folder, f"{listed(odd)} are not floats")
    kind = config.get("peft_type")
    if kind == "LORA":
        return _load_lora(model, folder, config, entries)
    if kind == "PREFIX_TUNING":
        return _load_prefix(model, folder, entries)
    if kind == "BOTTLENECK":
        return _load_bottleneck(model, folder, config, entries)
    cause = f"{folder / CONFIG}: peft_type is {str(kind)[:80]!r}"
    raise LoadError("load_adapter", cause, "Known are LORA, PREFIX_TUNING and BOTTLENECK.")


def _wrong(folder: Path, what: str) -> LoadError:
    remedy = "Check that the adapter was made for this model."
    return LoadError("load_adapter", f"{folder}: {what}", remedy)


# Low-rank adapters


def _value(declaration: Declaration, name: str, given: Mapping[str, object]) -> np.ndarray:
    if name not in given:
        return declaration.first_value(0, name)
    value = np.asarray(readable(given[name]))
    if value.shape != declaration.shape:
        cause = f"{name} is {declaration.type}, given the shape {value.shape}"
        raise ArgumentError("save_adapter", cause, "Pass step.params of a step of this model.")
    return value


def _lora_config(model: Module, found: Mapping[str, LoRA]) -> dict[str, Any]:
    first = next(iter(found.values()))
    if any(part.merged for part in found.values()):
        cause = "its adapters are merged into their weights"
        raise ArgumentError("save_adapter", cause, "Call nn.unmerge(model) first.")
    if any(part.rslora != first.rslora for part in found.values()):
        cause = "some adapters are scaled by alpha / r and some by alpha / √r"
        raise ArgumentError("save_adapter", cause, "A folder has one kind: use one for all.")
    return {
        "peft_type": "LORA",
        "r": first.r,
        "lora_alpha": _number(first.alpha),
        "lora_dropout": first.lora_dropout.p,
        "use_rslora": first.rslora,
        "rank_pattern": {n: p.r for n, p in found.items() if p.r != first.r},
        "alpha_pattern": {n: _number(p.alpha) for n, p in found.items() if p.alpha != first.alpha},
        "target_modules": _named(model, found),
        "fan_in_fan_out": all(part.base.fan_in_fan_out for part in found.values()),
        "bias": "none",
        "modules_to_save": None,
    }


def _number(value: float) -> float:
    """A whole number as an integer, as PEFT writes it."""
    return int(value) if value == int(value) else value


def _named(model: Module, found: Mapping[str, LoRA]) -> list[str]:
    """Last parts of paths where those mean the same layers, or whole paths."""
    short = sorted({path.rpartition(".")[2] for path in found})
    meant = {n for n, m in model.named_modules() if n and is_target(short, n)}
    return short if meant == set(found) else sorted(found)


def _load_lora(model: Module, folder: Path, config: Json, entries: Mapping[str, Entry]) -> Module:
    _refuse_others(folder, config)
    pairs = _pairs(folder, entries)
    layers = {n: m for n, m in model.named_modules() if is_linear(m)}
    unknown = [path for path in pairs if path not in layers]
    if unknown:
        raise _wrong(
            folder, f"the model has no linear layer without an adapter at {listed(unknown)}"
        )
    alphas = _alphas(folder, config)
    scales: dict[str, tuple[int, float]] = {}
    for path, (a, b) in pairs.items():
        layer, r = layers[path], (a.shape[0] if a.shape else 0)
        if r < 1 or a.shape != (r, layer.in_features) or b.shape != (layer.out_features, r):
            sizes = f"{layer.in_features} to {layer.out_features} features"
            raise _wrong(folder, f"{path}: A {a.shape} and B {b.shape} for a layer of {sizes}")
        scales[path] = (r, _alpha_of(path, alphas, config["lora_alpha"]))
    arrays = read_entries({e.name: e for pair in pairs.values() for e in pair})
    dropout, rslora = config.get("lora_dropout", 0.0), bool(config.get("use_rslora"))
    for r, alpha in dict.fromkeys(scales.values()):
        paths = [path for path, found in scales.items() if found == (r, alpha)]
        lora(model, r, alpha, dropout, set(paths).__contains__, rslora)
    take_values("load_adapter", model, {n.removeprefix(FIRST): a for n, a in arrays.items()})
    model._restructured()
    return model


def _refuse_others(folder: Path, config: Json) -> None:
    odd = [n for n in OTHER_LORA if config.get(n) not in (None, False, "none", [], {})]
    if config.get("init_lora_weights", True) not in SAME_START:
        odd.append("init_lora_weights")
    if odd:
        cause = f"{folder / CONFIG} sets {', '.join(f'{n} = {config[n]!r:.80}' for n in odd)}"
        raise LoadError("load_adapter", cause, "Only W + scale · B A is known: merge it there.")
    for name in ("r", "lora_alpha"):
        if not _is_positive(config.get(name)):
            cause = f"{folder / CONFIG}: {name} = {str(config.get(name))[:80]}"
            raise LoadError("load_adapter", cause, "It is a positive number.")


def _is_positive(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < LARGEST


def _pairs(folder: Path, entries: Mapping[str, Entry]) -> dict[str, tuple[Entry, Entry]]:
    """A and B of each layer, by its path."""
    found: dict[str, dict[str, Entry]] = {}
    odd = []
    for name, entry in entries.items():
        match = re.fullmatch(r"base_model\.model\.(.+)\.lora_([AB])\.weight", name)
        if match is None:
            odd.append(name)
        else:
            found.setdefault(match[1], {})[match[2]] = entry
    odd += [path for path, pair in found.items() if len(pair) < 2]
    if odd or not found:
        what = f"{listed(odd)} are no pairs of lora_A and lora_B" if odd else "it has no adapters"
        raise _wrong(folder, what)
    return {path: (pair["A"], pair["B"]) for path, pair in found.items()}


def _alphas(folder: Path, config: Json) -> Mapping[str, float]:
    """Strengths by names of modules. Expressions, which PEFT takes too, are not evaluated."""
    given = config.get("alpha_pattern") or {}
    is_right = isinstance(given, Mapping) and len(given) <= MOST_PATTERNS
    for key, value in given.items() if is_right else ():
        is_right = is_right and _is_positive(value) and PLAIN.fullmatch(key) is not None
    if not is_right:
        cause = f"{folder / CONFIG}: alpha_pattern has more than names and positive numbers"
        raise LoadError("load_adapter", cause, "Write paths of modules there.")
    return given


def _alpha_of(path: str, alphas: Mapping[str, float], usual: float) -> float:
    parts = path.split(".")
    ends = [".".join(parts[i:]) for i in range(len(parts))]
    return float(next((alphas[end] for end in ends if end in alphas), usual))


# Bottlenecks, which PEFT has not


def _bottleneck_config(found: Mapping[str, Bottleneck]) -> dict[str, Any]:
    first = next(iter(found.values()))
    settings = {(p.size, p.activation, p.scale) for p in found.values()}
    if len(settings) > 1:
        cause = f"its bottlenecks differ: {sorted(settings)}"
        raise ArgumentError("save_adapter", cause, "A folder has one kind: use one for all.")
    return {
        "peft_type": "BOTTLENECK",
        "bottleneck_size": first.size,
        "non_linearity": first.activation,
        "scaling": first.scale,
        "target_modules": sorted(found),
    }


def _load_bottleneck(
    model: Module, folder: Path, config: Json, entries: Mapping[str, Entry]
) -> Module:
    size, activation = config.get("bottleneck_size"), config.get("non_linearity")
    scale, paths = config.get("scaling"), config.get("target_modules")
    is_named = isinstance(paths, list) and all(isinstance(p, str) for p in paths)
    is_known = isinstance(activation, str) and activation in ACTIVATIONS
    if not (isinstance(size, int) and size > 0 and is_named and is_known and _is_positive(scale)):
        raise _wrong(folder, "bottleneck_size, non_linearity, scaling or target_modules is wrong")
    assert isinstance(paths, list)
    widths = {n: width for n, m in model.named_modules() if (width := width_of(m)) is not None}
    unknown = [path for path in paths if path not in widths]
    if unknown or not paths:
        raise _wrong(folder, f"the model has no layer without an adapter at {listed(unknown)}")
    wanted: dict[str, tuple[int, ...]] = {}
    for path in paths:
        width, name = widths[path], f"{FIRST}{path}"
        wanted |= {f"{name}.adapter_down.weight": (size, width)}
        wanted |= {f"{name}.adapter_down.bias": (size,), f"{name}.adapter_up.bias": (width,)}
        wanted |= {f"{name}.adapter_up.weight": (width, size)}
    odd = [
        n for n in {**wanted, **entries} if n not in entries or wanted.get(n) != entries[n].shape
    ]
    if odd:
        raise _wrong(folder, f"{listed(odd)} are missing, of another shape or too many")
    arrays = read_entries(entries)
    bottleneck(model, size, set(paths).__contains__, str(activation), float(scale))
    take_values("load_adapter", model, {n.removeprefix(FIRST): a for n, a in arrays.items()})
    model._restructured()
    return model


# Prefixes


def _prefix_config(prefix: Prefix) -> dict[str, Any]:
    return {
        "peft_type": "PREFIX_TUNING",
        "num_virtual_tokens": prefix.length,
        "num_layers": len(prefix.shapes),
        "num_attention_heads": prefix.shapes[0].heads,
        "token_dim": prefix.shapes[0].heads * prefix.shapes[0].width,
        "num_transformer_submodules": 1,
        "prefix_projection": False,
        "encoder_hidden_size": None,
    }


def _load_prefix(model: Module, folder: Path, entries: Mapping[str, Entry]) -> Module:
    shape = entries[PROMPT].shape if set(entries) == {PROMPT} else ()
    if len(shape) != 2 or shape[0] < 1:
        raise _wrong(folder, f"it has {listed(list(entries))}, and not {PROMPT} alone")
    if not isinstance(model, CausalModel):
        raise _wrong(folder, f"{type(model).__name__} takes no prefix")
    shapes = [s for s in model.key_shapes() if isinstance(s, KeyShape)]
    width = sum(2 * s.heads * s.width for s in shapes)
    if shape[1] != width:
        raise _wrong(folder, f"keys and values of a position are {shape[1]} numbers, not {width}")
    arrays = read_entries(entries)
    prefix_tuning(model, shape[0])
    take_values("load_adapter", model, {PREFIX: arrays[PROMPT]})
    model._restructured()
    return model


def _json_bytes(value: object) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
