"""The metadata of GGUF files, as configurations and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from treadle.base.errors import ArgumentError, LoadError
from treadle.interop import gguf
from treadle.models.gpt2 import GPT2, GPT2Config
from treadle.models.llama import ARCHITECTURES as LLAMA_FAMILY
from treadle.models.llama import Llama, LlamaConfig
from treadle.models.model import Model
from treadle.models.positions import rotary_rates

ROTATIONS = "rope_freqs.weight"  # what each rate of Llama 3's rotations is divided by
FILE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 7, "bf16": 32}  # general.file_type
TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")  # what llama.cpp computes for GPT-2
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}

# Keys behind the architecture's name, and what they are in config.json.
COMMON = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
}
OF_GPT2 = {
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "feed_forward_length": "n_inner",
    "block_count": "n_layer",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}
KEYS = {"llama": COMMON, "qwen2": COMMON, "qwen3": COMMON, "gpt2": OF_GPT2}
OPTIONAL = {  # what llama.cpp takes where a key is not there; for None it is derived
    "attention.head_count_kv": None,
    "attention.key_length": None,
    "attention.sliding_window": None,
    "rope.freq_base": 10000.0,
    "expert_count": 0,
    "expert_used_count": 2,
}
SPECIAL = {f"tokenizer.ggml.{n}_token_id": f"{n}_token_id" for n in ("bos", "eos")}
SPECIAL["tokenizer.ggml.padding_token_id"] = "pad_token_id"


def config_of(file: gguf.File) -> dict[str, Any]:
    """What config.json would say of the model in a file."""
    kind = file.metadata.get("general.architecture")
    if not isinstance(kind, str) or kind not in KEYS:
        cause = f"{file.path} has a model of the architecture {str(kind)[:80]!r}"
        raise LoadError("load", cause, f"Known are: {', '.join(KEYS)}.")
    if "token_embd.weight" not in file.tensors:
        raise LoadError("load", f"{file.path} has no token_embd.weight", "Use another copy.")
    found: dict[str, Any] = {}
    for key, ours in KEYS[kind].items():
        value = _field(file, f"{kind}.{key}")
        if value is None and key not in OPTIONAL:
            raise LoadError("load", f"{file.path} has no {kind}.{key}", "Use another copy.")
        found[ours] = OPTIONAL[key] if value is None else value
    found |= {ours: _field(file, key) for key, ours in SPECIAL.items()}
    _check_counts(file, kind)
    found["vocab_size"] = (file.tensors["token_embd.weight"].shape or (1,))[0]
    found["tie_word_embeddings"] = _is_tied(file)
    if kind == "gpt2":
        return {**found, "model_type": "gpt2", "architectures": [GPT2.architecture]}
    found["model_type"] = _member(kind, found)
    found |= {
        "attention_bias": kind != "qwen2" and "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "rope_scaling": _scaling(file, kind, found),
        "architectures": [LLAMA_FAMILY[found["model_type"]]],
    }
    return found


def _check_counts(file: gguf.File, kind: str) -> None:
    """Layers and experts are as many as there are tensors for: each is built before any is read."""
    layers, experts = (_field(file, f"{kind}.{n}") for n in ("block_count", "expert_count"))
    gates = file.tensors.get("blk.0.ffn_gate_exps.weight")
    there = gates.shape[0] if gates is not None and gates.shape else 0
    for key, count, most in (
        ("block_count", layers, len(file.tensors)),
        ("expert_count", experts, there),
    ):
        if isinstance(count, int) and count > most:
            cause = f"{file.path}: {kind}.{key} is {count}, and there are tensors for {most}"
            raise LoadError("load", cause, "Use another copy.")


def _field(file: gguf.File, key: str) -> object:
    """A value of the metadata; one for each layer, where all are the same, is that one.

    Floats have the digits of float32, not those of its nearest float64.
    """
    found = file.metadata.get(key)
    if isinstance(found, np.ndarray) and found.size and (found == found[0]).all():
        found = found[0].item()
    if isinstance(found, (np.ndarray, list)):
        cause = f"{file.path}: {key} is {str(found)[:80]}"
        raise LoadError("load", cause, "Models whose layers differ are not read.")
    if not isinstance(found, float):
        return found
    with np.errstate(over="ignore"):
        return float(str(np.float32(found)))


def _is_tied(file: gguf.File) -> bool:
    """Whether the head is the embedding: it is not there, or there with the same bytes."""
    if "output.weight" not in file.tensors:
        return True
    embedding, head = file.tensors["token_embd.weight"], file.tensors["output.weight"]
    is_alike = (embedding.format, embedding.shape) == (head.format, head.shape)
    return is_alike and np.array_equal(file.raw(embedding.name), file.raw(head.name))


def _member(kind: str, found: Mapping[str, Any]) -> str:
    """Llama's architecture in a file is Mistral's and Mixtral's too."""
    if kind != "llama":
        return kind
    if found.get("num_local_experts"):
        return "mixtral"
    return "mistral" if found.get("sliding_window") else "llama"


