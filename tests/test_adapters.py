"""Adapters: PEFT's files both ways, frozen weights, merging; and weights in blocks of few bits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import treadle as td
import twins
from test_kernels import run
from test_recompute import EAGER, arrays_of, live_bytes, step_of
from treadle import losses, models, nn, optim
from treadle.domains.float64 import evaluate_float64
from treadle.kernel.text import to_text
from treadle.nn.quantization import FORMATS, Quantized
from treadle.nn.tracing import Inputs, trace_model
from treadle.schedule.schedule import schedule

TOKENS = np.arange(10).reshape(2, 5)
GPT2 = models.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4)
LLAMA = models.LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
MAKERS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: models.GPT2(GPT2),
    "llama": lambda: models.Llama(LLAMA),
}
TARGETS = {"gpt2": ["c_attn", "c_proj"], "llama": ["q_proj", "v_proj", "down_proj"]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {name: tmp_path_factory.mktemp(name) for name in MAKERS}
    for name, folder in found.items():
        models.save(MAKERS[name](), folder)
    return found


def loaded(folder: Path) -> Any:
    return models.load(folder, device="oracle")


def loss(model: Any, batch: Any) -> Any:
    logits = model(batch["tokens"][:, :-1])
    return losses.cross_entropy(logits, batch["tokens"][:, 1:], axis=-1)


SPEC = {"tokens": td.Spec((2, 9), td.int32)}
BATCH = {"tokens": np.random.default_rng(0).integers(0, 64, (2, 9)).astype(np.int32)}


def step_for(model: Any, device: str = "oracle") -> Any:
    return td.compile_step(model, loss, optim.adamw(1e-2), SPEC, device=device)


def noisy(model: Any, seed: int = 0) -> dict[str, np.ndarray]:
    """Values of a model's adapters that change something."""
    rng = np.random.default_rng(seed)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    return {n: rng.normal(0, 0.3, p.shape).astype(np.float32) for n, p in trained.items()}


def with_noise(model: Any) -> Any:
    model.start_from({**model.values(), **noisy(model)})
    return model


# PEFT


def peft_config(kind: str, name: str) -> Any:
    peft = pytest.importorskip("peft")
    if kind == "prefix":
        return peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    first = TARGETS[name][0]
    return peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=TARGETS[name],
        rank_pattern={first: 2},
        alpha_pattern={first: 3},
        init_lora_weights=False,
        fan_in_fan_out=name == "gpt2",
        task_type="CAUSAL_LM",
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gpt2", "lora"),
        ("llama", "prefix"),
        pytest.param("llama", "lora", marks=pytest.mark.slow),
        pytest.param("gpt2", "prefix", marks=pytest.mark.slow),
    ],
)
def test_folders_of_peft_both_ways(
    folders: dict[str, Path], tmp_path: Path, name: str, kind: str
) -> None:
    transformers = twins.transformers()
    config = peft_config(kind, name)
    import peft

    def base() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(folders[name]).eval()

    def logits(model: Any) -> np.ndarray:
        with torch.no_grad():
            return model(torch.tensor(TOKENS)).logits.numpy()

    torch.manual_seed(0)
    twin = peft.get_peft_model(base(), config).eval()
    twin.save_pretrained(tmp_path / "theirs")
    model = models.load_adapter(loaded(folders[name]), tmp_path / "theirs")
    np.testing.assert_allclose(model(TOKENS), logits(twin), atol=1e-5)
    assert np.abs(loaded(folders[name])(TOKENS) - logits(twin)).max() > 0.1, "it changes something"

    models.save_adapter(model, tmp_path / "ours")
    again = peft.PeftModel.from_pretrained(base(), tmp_path / "ours").eval()
    np.testing.assert_allclose(logits(again), logits(twin), atol=1e-6)
    mine, theirs = (
        load_file(tmp_path / n / "adapter_model.safetensors") for n in ("ours", "theirs")
    )
    assert {n: a.shape for n, a in mine.items()} == {n: a.shape for n, a in theirs.items()}


def test_a_prefix_is_seen_by_every_token_of_a_generation(folders: dict[str, Path]) -> None:
    model = with_noise(models.prefix_tuning(loaded(folders["llama"]), 3))
    rows = [[3, 4, 5], [9]]
    cached, whole = (model.generate(rows, 4, use_cache=cache) for cache in (True, False))
    for a, b in zip(cached, whole, strict=True):
        assert a.tolist() == b.tolist()
    plain = loaded(folders["llama"])(TOKENS)
    assert np.abs(model(TOKENS) - plain).max() > 0.01


