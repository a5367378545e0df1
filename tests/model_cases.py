"""Small configurations of every architecture, as the reference libraries write them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import twins

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
DECODER = {**SIZES, "num_key_value_heads": 2, "vocab_size": 97, "max_position_embeddings": 256}
ENCODER = {**SIZES, "vocab_size": 97, "max_position_embeddings": 40}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 5e5,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}


@dataclass(frozen=True)
class Case:
    """An architecture, the arguments of its configuration, and which inputs it takes."""

    name: str
    architecture: str
    config: str
    arguments: dict[str, Any]
    inputs: str = "tokens"
    output: str = "logits"
    attributes: dict[str, Any] = field(default_factory=dict)

    def twin(self, seed: int = 0) -> torch.nn.Module:
        """The reference with random values, in evaluation."""
        library = twins.transformers()
        config = getattr(library, self.config)(**self.arguments)
        torch.manual_seed(seed)
        return scattered(getattr(library, self.architecture)(config), seed)

    def batch(self, seed: int = 0) -> tuple[tuple[np.ndarray, ...], dict[str, np.ndarray]]:
        return INPUTS[self.inputs](np.random.default_rng(seed))

    def wanted(self, twin: torch.nn.Module) -> np.ndarray:
        arguments, keywords = self.batch()
        with torch.no_grad():
            found = twin(
                *(torch.tensor(a) for a in arguments),
                **{k: torch.tensor(v) for k, v in keywords.items()},
            )
        return getattr(found, self.output).numpy()


def scattered(twin: torch.nn.Module, seed: int = 0, by: float = 0.1) -> torch.nn.Module:
    """Values that are all different: initial biases and scales are 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in twin.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * by)
        for name, b in twin.named_buffers():
            if name.endswith("running_mean"):
                b.add_(torch.randn(b.shape, generator=generator) * by)
            if name.endswith("running_var"):
                b.mul_(1.3)
    return twin.eval()


def saved(twin: Any, folder: Path) -> Path:
    twin.save_pretrained(folder)
    return folder


def _tokens(rng: np.random.Generator) -> Any:
    return (rng.integers(2, 97, (2, 13)),), {}


def _padded_tokens(rng: np.random.Generator) -> Any:
    tokens, mask = rng.integers(2, 97, (2, 13)), np.ones((2, 13), np.int64)
    tokens[0, 9:], mask[0, 9:] = 1, 0
    return (tokens,), {"attention_mask": mask}


def _two_parts(rng: np.random.Generator) -> Any:
    (tokens,), keywords = _padded_tokens(rng)
    return (tokens,), {**keywords, "token_type_ids": tokens % 2}


def _images(rng: np.random.Generator) -> Any:
    return (rng.normal(size=(2, 3, 16, 16)).astype(np.float32),), {}


def _texts_and_images(rng: np.random.Generator) -> Any:
    (tokens,), keywords = _padded_tokens(rng)
    tokens[0, 8], tokens[1, 12] = 96, 96  # the end
    images = rng.normal(size=(3, 3, 16, 16)).astype(np.float32)
    return (tokens, images), keywords


def _source_and_target(rng: np.random.Generator) -> Any:
    (tokens,), keywords = _padded_tokens(rng)
    return (tokens,), {**keywords, "decoder_input_ids": rng.integers(2, 97, (2, 5))}


def _features_and_tokens(rng: np.random.Generator) -> Any:
    features = rng.normal(size=(2, 6, 24)).astype(np.float32)
    return (features,), {"decoder_input_ids": rng.integers(2, 97, (2, 5))}


INPUTS = {
    "features": _features_and_tokens,
    "source": _source_and_target,
    "both": _texts_and_images,
    "tokens": _tokens,
    "padded": _padded_tokens,
    "parts": _two_parts,
    "images": _images,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 97, "n_positions": 128}

