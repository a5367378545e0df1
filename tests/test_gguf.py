"""GGUF files against the `gguf` package and `transformers`: containers, models, tokenizers."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import treadle as td
import twins
from test_gguf_blocks import random_blocks
from treadle import models
from treadle.interop import gguf as ours
from treadle.models.gguf_tokenizer import CUTS

gguf = pytest.importorskip("gguf")

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
CHANGES: dict[str, dict[str, Any]] = {
    "llama": {},
    "biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "llama3": {"rope_theta": 5e5, "rope_scaling": LLAMA3, "head_dim": 64, "rms_norm_eps": 1e-5},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.5}},
    "mistral": {"model_type": "mistral", "sliding_window": 4},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 3, "rope_theta": 1e6},
    "qwen2": {"model_type": "qwen2", "eos_token_id": 7},
    "qwen3": {"model_type": "qwen3", "head_dim": 128},
}
GPT2 = models.GPT2Config(
    vocab_size=96, n_positions=32, n_embd=64, n_layer=2, n_head=4, n_inner=256, eos_token_id=7
)


def made(name: str) -> models.Model:
    """A model with values that are not the first ones: biases and norms too."""
    config = GPT2 if name == "gpt2" else models.LlamaConfig(**{**SIZES, **CHANGES[name]})
    model = models.GPT2(config) if isinstance(config, models.GPT2Config) else models.Llama(config)
    rng = np.random.default_rng(len(name))
    drawn = {
        n: (rng.normal(size=a.shape) * 0.1 + (a.ndim == 1)).astype(np.float32)
        for n, a in model.values().items()
    }
    model.start_from(drawn)
    return model


def test_a_file_of_the_package_is_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    plain = {
        "f32": rng.normal(size=(3, 5)).astype(np.float32),
        "f16": rng.normal(size=(2, 3, 4)).astype(np.float16),
        "f64": rng.normal(size=7),
        "i8": rng.integers(-9, 9, (2, 2)).astype(np.int8),
        "i32": rng.integers(-9, 9, (1, 1, 1, 3)).astype(np.int32),
        "i64": np.array([2**40, -1]),
    }
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    for name, array in plain.items():
        writer.add_tensor(name, array)
    half = np.arange(6, dtype=np.float32).astype(ml_dtypes.bfloat16)
    writer.add_tensor("bf16", half.view(np.uint16), raw_dtype=gguf.GGMLQuantizationType.BF16)
    blocked = {n: random_blocks(n, 3, 2) for n in ("q8_0", "q4_0", "q4_k", "q6_k", "q5_0")}
    for name, array in blocked.items():
        kind = getattr(gguf.GGMLQuantizationType, name.upper())
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.add_uint8("u8", 255)
    writer.add_int64("i64", -(2**40))
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "Überall ▁")
    writer.add_array("strings", ["a", "", "ß"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("floats", [0.5, 2.0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    file = ours.load(tmp_path / "a.gguf")
    for name, array in plain.items():
        found = file.array(name)
        assert found.dtype == array.dtype
        assert np.array_equal(found, array), name
    assert np.array_equal(file.array("bf16").astype(np.float32), np.arange(6))
    for name, array in blocked.items():
        kind = getattr(gguf.GGMLQuantizationType, name.upper())
        wanted = gguf.quants.dequantize(array, kind)
        assert np.array_equal(file.array(name), wanted), name
        assert np.array_equal(file.array(name, 1), wanted[1])
        assert np.array_equal(file.raw(name), array)
    assert set(file.arrays()) == set(file.tensors)
    told = file.metadata
    assert (told["u8"], told["i64"], told["f64"], told["yes"]) == (255, -(2**40), 0.1, True)
    assert told["text"] == "Überall ▁"
    assert told["strings"] == ["a", "", "ß"]
    assert np.asarray(told["numbers"]).tolist() == [1, -2, 3]
    assert np.asarray(told["floats"]).tolist() == [0.5, 2.0]


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0", "q4_0"])
def test_what_is_written_is_read_by_the_package(tmp_path: Path, dtype: str) -> None:
    rng = np.random.default_rng(1)
    arrays = {
        "wide": rng.normal(size=(3, 4, 64)).astype(np.float32),
        "odd": rng.normal(size=(2, 33)).astype(np.float32),
        "one": rng.normal(size=5).astype(np.float32),
        "scalar": np.array(2.5, np.float32),
        "whole": np.arange(6, dtype=np.int32).reshape(2, 3),
    }
    told: dict[str, Any] = {"general.architecture": "x", "n": 3, "f": 0.5, "b": False}
    told |= {"s": "ß", "many": ["a", "b"], "ints": [1, -2], "big": 2**40, "below": -3}
    ours.save(tmp_path / "a.gguf", arrays, told, dtype=dtype)
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    fields = {n: f.contents() for n, f in reader.fields.items()}
    assert {n: fields[n] for n in told} == told
    file = ours.load(tmp_path / "a.gguf")
    formats = {t.name: t.tensor_type.name.lower() for t in reader.tensors}
    fallback = dtype if dtype in ("f32", "f16", "bf16") else "f16"
    assert formats == {
        "wide": dtype,
        "odd": fallback,
        "one": "f32",
        "scalar": "f32",
        "whole": "i32",
    }
    for tensor in reader.tensors:
        wanted = tensor.data
        if tensor.name != "whole":
            wanted = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        found = np.asarray(file.array(tensor.name), np.float32)
        assert np.array_equal(found.ravel(), np.asarray(wanted).ravel()), tensor.name
        assert np.allclose(found, arrays[tensor.name], atol=0.6 if dtype == "q4_0" else 0.03)


def theirs(path: Path, model: models.Model, name: str) -> None:
    """What llama.cpp's converter would write, with the package's names and its permutation."""
    config: Any = model.config
    is_gpt2 = name == "gpt2"
    kind = "gpt2" if is_gpt2 else name if name.startswith("qwen") else "llama"
    writer = gguf.GGUFWriter(path, kind)
    layers = config.n_layer if is_gpt2 else config.num_hidden_layers
    arch = {v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[kind]
    names = gguf.get_tensor_name_map(arch, layers)
    writer.add_block_count(layers)
    writer.add_vocab_size(config.vocab_size)
    if is_gpt2:
        writer.add_context_length(config.n_positions)
        writer.add_embedding_length(config.n_embd)
        writer.add_feed_forward_length(4 * config.n_embd)
        writer.add_head_count(config.n_head)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.kv_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_theta)
        writer.add_key_length(config.head_width)
    if config.bos_token_id is not None:
        writer.add_bos_token_id(config.bos_token_id)
    if config.eos_token_id is not None:
        writer.add_eos_token_id(config.eos_token_id)

    def permuted(array: np.ndarray, heads: int) -> np.ndarray:
        parts = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
        return parts.swapaxes(1, 2).reshape(array.shape)

    for own, array in model.values().items():
        if is_gpt2 and own.endswith(("attn.weight", "proj.weight", "fc.weight")):
            array = array.T
        if kind == "llama" and "q_proj" in own:
            array = permuted(array, config.num_attention_heads)
        if kind == "llama" and "k_proj" in own:
            array = permuted(array, config.kv_heads)
        new = names.get_name(own, try_suffixes=(".weight", ".bias"))
        assert new is not None, own
        writer.add_tensor(new, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", ["llama", "biases", "qwen2", "qwen3", "gpt2"])
def test_models_of_converted_files(tmp_path: Path, name: str) -> None:
    model = made(name)
    theirs(tmp_path / "a.gguf", model, name)
    found = models.load(tmp_path / "a.gguf", device="oracle")
    assert found.config == model.config
    assert found.device == "oracle"
    values = found.values()
    for own, array in model.values().items():
        assert np.array_equal(values[own], array), own


@pytest.mark.parametrize("name", [*CHANGES, "gpt2"])
def test_models_both_ways(tmp_path: Path, name: str) -> None:
    model = made(name)
    models.save(model, tmp_path / "a.gguf", dtype="f32")
    found = models.load(tmp_path / "a.gguf")
    assert found.config == model.config
    values = found.values()
    for own, array in model.values().items():
        assert np.array_equal(values[own], array), own


def test_logits_of_a_file_and_a_folder(tmp_path: Path) -> None:
    model = made("llama")
    models.save(model, tmp_path / "folder")
    tokens = np.arange(12).reshape(2, 6)
    wanted = models.load(tmp_path / "folder", device="oracle")(tokens)
    for dtype, error in (("f32", 0.0), ("f16", 2e-3), ("q8_0", 2e-2), ("q4_0", 0.4)):
        models.save(model, tmp_path / "a.gguf", dtype=dtype)
        found = models.load(tmp_path / "a.gguf", device="oracle")(tokens)
        assert np.abs(found - wanted).max() <= error * np.abs(wanted).max(), dtype


def test_an_equal_head_is_tied(tmp_path: Path) -> None:
    model = made("llama")
    tied = {**model.values(), "lm_head.weight": model.values()["model.embed_tokens.weight"]}
    model.start_from(tied)
    models.save(model, tmp_path / "a.gguf", dtype="q8_0")
    found = models.load(tmp_path / "a.gguf")
    assert found.config.tie_word_embeddings
    assert "lm_head.weight" not in found.values()


def test_formats_are_those_of_files(tmp_path: Path) -> None:
    model = made("llama")
    models.save(model, tmp_path / "a.gguf")
    assert ours.load(tmp_path / "a.gguf").tensors["output.weight"].format == "f16"
    models.save(model, tmp_path / "a", dtype="f32")
    with pytest.raises(td.ArgumentError, match="'q8_0' for the folder"):
        models.save(model, tmp_path / "a", dtype="q8_0")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gpt2"])
@pytest.mark.parametrize("dtype", ["f32", "q8_0"])
def test_transformers_opens_what_is_saved(tmp_path: Path, name: str, dtype: str) -> None:
    torch, transformers = pytest.importorskip("torch"), twins.transformers()
    model = made(name)
    models.save(model, tmp_path / "a.gguf", dtype=dtype)
    twin = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="a.gguf")
    tokens = np.arange(12).reshape(2, 6)
    with torch.no_grad():
        wanted = twin(torch.tensor(tokens)).logits.numpy()
    found = models.load(tmp_path / "a.gguf")(tokens)
    assert np.abs(found - wanted).max() <= 1e-4 * np.abs(wanted).max()


CORPUS = ["Hello, world! It's 12345 o'clock.\n\n  Grüße aus Köln", "don't WE'LL x = y + 42;"]


def trained(cut: str) -> Any:
    """A byte-level BPE of few merges, with special tokens, which cuts text in some way."""
    tokenizers = pytest.importorskip("tokenizers")
    found = tokenizers.Tokenizer(tokenizers.models.BPE())
    spec = json.loads(found.to_str())
    spec |= {"pre_tokenizer": CUTS[cut], "decoder": {**CUTS["gpt-2"], "type": "ByteLevel"}}
    spec["normalizer"] = {"type": "NFC"} if cut == "qwen2" else None
    found = tokenizers.Tokenizer.from_str(json.dumps(spec))
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    found.train_from_iterator(CORPUS * 3, trainer)
    if cut == "llama-bpe":
        found.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    return found


@pytest.mark.parametrize("cut", CUTS)
def test_tokenizers(tmp_path: Path, cut: str) -> None:
    found = trained(cut)
    (tmp_path / "tokenizer.json").write_text(found.to_str())
    config = {**SIZES, "vocab_size": 310, "num_hidden_layers": 1}
    model = models.Llama(models.LlamaConfig(**config))
    model.tokenizer = models.Tokenizer(tmp_path / "tokenizer.json")
    models.save(model, tmp_path / "a.gguf")
    back = models.load(tmp_path / "a.gguf").tokenizer
    for text in (*CORPUS, "3.14159 and ▁ more</s>", "", "  \n\t x"):
        tokens = found.encode(text).ids
        assert back.encode(text) == tokens, text
        assert back.decode(tokens) == found.decode(tokens)
    assert (back.encode("x")[0] == 0) == (cut == "llama-bpe")


WORDS = ["▁", "▁t", "he", "▁the", "in", "er", "▁a", "▁the▁", "an", "▁an", "the", "▁▁", "ing", "th"]


def pieces() -> dict[str, Any]:
    """A vocabulary as SentencePiece's: specials, bytes, letters, and words by their scores."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    types = [2, 3, 3, *[6] * 256]
    letters = sorted(set("".join(WORDS)) - {"▁"}) + list(".,HÜ")
    tokens += WORDS + letters
    types += [1] * (len(tokens) - len(types))
    scores = [0.0] * 259 + [-float(i) for i in range(len(tokens) - 259)]
    found = {"model": "llama", "tokens": tokens, "scores": np.array(scores, np.float32)}
    return {**found, "token_type": np.array(types, np.int32), "bos_token_id": 1}