def test_a_prefix_takes_positions() -> None:
    with pytest.raises(td.ArgumentError, match="32 keys before 32 positions"):
        models.prefix_tuning(models.GPT2(GPT2), 32)
    model = models.prefix_tuning(models.GPT2(GPT2), 30)
    with pytest.raises(td.ShapeError, match="5 tokens, and 2 positions"):
        model(TOKENS)
    with pytest.raises(td.ArgumentError, match="a prefix already"):
        models.prefix_tuning(model, 1)
    with pytest.raises(td.ArgumentError, match="MLP takes no prefix"):
        models.prefix_tuning(models.MLP([2, 2]), 1)
    windows = replace(LLAMA, model_type="mistral", sliding_window=4)
    with pytest.raises(td.ArgumentError, match="a window of 4 positions"):
        models.prefix_tuning(models.Llama(windows), 2)(TOKENS)


# Low-rank adapters


@pytest.mark.parametrize("name", MAKERS)
def test_only_adapters_are_trained(folders: dict[str, Path], name: str) -> None:
    model = nn.lora(loaded(folders[name]), r=2, alpha=4, targets=TARGETS[name])
    np.testing.assert_array_equal(model(TOKENS), loaded(folders[name])(TOKENS))
    step = step_for(model)
    before = step.params
    kept = [n.partition("optimizer:m.")[2] for n in step.session.types if "optimizer:m." in n]
    added = [n for n in before if "lora_" in n]
    assert sorted(kept) == sorted(added) == sorted(step.gradients(BATCH))
    for _ in range(2):
        step(BATCH)
    changed = [n for n in before if not np.array_equal(before[n], step.params[n])]
    assert sorted(changed) == sorted(added)


def mean_square(model: Any, batch: Any) -> Any:
    return model(batch).square().mean()


def test_a_step_holds_nothing_for_frozen_weights() -> None:
    plain = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 48))
    base = sum(p.type.nbytes for p in plain.parameters())
    model = nn.lora(plain, r=2)
    step = td.compile_step(model, mean_square, optim.adamw(0.1), td.Spec((5, 64)), device="cpu")
    added = sum(p.type.nbytes for n, p in model.named_parameters() if "lora_" in n)
    given = 5 * 64 * 4
    numbers = 64  # bytes of hyperparameters and counts
    assert 0 <= step.memory.held - (base + 3 * added + given) <= numbers
    gradients = [b for b in step.memory.buffers if b.elements in (64 * 96, 96 * 48)]
    assert all(b.kernel.endswith("_pack") for b in gradients), "weights for matmuls alone"
    assert "MB of parameters, states and inputs" in str(step.memory)


@pytest.mark.parametrize("name", MAKERS)
def test_merged_weights_give_what_adapters_gave(
    folders: dict[str, Path], tmp_path: Path, name: str
) -> None:
    model = with_noise(nn.lora(loaded(folders[name]), r=2, alpha=4, targets=TARGETS[name]))
    apart = model(TOKENS)
    names = list(model.declarations())
    merged = nn.merge(model)
    np.testing.assert_allclose(merged(TOKENS), apart, atol=1e-5)
    assert list(model.declarations()) == list(loaded(folders[name]).declarations())
    models.save(model, tmp_path)
    np.testing.assert_allclose(loaded(tmp_path)(TOKENS), apart, atol=1e-5)
    with pytest.raises(td.ArgumentError, match="are merged"):
        models.save_adapter(model, tmp_path / "adapter")
    with pytest.raises(td.ArgumentError, match="no adapters, or all are merged"):
        nn.merge(model)
    nn.unmerge(model)
    assert list(model.declarations()) == names
    np.testing.assert_allclose(model(TOKENS), apart, atol=1e-5)


def test_values_of_a_step_are_merged_and_saved(folders: dict[str, Path], tmp_path: Path) -> None:
    model = nn.lora(loaded(folders["gpt2"]), r=2, targets="attn.*")
    step = step_for(model)
    for _ in range(3):
        step(BATCH)
    trained = step.evaluate(BATCH).loss
    models.save_adapter(model, tmp_path, step.params)
    again = models.load_adapter(loaded(folders["gpt2"]), tmp_path)
    assert step_for(again).evaluate(BATCH).loss == pytest.approx(trained, rel=1e-6)
    nn.merge(model, step.params)
    assert step_for_full(model).evaluate(BATCH).loss == pytest.approx(trained, rel=1e-6)