CASES = [
    Case("gpt2", "GPT2LMHeadModel", "GPT2Config", GPT2),
    Case(
        "gpt2-choices",
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            **GPT2,
            "n_inner": 40,
            "activation_function": "relu",
            "scale_attn_by_inverse_layer_idx": True,
            "tie_word_embeddings": False,
        },
    ),
    Case("llama", "LlamaForCausalLM", "LlamaConfig", {**DECODER, "rope_parameters": LLAMA3}),
    Case(
        "llama-yarn",
        "LlamaForCausalLM",
        "LlamaConfig",
        {
            **DECODER,
            "rope_parameters": {**YARN, "rope_theta": 1e4},
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    Case("llama-linear", "LlamaForCausalLM", "LlamaConfig", {**DECODER, "rope_parameters": LINEAR}),
    Case("mistral", "MistralForCausalLM", "MistralConfig", {**DECODER, "sliding_window": 5}),
    Case(
        "qwen2",
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {
            **DECODER,
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
    ),
    Case("qwen3", "Qwen3ForCausalLM", "Qwen3Config", {**DECODER, "head_dim": 16}),
    Case("mixtral", "MixtralForCausalLM", "MixtralConfig", {**DECODER, "num_local_experts": 4}),
    Case("bert", "BertModel", "BertConfig", ENCODER, inputs="padded", output="last_hidden_state"),
    Case("bert-masked", "BertForMaskedLM", "BertConfig", ENCODER, inputs="parts"),
    Case(
        "bert-classes",
        "BertForSequenceClassification",
        "BertConfig",
        {**ENCODER, "num_labels": 5},
        inputs="parts",
    ),
    Case(
        "bert-tags",
        "BertForTokenClassification",
        "BertConfig",
        {**ENCODER, "num_labels": 3},
        inputs="padded",
    ),
    Case("roberta-masked", "RobertaForMaskedLM", "RobertaConfig", ENCODER, inputs="padded"),
    Case(
        "roberta-classes",
        "RobertaForSequenceClassification",
        "RobertaConfig",
        {**ENCODER, "num_labels": 5},
        inputs="padded",
    ),
    Case(
        "roberta-tags",
        "RobertaForTokenClassification",
        "RobertaConfig",
        {**ENCODER, "num_labels": 3},
        inputs="padded",
    ),
    Case(
        "vit",
        "ViTForImageClassification",
        "ViTConfig",
        {**SIZES, "image_size": 16, "patch_size": 8, "num_labels": 7},
        inputs="images",
    ),
]
MAMBA = {
    "hidden_size": 16,
    "state_size": 5,
    "num_hidden_layers": 2,
    "vocab_size": 97,
    "conv_kernel": 3,
}
CASES += [
    Case("mamba", "MambaForCausalLM", "MambaConfig", MAMBA),
    Case(
        "mamba-choices",
        "MambaForCausalLM",
        "MambaConfig",
        {
            **MAMBA,
            "use_bias": True,
            "use_conv_bias": False,
            "time_step_rank": 3,
            "expand": 3,
            "tie_word_embeddings": False,
        },
        inputs="padded",
    ),
]
TOWER = {**SIZES, "hidden_act": "quick_gelu"}
CLIP_TEXT = {**TOWER, "vocab_size": 97, "max_position_embeddings": 20, "eos_token_id": 96}
CLIP_IMAGES = {**TOWER, "hidden_size": 40, "image_size": 16, "patch_size": 8}
CASES.append(
    Case(
        "clip",
        "CLIPModel",
        "CLIPConfig",
        {"text_config": CLIP_TEXT, "vision_config": CLIP_IMAGES, "projection_dim": 24},
        inputs="both",
        output="logits_per_image",
    )
)
T5 = {
    "d_model": 32,
    "d_kv": 6,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "vocab_size": 97,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "decoder_start_token_id": 0,
}
CASES += [
    Case("t5", "T5ForConditionalGeneration", "T5Config", T5, inputs="source"),
    Case(
        "t5-gated",
        "T5ForConditionalGeneration",
        "T5Config",
        {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        inputs="source",
    ),
]
WHISPER = {
    "d_model": 16,
    "num_mel_bins": 6,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 20,
    "decoder_ffn_dim": 24,
    "max_source_positions": 12,
    "max_target_positions": 96,
    "vocab_size": 97,
    "decoder_start_token_id": 5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "suppress_tokens": [7, 8],
    "begin_suppress_tokens": [9, 2],
}
CASES.append(
    Case(
        "whisper",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        WHISPER,
        inputs="features",
    )
)
BY_NAME = {case.name: case for case in CASES}