def merged(text: str, told: dict[str, Any]) -> list[int]:
    """By llama.cpp's rule: the neighbours that make the token with the highest score, again."""
    ids = {t: i for i, t in enumerate(told["tokens"]) if told["token_type"][i] == 1}
    parts = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        pairs = [(a + b, i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ids]
        if not pairs:
            break
        _, at = max(pairs, key=lambda p: (told["scores"][ids[p[0]]], -p[1]))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    known = [[ids[p]] if p in ids else [3 + b for b in p.encode()] for p in parts]
    return [1, *(i for part in known for i in part)]


def test_tokenizers_of_sentencepiece(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    told = pieces()
    size = {**SIZES, "vocab_size": len(told["tokens"]), "num_hidden_layers": 1}
    models.save(models.Llama(models.LlamaConfig(**size)), tmp_path / "a.gguf")
    file = ours.load(tmp_path / "a.gguf")
    metadata = {**file.metadata, **{f"tokenizer.ggml.{k}": v for k, v in told.items()}}
    ours.save(tmp_path / "b.gguf", file.arrays(), metadata)
    model = models.load(tmp_path / "b.gguf")
    models.save(model, tmp_path / "c.gguf")
    for found in (model.tokenizer, models.load(tmp_path / "c.gguf").tokenizer):
        for text in ("the thing in an  area.", "Hü, Ü the ß\n", " an", "", "ing ing  the "):
            tokens = found.encode(text)
            assert tokens == merged(text, told), text
            assert found.decode(tokens) == text
        assert found.encode("an</s>")[-1] == 2


def test_tokenizers_that_are_not_read(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    model = made("qwen2")
    models.save(model, tmp_path / "a.gguf")
    assert models.load(tmp_path / "a.gguf").tokenizer is None
    file = ours.load(tmp_path / "a.gguf")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"model": "t5"}, "of the kind 't5'"),
        ({"model": "llama", "tokens": ["a"], "scores": [0.0, 1.0]}, "other scores"),
        ({"model": "gpt2", "pre": "elsewhere", "tokens": ["a"]}, "Known are: gpt-2"),
        ({"model": "gpt2"}, "has no tokenizer.ggml.tokens"),
        ({"model": "gpt2", "tokens": ["a", "b", "a"], "merges": ["a b"]}, "a token twice"),
        ({"model": "gpt2", "tokens": ["a", "b"], "merges": [1]}, "no tokenizer.ggml.merges"),
        ({"model": "gpt2", "tokens": ["a"], "merges": ["x"]}, "has no tokenizer"),
        ({"model": "gpt2", "tokens": ["a"], "merges": ["x y"]}, "has no tokenizer"),
        ({"model": "gpt2", "tokens": ["a"], "merges": ["a a"], "token_type": [1, 1]}, "other"),
    ]
    for changes, message in cases:
        told = {**file.metadata, **{f"tokenizer.ggml.{k}": v for k, v in changes.items()}}
        ours.save(tmp_path / "b.gguf", file.arrays(), told)
        found = models.load(tmp_path / "b.gguf", device="oracle")
        assert len(found.generate([1], 1, eos_token_id=())) == 2  # tokens can be used without
        with pytest.raises(td.LoadError, match=message):
            found.generate("text", 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in (*CHANGES, "gpt2") if n not in ("mistral", "biases")])