def step_for_full(model: Any) -> Any:
    return step_for(model.requires_grad_(True))


def adapted(model: nn.Module) -> list[str]:
    return sorted(n.removesuffix(".lora_A") for n, _ in model.named_modules() if "lora_A" in n)


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ("q_proj", ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"]),
        ("layers.0.mlp.*", [f"model.layers.0.mlp.{n}_proj" for n in ("down", "gate", "up")]),
        ("*.1.*.[kv]_proj", [f"model.layers.1.self_attn.{n}_proj" for n in "kv"]),
        (
            re.compile(r".*\.0\..*\.(q|o)_proj"),
            [f"model.layers.0.self_attn.{n}_proj" for n in "oq"],
        ),
        (["lm_head", "1.self_attn.q_proj"], ["lm_head", "model.layers.1.self_attn.q_proj"]),
        (lambda path: path.endswith("0.mlp.up_proj"), ["model.layers.0.mlp.up_proj"]),
    ],
)
def test_targets(targets: Any, expected: list[str]) -> None:
    assert adapted(nn.lora(models.Llama(LLAMA), targets=targets)) == expected


def test_a_tied_head_is_left_out_unless_it_is_named() -> None:
    every = adapted(nn.lora(models.Llama(LLAMA)))
    assert len(every) == 14
    assert "lm_head" not in every
    own = adapted(nn.lora(models.Llama(replace(LLAMA, tie_word_embeddings=False))))
    assert len(own) == 15


def test_modules_in_lists_tuples_and_dicts_and_shared_ones() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            shared = nn.Linear(4, 4)
            self.layers, self.pair = [shared, nn.Linear(4, 4)], (shared, nn.Linear(4, 4))
            self.named = {"a": nn.Linear(4, 4)}

        def forward(self, x: Any) -> Any:
            for layer in (*self.layers, *self.pair, self.named["a"]):
                x = layer(x)
            return x

    model = nn.lora(Net(), r=2)
    assert adapted(model) == ["layers.0", "layers.1", "named.a", "pair.1"]
    assert model.layers[0] is model.pair[0]
    x = np.ones((1, 4), np.float32)
    values = {**model.init(0), **noisy(model)}
    apart = model.apply(values, x).numpy()
    nn.merge(model, values)
    np.testing.assert_allclose(model.apply(model.init(0), x).numpy(), apart, atol=1e-5)


def test_dropout_is_before_the_adapter_only() -> None:
    model = nn.lora(nn.Sequential(nn.Linear(4, 4)), r=2, dropout=0.5)
    values, x = {**model.init(0), **noisy(model)}, np.ones((3, 4), np.float32)
    quiet = float((model.apply(values, x).numpy() ** 2).mean())
    step = td.compile_step(model, mean_square, optim.sgd(1e-9), td.Spec((3, 4)), device="oracle")
    step.load_params(values)
    assert np.ptp([float(step(x).loss) for _ in range(4)]) > 0
    assert float(step.evaluate(x).loss) == pytest.approx(quiet, rel=1e-5)
    values["0.lora_B.weight"][:] = 0
    step.load_params(values)
    assert float(step(x).loss) == pytest.approx(float(step.evaluate(x).loss), rel=1e-5)


def test_a_second_call_adds_to_other_layers() -> None:
    model = nn.lora(nn.lora(models.Llama(LLAMA), r=2, targets="q_proj"), r=4, targets="v_proj")
    trained = {n: p.shape for n, p in model.named_parameters() if p.requires_grad}
    assert {s[0] for n, s in trained.items() if "q_proj.lora_A" in n} == {2}
    assert {s[0] for n, s in trained.items() if "v_proj.lora_A" in n} == {4}


