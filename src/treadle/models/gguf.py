"""Models in GGUF files: llama.cpp's metadata and names of tensors, from and to ours."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from treadle.base.errors import ArgumentError, LoadError, TreadleError
from treadle.base.memory import refuse_beyond
from treadle.interop import gguf
from treadle.models.architectures import ARCHITECTURES
from treadle.models.causal import CausalModel
from treadle.models.gguf_config import ROTATIONS, config_of, llama3_factors, metadata_of
from treadle.models.gguf_tokenizer import tokenizer_metadata, tokenizer_of
from treadle.models.gpt2 import GPT2
from treadle.models.llama import Llama
from treadle.models.model import Model, listed

TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "lm_head": "output",
}
LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
EXPERT = {"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"}
IN_LAYER = re.compile(r"(?:model\.layers|transformer\.h)\.(\d+)\.(.+)")
IN_EXPERT = re.compile(r"block_sparse_moe\.experts\.(\d+)\.(w[123])")
ALWAYS_F32 = ("ffn_gate_inp.weight", "position_embd.weight")  # as llama.cpp's converter has it


@dataclass(frozen=True)
class Place:
    """Where a value is in a file, and how it lies there.

    Heads of `paired` queries or keys have the two halves that are rotated together interleaved.
    """

    tensor: str
    expert: int | None = None
    paired: int = 0
    is_transposed: bool = False

    def ours(self, array: np.ndarray) -> np.ndarray:
        if self.is_transposed:
            return array.T
        if not self.paired:
            return array
        apart = array.reshape(self.paired, -1, 2, *array.shape[1:])  # (heads, half, 2, …)
        return apart.swapaxes(1, 2).reshape(array.shape)

    def theirs(self, array: np.ndarray) -> np.ndarray:
        if self.is_transposed:
            return array.T
        if not self.paired:
            return array
        halves = array.reshape(self.paired, 2, -1, *array.shape[1:])
        return halves.swapaxes(1, 2).reshape(array.shape)


def place_of(model: Model, name: str) -> Place:
    """Where llama.cpp has a parameter of ours."""
    owner, _, kind = name.rpartition(".")
    found = IN_LAYER.fullmatch(owner)
    part = found[2] if found else owner
    layer = f"blk.{found[1]}." if found else ""
    expert = IN_EXPERT.fullmatch(part)
    if expert:
        return Place(f"{layer}{EXPERT[expert[2]]}.{kind}", int(expert[1]))
    table = LAYER if found else TOP
    if part not in table:
        cause = f"{type(model).__name__}'s {name} has no name in GGUF files"
        raise ArgumentError("gguf", cause, "Save a folder, with models.save(model, folder).")
    return Place(
        f"{layer}{table[part]}.{kind}",
        paired=_paired(model, part),
        is_transposed=isinstance(model, GPT2) and bool(found) and _is_matrix(part, kind),
    )


def _is_matrix(part: str, kind: str) -> bool:
    return kind == "weight" and part.startswith(("attn.", "mlp."))


def _paired(model: Model, part: str) -> int:
    """Heads whose rows lie in pairs: those of Llama, not of Qwen."""
    if not isinstance(model, Llama) or model.config.model_type in ("qwen2", "qwen3"):
        return 0
    heads = {"self_attn.q_proj": model.config.num_attention_heads}
    return {**heads, "self_attn.k_proj": model.config.kv_heads}.get(part, 0)


def load_gguf(path: Path) -> tuple[Model, dict[str, np.ndarray]]:
    """The model of a GGUF file, with its tokenizer, and the values that it starts from."""
    file = gguf.load(path)
    given = config_of(file)
    try:
        model = ARCHITECTURES[given["architectures"][0]].build(given)
    except TreadleError as error:
        raise LoadError("load", f"{path}: {error.cause}", error.remedy) from error
    model.source = given
    if isinstance(model, CausalModel):
        model.tokenizer = tokenizer_of(file)
    return model, _values(file, model)


def _values(file: gguf.File, model: Model) -> dict[str, np.ndarray]:
    """The values of a model's declarations; whatever does not fit is refused before reading."""
    declared = model.declarations()
    places = {name: place_of(model, name) for name in declared}
    tensors = {p.tensor for p in places.values()}
    missing = [n for n in sorted(tensors) if n not in file.tensors]
    ignored = {ROTATIONS} | ({"output.weight"} if "lm_head.weight" not in declared else set())
    unknown = [n for n in file.tensors if n not in tensors | ignored]
    if missing or unknown:
        cause = f"{file.path}: missing: {listed(missing)}; unexpected: {listed(unknown)}"
        raise LoadError("load", cause, "Check that the metadata are those of the tensors.")
    for name, place in places.items():
        entry = file.tensors[place.tensor]
        shape = entry.shape[1:] if place.expert is not None else entry.shape
        wanted = declared[name].shape[::-1] if place.is_transposed else declared[name].shape
        experts = getattr(model.config, "num_local_experts", 0)
        fits = place.expert is None or entry.shape[0] == experts
        if shape != wanted or not fits or entry.format.startswith("i"):
            cause = f"{file.path}: {entry.name} is {entry.format} {entry.shape}, and by the "
            cause += f"metadata {name} is {declared[name].type}"
            raise LoadError("load", cause, "Check that the metadata are those of the tensors.")
    refuse_beyond("load", f"what is in {file.path}", sum(d.type.nbytes for d in declared.values()))
    return {n: place.ours(file.array(place.tensor, place.expert)) for n, place in places.items()}


def save_gguf(model: Model, path: Path, dtype: str) -> None:
    """Write a model as llama.cpp's converter does, in one format but for what is small."""
    metadata = metadata_of(model, dtype)
    tokenizer = getattr(model, "tokenizer", None)
    metadata |= tokenizer_metadata(tokenizer, _vocabulary(model))
    arrays: dict[str, Any] = {}
    experts: dict[str, list[np.ndarray]] = {}
    for name, array in model.values().items():
        place = place_of(model, name)
        if place.expert is None:
            arrays[place.tensor] = place.theirs(array)
        else:
            experts.setdefault(place.tensor, []).append(array)
    arrays |= {name: np.stack(parts) for name, parts in experts.items()}
    if isinstance(model, Llama) and (factors := llama3_factors(model.config)) is not None:
        arrays[ROTATIONS] = factors
    formats = {name: "f32" for name in arrays if name.endswith(ALWAYS_F32)}
    gguf.save(path, arrays, metadata, dtype=dtype, formats=formats)


def _vocabulary(model: Model) -> int:
    return int(getattr(model.config, "vocab_size", 0))