def _scaling(file: gguf.File, kind: str, found: Mapping[str, Any]) -> dict[str, Any] | None:
    """Of rotations: by factors of each rate for Llama 3, by metadata for the others."""
    prefix = f"{kind}.rope.scaling"
    type_ = _field(file, f"{prefix}.type")
    if ROTATIONS in file.tensors:
        return _llama3(file, found)
    if type_ in (None, "none"):
        return None
    if type_ not in ("linear", "yarn"):
        cause = f"{file.path}: {prefix}.type is {str(type_)[:40]!r}"
        raise LoadError("load", cause, "Known are linear, yarn and Llama 3's factors.")
    given = {"rope_type": type_, "factor": _field(file, f"{prefix}.factor")}
    before = _field(file, f"{prefix}.original_context_length")
    return {**given, "original_max_position_embeddings": before} if before is not None else given


def _llama3(file: gguf.File, found: Mapping[str, Any]) -> dict[str, Any]:
    """The scaling whose factors a file has: the greatest is told, the rest are as published."""
    entry = file.tensors[ROTATIONS]
    factors = file.array(ROTATIONS).astype(np.float64) if len(entry.shape) == 1 else np.zeros(0)
    size, base = 2 * factors.size, found.get("rope_theta", 10000.0)
    if 2 <= size <= 1 << 16 and np.isfinite(factors).all() and factors.min() >= 1:
        scaling = {**LLAMA3, "factor": float(factors.max())}
        if isinstance(base, float) and 1 < base < 1e30:
            known = _factors(size, base, scaling)
            if np.allclose(known, factors, rtol=1e-3):
                return scaling
    cause = f"{file.path} has factors of rotations that are not those of Llama 3"
    raise LoadError("load", cause, "Load the model from a folder.")


def _factors(size: int, base: float, scaling: Mapping[str, Any]) -> np.ndarray:
    plain, _ = rotary_rates(size, base, {})
    slowed, _ = rotary_rates(size, base, scaling)
    found: np.ndarray = plain / slowed
    return found


def llama3_factors(config: LlamaConfig) -> np.ndarray | None:
    """What the rates of a model's rotations are divided by, if they are scaled as Llama 3's."""
    scaling = config.rope_scaling or {}
    if scaling.get("rope_type", scaling.get("type")) != "llama3":
        return None
    return _factors(config.head_width, config.rope_theta, scaling).astype(np.float32)


def metadata_of(model: Model, dtype: str) -> dict[str, Any]:
    """What a file says of a model; one that llama.cpp would compute otherwise is refused."""
    if isinstance(model, GPT2):
        kind, own = "gpt2", _of_gpt2(model.config)
    elif isinstance(model, Llama):
        kind, own = _of_llama(model.config)
    else:
        cause = f"{type(model).__name__} has no GGUF format here"
        raise ArgumentError("save", cause, "GPT2 and Llama have one; save a folder.")
    found: dict[str, Any] = {"general.architecture": kind, "general.quantization_version": 2}
    if dtype in FILE_TYPES:
        found["general.file_type"] = FILE_TYPES[dtype]
    config: dict[str, Any] = vars(model.config)
    own |= {key: config.get(ours) for key, ours in KEYS[kind].items() if key not in own}
    found |= {f"{kind}.{key}": value for key, value in own.items() if value}
    for key, ours in SPECIAL.items():
        value = config.get(ours)
        first = value[0] if isinstance(value, tuple) and value else value
        if isinstance(first, int):
            found[key] = first
    return found


def _of_gpt2(config: GPT2Config) -> dict[str, Any]:
    _need(config.activation_function in TANH, "activation_function", config.activation_function)
    _need(config.scale_attn_weights, "scale_attn_weights", False)
    is_plain = not config.scale_attn_by_inverse_layer_idx
    _need(is_plain, "scale_attn_by_inverse_layer_idx", True)
    inner = 4 * config.n_embd if config.n_inner is None else config.n_inner
    return {"vocab_size": config.vocab_size, "feed_forward_length": inner}


def _of_llama(config: LlamaConfig) -> tuple[str, dict[str, Any]]:
    """The architecture, and what is not in the configuration by the same name."""
    _need(config.hidden_act in ("silu", "swish"), "hidden_act", config.hidden_act)
    windows = {config.window(i) for i in range(config.num_hidden_layers)}
    _need(len(windows) == 1, "layer_types", "both kinds")
    kind = config.model_type if config.model_type in ("qwen2", "qwen3") else "llama"
    window = windows.pop()
    _need(kind == "llama" or window is None, "sliding_window", window)
    found: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "attention.head_count_kv": config.kv_heads,
        "attention.key_length": config.head_width,
        "attention.value_length": config.head_width,
        "attention.sliding_window": window,
        "rope.dimension_count": config.head_width,
    }
    if not config.num_local_experts:
        found |= {"expert_count": None, "expert_used_count": None}
    return kind, found | _scaling_metadata(config)


def _scaling_metadata(config: LlamaConfig) -> dict[str, Any]:
    scaling = dict(config.rope_scaling or {})
    type_ = scaling.pop("rope_type", scaling.pop("type", "default"))
    if type_ in ("default", "llama3"):
        return {}
    others = set(scaling) - {"factor", "original_max_position_embeddings", "rope_theta"}
    _need(not others, "rope_scaling", ", ".join(sorted(others)))
    found = {"rope.scaling.type": type_, "rope.scaling.factor": float(scaling["factor"])}
    before = scaling.get("original_max_position_embeddings")
    return {**found, "rope.scaling.original_context_length": before} if before else found


def _need(holds: bool, name: str, value: object) -> None:
    if not holds:
        cause = f"{name} = {value!r} has no place in a GGUF file"
        raise ArgumentError("save", cause, "Save a folder, with models.save(model, folder).")