def test_rank_stabilised_adapters_are_scaled_otherwise(tmp_path: Path) -> None:
    model = with_noise(nn.lora(models.Llama(LLAMA), r=4, alpha=4, targets="q_proj", rslora=True))
    model.device = "oracle"
    models.save_adapter(model, tmp_path)
    again = models.Llama(LLAMA)
    again.device = "oracle"
    np.testing.assert_allclose(
        models.load_adapter(again, tmp_path)(TOKENS), model(TOKENS), atol=1e-6
    )
    assert model.get_submodule("model.layers.0.self_attn.q_proj").scale == 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: nn.lora(m, targets="nothing"), "'nothing' matches none.*q_proj"),
        (lambda m: nn.lora(m, targets=["q_proj", "no"]), "'no' matches none.*q_proj"),
        (lambda m: nn.lora(nn.Linear(4, 4)), "the model itself is one of the linear layers"),
        (lambda m: nn.lora(nn.lora(m)), "self_attn.q_proj of Llama have an adapter already"),
        (
            lambda m: nn.lora(nn.lora(m, targets="q_proj"), targets="q_proj"),
            "q_proj of Llama have an adapter already.*Without one are: .*k_proj",
        ),
        (lambda m: nn.bottleneck(nn.Linear(4, 4)), "the model itself is one of"),
        (lambda m: nn.quantize(nn.Linear(32, 32)), "the model itself is one of"),
        (lambda m: nn.lora(m, targets=[]), "targets = "),
        (lambda m: nn.lora(m, targets=3), "targets = 3"),
        (lambda m: nn.lora(m, r=0), "r = 0"),
        (lambda m: nn.lora(m, alpha=-1), "alpha = -1"),
        (lambda m: nn.lora(m, dropout=2), "p = 2"),
        (lambda m: nn.lora(3), "3 is no module"),
        (lambda m: nn.merge(m), "no adapters"),
        (lambda m: nn.unmerge(m), "no adapters"),
        (lambda m: nn.merge(nn.lora(m), {"a": np.zeros(3)}), "has no 'a'"),
        (lambda m: nn.merge(nn.lora(m)), r"lora_B .* is zero.*nn.merge\(model, step.params\)"),
        (lambda m: nn.bottleneck(m, activation="x"), "activation = 'x'"),
        (lambda m: nn.quantize(m, "q3_k"), "form = 'q3_k'"),
        (lambda m: nn.quantize(m, targets="norm"), "'norm' matches none"),
        (lambda m: nn.merge(nn.lora(nn.quantize(m))), "is quantized"),
        (
            lambda m: nn.merge(nn.lora(m, targets="lm_head")),
            "another module has the weight of lm_h",
        ),
        (lambda m: nn.dequantize(3), "3 is no module"),
        (lambda m: models.save(nn.lora(m), "x"), "lora_A is an adapter's"),
        (lambda m: models.save(models.prefix_tuning(m, 2), "x"), "prefix_keys is an adapter's"),
        (lambda m: models.save(nn.quantize(m), "x"), "in blocks of q8_0"),
        (lambda m: models.save_adapter(m, "x"), "Llama has no adapters"),
        (lambda m: models.save_adapter(3, "x"), "3 is no module"),
        (lambda m: models.load_adapter(3, "x"), "3 is no module"),
    ],
)
def test_wrong_arguments(call: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(td.TreadleError, match=message):
        call(models.Llama(LLAMA))


# Bottlenecks


def test_bottlenecks_begin_as_nothing_train_and_load(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    targets = ["mlp.c_proj", "attn.c_proj"]
    model = nn.bottleneck(loaded(folders["gpt2"]), 4, targets, activation="gelu")
    np.testing.assert_array_equal(model(TOKENS), loaded(folders["gpt2"])(TOKENS))
    trained = {n.rpartition(".c_proj.")[2] for n, p in model.named_parameters() if p.requires_grad}
    assert trained == {f"adapter_{d}.{n}" for d in ("down", "up") for n in ("weight", "bias")}
    step = step_for(model)
    first = float(step(BATCH).loss)
    assert min(float(step(BATCH).loss) for _ in range(4)) < first
    models.save_adapter(model, tmp_path, step.params)
    model.start_from(step.params)
    again = models.load_adapter(loaded(folders["gpt2"]), tmp_path)
    np.testing.assert_allclose(again(TOKENS), model(TOKENS), atol=1e-6)


# Files that lie


def _config(**changes: Any) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return spoil


def _arrays(change: Callable[[dict[str, np.ndarray]], Any]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        arrays = load_file(folder / "adapter_model.safetensors")
        change(arrays)
        save_file(arrays, folder / "adapter_model.safetensors")

    return spoil


A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
SPOILED: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (lambda f: (f / "adapter_config.json").unlink(), "adapter_config"),
    "no values": (lambda f: (f / "adapter_model.safetensors").unlink(), "no file"),
    "cut": (lambda f: _cut(f / "adapter_model.safetensors"), "damaged"),
    "a kind": (_config(peft_type="ADALORA"), "ADALORA.*Known"),
    "no kind": (_config(peft_type=["LORA"]), "Known"),
    "dora": (_config(use_dora=True), "use_dora = True"),
    "biases": (_config(bias="all"), "bias = 'all'"),
    "heads": (_config(modules_to_save=["lm_head"]), "modules_to_save"),
    "pissa": (_config(init_lora_weights="pissa"), "init_lora_weights"),
    "no alpha": (_config(lora_alpha=None), "lora_alpha = None"),
    "huge alpha": (_config(lora_alpha=10**400), "lora_alpha"),
    "nan": (_config(lora_alpha=float("nan")), "damaged"),
    "a bool": (_config(r=True), "r = True"),
    "dropout": (_config(lora_dropout="x"), "p = 'x'"),
    "an expression": (_config(alpha_pattern={"(a+)+$": 2}), "alpha_pattern"),
    "alphas": (_config(alpha_pattern={"q_proj": "2"}), "alpha_pattern"),
    "a list of alphas": (_config(alpha_pattern=[3]), "alpha_pattern"),
    "a half": (_arrays(lambda a: a.pop(A)), "no pairs"),
    "empty": (_arrays(lambda a: a.clear()), "no adapters"),
    "integers": (_arrays(lambda a: a.update({A: a[A].astype(np.int32)})), "not floats"),
    "a name": (_arrays(lambda a: a.update({"x": a[A]})), "no pairs"),
    "a layer": (_arrays(lambda a: a.update(_elsewhere(a))), "no linear layer.*layers.7"),
    "a shape": (_arrays(lambda a: a.update({A: a[A][:, 1:].copy()})), "for a layer of 32 to 32"),
    "a rank": (_arrays(lambda a: a.update({A: a[A][:1].copy()})), "for a layer of 32 to 32"),
    "a vector": (_arrays(lambda a: a.update({A: np.ones(3, np.float32)})), "for a layer"),
}


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5])