def test_llama_cpp_computes_the_same(tmp_path: Path, name: str) -> None:
    """Where bindings of llama.cpp are installed: `pip install xllamacpp`."""
    library = pytest.importorskip("xllamacpp")
    cut = {"llama3": "llama-bpe", "linear": "smollm"}.get(name, "qwen2" if "q" in name else "gpt-2")
    (tmp_path / "tokenizer.json").write_text(trained(cut).to_str())
    sized: models.CausalModel = (
        models.GPT2(models.GPT2Config(**{**vars(GPT2), "vocab_size": 310}))
        if name == "gpt2"
        else models.Llama(models.LlamaConfig(**{**SIZES, **CHANGES[name], "vocab_size": 310}))
    )
    sized.tokenizer = models.Tokenizer(tmp_path / "tokenizer.json")
    models.save(sized, tmp_path / "a.gguf", dtype="f32")
    found = models.load(tmp_path / "a.gguf")
    tokens = found.tokenizer.encode(CORPUS[0])
    logits = found(np.array([tokens]))[0, -1].astype(np.float64)
    wanted = logits - np.log(np.exp(logits).sum())
    settings = library.CommonParams()
    settings.model.path, settings.n_ctx, settings.n_parallel = str(tmp_path / "a.gguf"), 128, 1
    server = library.Server(settings)
    asked = {"prompt": CORPUS[0], "max_tokens": 1, "temperature": 0, "logprobs": 8, "n_probs": 8}
    answer = server.handle_completions(asked)
    assert answer["usage"]["prompt_tokens"] == len(tokens)
    for token in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
        assert abs(token["logprob"] - wanted[token["id"]]) < 5e-3  # its attention is in float16