def _elsewhere(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    pair = {n: a for n, a in arrays.items() if "layers.0" in n}
    return {n.replace("layers.0", "layers.7"): a for n, a in pair.items()}


@pytest.mark.parametrize("name", SPOILED)
def test_files_that_lie(tmp_path: Path, name: str) -> None:
    spoil, message = SPOILED[name]
    models.save_adapter(nn.lora(models.Llama(LLAMA), r=2, targets="q_proj"), tmp_path)
    spoil(tmp_path)
    model = models.Llama(LLAMA)
    names = list(model.declarations())
    with pytest.raises(td.TreadleError, match=message) as caught:
        models.load_adapter(model, tmp_path)
    assert len(str(caught.value)) < 2000
    assert list(model.declarations()) == names, "nothing has changed"


# Blocks of few bits


@pytest.mark.parametrize("form", FORMATS)
def test_blocks_are_those_of_gguf(form: str) -> None:
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType[form.upper()]
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(6, 96)).astype(np.float32)
    weight[0, :32] = 0
    weight[1, :32] = np.float32(0.3)  # all of a block are its largest
    blocks = gguf.quants.quantize(weight, kind)
    packed = Quantized(FORMATS[form], weight.shape, False)
    packed.encode(weight)
    np.testing.assert_array_equal(packed.decoded("w"), gguf.quants.dequantize(blocks, kind))
    codes = packed.codes.first_value(0, "w.codes").reshape(6, 3, -1)
    raw = blocks.reshape(6, 3, -1)[..., 2:]  # behind the scale
    np.testing.assert_array_equal(codes.view(np.uint8), raw)
    again = Quantized(FORMATS[form], weight.shape, False)
    again.encode(packed.decoded("w"))  # as of a file's decoded blocks: the same once more
    np.testing.assert_array_equal(again.codes.first_value(0, "c").reshape(6, 3, -1), codes)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", MAKERS)
def test_a_quantized_model_computes_with_the_rounded_weights(
    folders: dict[str, Path], name: str, form: str
) -> None:
    model = nn.quantize(loaded(folders[name]), form)
    rounded = nn.dequantize(nn.quantize(loaded(folders[name]), form))
    assert not any("codes" in n for n in rounded.declarations())
    tied = [n for n in model.declarations() if "wte" in n or "embed" in n or "lm_head" in n]
    assert len(tied) == 2, "codes and scales of the one table"
    np.testing.assert_allclose(model(TOKENS), rounded(TOKENS), atol=1e-6)
    plain = loaded(folders[name])(TOKENS)
    assert 1e-6 < np.abs(model(TOKENS) - plain).max() < 0.3


def test_adapters_train_on_quantized_weights() -> None:
    def made() -> Any:
        model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 48))
        return nn.lora(nn.quantize(nn.quantize(model, "q8_0", "0"), "q4_0", "2"), r=2)

    x = np.random.default_rng(0).normal(size=(20, 64)).astype(np.float32)
    native, oracle = (
        td.compile_step(made(), mean_square, optim.adamw(0.1), td.Spec((20, 64)), device=device)
        for device in ("cpu", "oracle")
    )
    for _ in range(3):
        ours, right = native(x), oracle(x)
        assert float(ours.loss) == pytest.approx(float(right.loss), rel=1e-5)
        assert float(ours.grad_norm) == pytest.approx(float(right.grad_norm), rel=1e-4)
    assert all("lora_" in n for n in oracle.gradients(x))


def test_quantizing_behind_adapters_leaves_those_as_they_are(folders: dict[str, Path]) -> None:
    model = nn.quantize(nn.lora(loaded(folders["llama"]), r=2, targets="q_proj"), "q8_0", "*_proj")
    assert "model.layers.0.self_attn.q_proj.weight.codes" in model.declarations()
    assert "model.layers.0.self_attn.q_proj.lora_A.weight" in model.declarations()
    assert np.isfinite(model(TOKENS)).all()


def test_rows_that_are_no_whole_blocks_are_refused() -> None:
    with pytest.raises(td.ShapeError, match=r"1.weight is .*rows of 33 are no whole blocks"):
        nn.quantize(nn.Sequential(nn.Linear(32, 33), nn.Linear(33, 4)))


def decoding(form: str, rows: int) -> Any:
    weight = Quantized(FORMATS[form], (48, 64), False)
    batch = Inputs.of((td.Spec((rows, 64)), td.Spec((rows, 48))))

    def both_ways(w: Any, given: Any) -> Any:
        return given[0] @ w.tensor().T, given[1] @ w.tensor()

    return trace_model(weight, both_ways, batch, False).graph


@pytest.mark.parametrize("form", FORMATS)
def test_a_matmul_decodes_weights_while_it_copies_them(form: str) -> None:
    program = schedule(decoding(form, 64))
    kernels = {c.kernel.name: to_text(c.kernel) for c in program.calls()}
    assert sorted(name.rpartition("_")[2] == "pack" for name in kernels) == [
        False,
        False,
        True,
        True,
    ]
    assert all("float16" in text for name, text in kernels.items() if name.endswith("pack"))
    few = [to_text(c.kernel) for c in schedule(decoding(form, 1)).calls()]
    assert all("float16" in text for text in few), "a token's is not copied at all"
    lanes = re.search(r"for .* vector:\n +for .* sequential:", few[0])
    assert lanes, "lanes go over all blocks of a row, and are added once"


def test_decoded_weights_do_not_wait_for_the_backward_pass() -> None:
    frozen = nn.quantize(nn.Sequential(*(nn.Linear(32, 32) for _ in range(5))), "q4_0")
    model = nn.Sequential(nn.Linear(32, 32), frozen.requires_grad_(False))
    graph = step_of(model, {"x": td.Spec((2, 32))}, td.float32)
    kept = replace(EAGER, materialization=replace(EAGER.materialization, decoded_part=0.0))
    programs = {target: schedule(graph, target=target) for target in (EAGER, kept)}
    once, again = (live_bytes(programs[t], t) for t in (kept, EAGER))
    weight = 32 * 32 * 4
    assert once >= 5 * weight
    assert again <= 3 * weight, "that of a layer or two, and a gradient"
    arrays = arrays_of(graph)
    for ours, right in zip(run(programs[EAGER], arrays), evaluate_float64(graph, arrays)):
        assert np.abs(ours - right).max() <= 1e-5 * np.abs(right).max()


def test_scales_stay_as_they_are_in_a_model_of_another_float() -> None:
    model = nn.quantize(models.Llama(LLAMA), targets="q_proj")
    for dtype in ("bfloat16", "float32"):
        model.hold(dtype)
        types = {n: str(p.dtype) for n, p in model.named_parameters()}
        scales = {n for n in types if n.endswith(".scales")}
        assert len(scales) == 2
        assert {types[n] for n in scales} == {"float16"}
        assert {t for n, t in types.items() if "q_proj" not in n} == {dtype}
