"""Models against those of `transformers` and torchvision, whose files they read and write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import treadle as td
import twins
from model_cases import BY_NAME, CASES, Case, saved, scattered
from treadle import losses, models, optim

CLOSE = 1e-4  # of float32, issue's bound


def loaded(case: Case, folder: Path, device: str = "oracle") -> tuple[Any, torch.nn.Module]:
    twin = case.twin()
    return models.load(saved(twin, folder), device=device), twin


def run(model: Any, case: Case) -> np.ndarray:
    arguments, keywords = ours(case)
    return np.asarray(model(*arguments, **keywords))


def ours(case: Case) -> tuple[tuple[np.ndarray, ...], dict[str, np.ndarray]]:
    """Arguments by our names."""
    arguments, keywords = case.batch()
    names = {"decoder_input_ids": "decoder_tokens"}
    return arguments, {names.get(k, k): v for k, v in keywords.items()}


SLOW = [
    "llama-linear",
    "bert",
    "bert-tags",
    "roberta-tags",
    "roberta-classes",
    "t5-gated",
    "mixtral",
]


def slow_ones(names: list[str]) -> list[Any]:
    return [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in names]


@pytest.mark.parametrize("name", slow_ones(list(BY_NAME)))
def test_logits_are_the_references(name: str, tmp_path: Path) -> None:
    """From a file that the reference wrote; and the folder that we write opens there."""
    case = BY_NAME[name]
    model, twin = loaded(case, tmp_path / "theirs")
    wanted = case.wanted(twin)
    assert np.abs(run(model, case) - wanted).max() < CLOSE
    models.save(model, tmp_path / "ours")
    back = getattr(twins.transformers(), case.architecture).from_pretrained(tmp_path / "ours")
    assert np.array_equal(case.wanted(back.eval()), wanted)


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "a", "Not"]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def with_tokenizer(twin: Any, folder: Path) -> Path:
    """A folder as `transformers` saves one: a tokenizer with settings and a chat template."""
    import tokenizers

    parts = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]")
    )
    parts.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]"}
    own = twins.transformers().PreTrainedTokenizerFast(
        tokenizer_object=parts, model_max_length=11, padding_side="left", **special
    )
    own.chat_template = TEMPLATE
    own.save_pretrained(folder)
    return saved(twin, folder)


@pytest.mark.parametrize("name", ["bert-classes", "llama"])
def test_a_saved_folder_has_what_lay_beside_the_weights(name: str, tmp_path: Path) -> None:
    """Of encoders as of decoders: `transformers` reads text alike, and gives the same numbers."""
    theirs, case = twins.transformers(), BY_NAME[name]
    folder = with_tokenizer(case.twin(), tmp_path / "theirs")
    (folder / "generation_config.json").write_text('{"temperature": 0.5, "eos_token_id": [7, 9]}')
    (folder / "preprocessor_config.json").write_text('{"size": 3}')
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    model = models.load(folder, device="oracle")
    own = {p.relative_to(folder) for p in folder.rglob("*") if p.is_file()}
    texts = ["a good film", "Not a good film , a bad"]

    def read(place: Path) -> tuple[Any, ...]:
        tokenizer = theirs.AutoTokenizer.from_pretrained(place)
        batch = tokenizer(texts, padding=True, truncation=True)
        chat = [{"role": "user", "content": "film"}]
        rows = torch.tensor(batch["input_ids"]), torch.tensor(batch["attention_mask"])
        twin = getattr(theirs, case.architecture).from_pretrained(place).eval()
        with torch.no_grad():
            logits = twin(rows[0], attention_mask=rows[1]).logits.numpy()
        said = tokenizer.apply_chat_template(chat, tokenize=False)
        return dict(batch), said, tokenizer.model_max_length, logits.tolist()

    wanted = read(folder)
    (folder / "adapter_config.json").write_text("{}")  # of other weights
    contents = {p: (folder / p).read_bytes() for p in own}
    for path in sorted(own, reverse=True):
        (folder / path).unlink()  # what is saved does not depend on where it came from
    models.save(model, tmp_path / "ours")
    found = {
        p.relative_to(tmp_path / "ours") for p in (tmp_path / "ours").rglob("*") if p.is_file()
    }
    assert found == own - {Path("adapter_config.json")}
    for path in found - {Path("config.json"), Path("model.safetensors")}:
        assert (tmp_path / "ours" / path).read_bytes() == contents[path], path
    assert read(tmp_path / "ours") == wanted


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_compiled_logits_are_the_references(case: Case, tmp_path: Path) -> None:
    model, twin = loaded(case, tmp_path, "cpu")
    assert np.abs(run(model, case) - case.wanted(twin)).max() < CLOSE


@pytest.mark.parametrize(
    "name",
    slow_ones(
        ["gpt2", "llama-yarn", "mixtral", "mamba", "bert-masked", "vit", "clip", "t5", "whisper"]
    ),
)
def test_gradients_are_the_references(name: str, tmp_path: Path) -> None:
    case = BY_NAME[name]
    model, twin = loaded(case, tmp_path)
    arguments, keywords = case.batch()

    def total(values: dict[str, td.Tensor]) -> td.Tensor:
        mine, named = ours(case)
        return (model.apply(values, *mine, **named) ** 2).mean()

    found = td.grad(total)(model.values())
    given = [torch.tensor(a) for a in arguments]
    twin.requires_grad_(True)  # of all values, also of those that it would not train
    theirs = twin(*given, **{k: torch.tensor(v) for k, v in keywords.items()})
    (getattr(theirs, case.output) ** 2).mean().backward()
    with torch.no_grad():  # gradients in a file, which has the names of files
        for p in twin.parameters():
            p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
    wanted = models.load(saved(twin, tmp_path / "gradients"), device="oracle").values()
    greatest = max(np.abs(g).max() for g in wanted.values())
    for name_, gradient in wanted.items():
        scale = np.abs(gradient).max() + 0.02 * greatest  # some are 0 but for rounding
        assert np.abs(np.asarray(found[name_]) - gradient).max() / scale < CLOSE, name_


def torchvision_pair(name: str, classes: int = 7) -> tuple[Any, torch.nn.Module]:
    twin = getattr(twins.torchvision(), name)(num_classes=classes)
    return getattr(models, name)(classes), scattered(twin, by=0.01)


def compare_torchvision(name: str, tmp_path: Path, device: str, side: int) -> None:
    model, twin = torchvision_pair(name)
    save_file(twin.state_dict(), tmp_path / "it.safetensors")
    models.load_weights(model, tmp_path / "it.safetensors")
    model.device = device
    images = np.random.default_rng(0).normal(size=(2, 3, side, side)).astype(np.float32)
    with torch.no_grad():
        wanted = twin(torch.tensor(images)).numpy()
    assert np.abs(model(images) - wanted).max() < CLOSE * max(1, np.abs(wanted).max())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["resnet18", "resnet34", "resnet50", "efficientnet_b0", "convnext_tiny"]
)
def test_compiled_networks_are_torchvisions(name: str, tmp_path: Path) -> None:
    compare_torchvision(name, tmp_path, "cpu", 64)


def compare_small(twin: torch.nn.Module, model: Any, tmp_path: Path) -> None:
    save_file(scattered(twin).state_dict(), tmp_path / "it.safetensors")
    models.load_weights(model, tmp_path / "it.safetensors").device = "oracle"
    images = np.random.default_rng(0).normal(size=(2, 3, 32, 32)).astype(np.float32)
    with torch.no_grad():
        wanted = twin(torch.tensor(images)).numpy()
    assert np.abs(model(images) - wanted).max() < CLOSE * max(1, np.abs(wanted).max())


def test_a_small_efficientnet_is_torchvisions(tmp_path: Path) -> None:
    kinds = twins.torchvision().efficientnet
    rows = ((1, 3, 1, 8, 8, 1), (4, 5, 2, 8, 16, 2))
    twin = kinds.EfficientNet([kinds.MBConvConfig(*row) for row in rows], 0.2, num_classes=5)
    compare_small(twin, models.efficientnet_b0(5, stages=rows), tmp_path)


@pytest.mark.parametrize("kind", [pytest.param("BasicBlock", marks=pytest.mark.slow), "Bottleneck"])
def test_a_small_resnet_is_torchvisions(kind: str, tmp_path: Path) -> None:
    kinds = twins.torchvision().resnet
    twin = kinds.ResNet(getattr(kinds, kind), [1, 1, 1, 1], num_classes=5)
    sizes = {"layers": (1, 1, 1, 1), "is_bottleneck": kind == "Bottleneck", "num_labels": 5}
    compare_small(twin, models.ResNet(models.ResNetConfig(**sizes)), tmp_path)


def test_a_small_convnext_is_torchvisions(tmp_path: Path) -> None:
    kinds = twins.torchvision().convnext
    blocks = [kinds.CNBlockConfig(8, 16, 2), kinds.CNBlockConfig(16, None, 1)]
    model = models.convnext_tiny(5, widths=(8, 16), layers=(2, 1))
    compare_small(kinds.ConvNeXt(blocks, num_classes=5), model, tmp_path)


def test_a_vision_transformer_is_torchvisions(tmp_path: Path) -> None:
    kind = twins.torchvision().vision_transformer.VisionTransformer
    twin = scattered(kind(16, 8, 2, 4, 32, 48, num_classes=5))
    save_file(twin.state_dict(), tmp_path / "it.safetensors")
    sizes = {"image_size": 16, "patch_size": 8, "hidden_size": 32, "intermediate_size": 48}
    model = models.vit_b_16(5, num_hidden_layers=2, num_attention_heads=4, **sizes)
    models.load_weights(model, tmp_path / "it.safetensors").device = "oracle"
    images = np.random.default_rng(0).normal(size=(2, 3, 16, 16)).astype(np.float32)
    with torch.no_grad():
        assert np.abs(model(images) - twin(torch.tensor(images)).numpy()).max() < CLOSE


class LeNet(torch.nn.Module):
    """The network of PyTorch's tutorial."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = torch.nn.Conv2d(1, 6, 5), torch.nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2 = torch.nn.Linear(16 * 4 * 4, 120), torch.nn.Linear(120, 84)
        self.fc3 = torch.nn.Linear(84, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        f = torch.nn.functional
        for conv in (self.conv1, self.conv2):
            x = f.max_pool2d(torch.relu(conv(x)), 2)
        return self.fc3(torch.relu(self.fc2(torch.relu(self.fc1(x.flatten(1))))))


def _sequential() -> torch.nn.Module:
    linear = torch.nn.Linear
    return torch.nn.Sequential(linear(5, 7), torch.nn.ReLU(), linear(7, 3))


@pytest.mark.parametrize(
    ("model", "make", "shape"),
    [(models.LeNet(), LeNet, (2, 1, 28, 28)), (models.MLP([5, 7, 3]), _sequential, (4, 5))],
    ids=["lenet", "mlp"],
)
def test_small_models_are_pytorchs(model: Any, make: Any, shape: tuple[int, ...]) -> None:
    twin = make()
    model.start_from(twin.state_dict())
    model.device = "oracle"
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    with torch.no_grad():
        assert np.abs(model(x) - twin(torch.tensor(x)).numpy()).max() < 1e-5


def train_beside_pytorch(tmp_path: Path, steps: int, **sizes: int) -> None:
    """Losses of AdamW from a checkpoint of `transformers`, ours natively, beside PyTorch's."""
    library = twins.transformers()
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    torch.manual_seed(0)
    twin = library.GPT2LMHeadModel(library.GPT2Config(**sizes, **off)).train()
    model = models.load(saved(twin, tmp_path), device="cpu")
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, sizes["vocab_size"], (steps, 2, 17))

    def loss(m: Any, batch: dict[str, td.Tensor]) -> td.Tensor:
        logits = m(batch["tokens"][:, :-1])
        return losses.cross_entropy(
            logits.reshape(-1, sizes["vocab_size"]), batch["tokens"][:, 1:].reshape(-1)
        )

    rule = optim.adamw(1e-3, weight_decay=0.01)
    spec = {"tokens": td.Spec((2, 17), td.int64)}
    step = td.compile_step(model, loss, rule, spec, device="cpu")
    optimizer = torch.optim.AdamW(twin.parameters(), 1e-3, weight_decay=0.01)
    for batch in tokens:
        given = torch.tensor(batch)
        logits = twin(given[:, :-1]).logits.reshape(-1, sizes["vocab_size"])
        wanted = torch.nn.functional.cross_entropy(logits, given[:, 1:].reshape(-1))
        optimizer.zero_grad()
        wanted.backward()
        optimizer.step()
        assert abs(float(step({"tokens": batch}).loss) - wanted.item()) < 1e-3
    # What was trained is saved, opens there, and generates here.
    models.save(model, tmp_path / "trained", step.params)
    back = library.GPT2LMHeadModel.from_pretrained(tmp_path / "trained")
    name = "transformer.h.0.mlp.c_fc.weight"
    assert np.array_equal(back.state_dict()[name].numpy(), step.params[name])


def test_training_goes_as_pytorchs(tmp_path: Path) -> None:
    train_beside_pytorch(
        tmp_path, 20, n_embd=16, n_layer=1, n_head=2, vocab_size=31, n_positions=20
    )


@pytest.mark.slow
def test_training_gpt2_small_goes_as_pytorchs(tmp_path: Path) -> None:
    train_beside_pytorch(
        tmp_path, 20, n_embd=768, n_layer=12, n_head=12, vocab_size=50257, n_positions=64
    )


def test_dropout_is_for_training_only(tmp_path: Path) -> None:
    config = models.GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    model = models.GPT2(config)
    tokens = np.zeros((2, 4), np.int32)
    values = model.init(0)
    plain = model.apply(values, tokens)
    dropped = [
        td.compile_forward(
            model,
            lambda m, b: m(b["x"]),
            {"x": td.Spec((2, 4), td.int32)},
            device="oracle",
            training=True,
            seed=seed,
        )({"x": tokens})
        for seed in (0, 1)
    ]
    assert not np.allclose(dropped[0], dropped[1])
    assert not np.allclose(dropped[0], np.asarray(plain))


def test_attention_dropout_keeps_the_mean() -> None:
    """Written out, with its weights dropped, a group's keys still serve all of its heads."""
    sizes = {"hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = models.LlamaConfig(
        vocab_size=7,
        intermediate_size=8,
        num_hidden_layers=1,
        attention_dropout=1e-9,
        **sizes,
    )
    model, tokens = models.Llama(config), np.arange(6).reshape(1, 6)
    values = model.init(0)
    with_dropout = model.apply(values, tokens, training=True)
    assert np.allclose(np.asarray(with_dropout), np.asarray(model.apply(values, tokens)), atol=1e-6)


def test_older_files_are_read(tmp_path: Path) -> None:
    """GPT-2's first files have no prefix and have masks; BERT's have gamma and beta."""
    twin = BY_NAME["gpt2"].twin()
    saved(twin, tmp_path)
    old = {n.removeprefix("transformer."): v for n, v in twin.transformer.state_dict().items()}
    old["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
    save_file(old, tmp_path / "model.safetensors", {"format": "pt"})
    model = models.load(tmp_path, device="oracle")
    assert np.abs(run(model, BY_NAME["gpt2"]) - BY_NAME["gpt2"].wanted(twin)).max() < CLOSE
    case = BY_NAME["bert-masked"]
    twin = case.twin()
    saved(twin, tmp_path / "bert")
    names = twin.state_dict()
    old = {n.replace("LayerNorm.weight", "LayerNorm.gamma"): v.clone() for n, v in names.items()}
    old = {n.replace("LayerNorm.bias", "LayerNorm.beta"): v for n, v in old.items()}
    save_file(old, tmp_path / "bert" / "model.safetensors", {"format": "pt"})
    model = models.load(tmp_path / "bert", device="oracle")
    assert np.abs(run(model, case) - case.wanted(twin)).max() < CLOSE


def test_older_configurations_are_read(tmp_path: Path) -> None:
    """Rotations were two keys, rope_theta and rope_scaling, with type for rope_type."""
    case = BY_NAME["llama"]
    twin = case.twin()
    saved(twin, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = models.load(tmp_path, device="oracle")
    assert np.abs(run(model, case) - case.wanted(twin)).max() < CLOSE


def test_narrow_files_are_read(tmp_path: Path) -> None:
    case = BY_NAME["llama"]
    twin = case.twin().to(torch.bfloat16)
    model = models.load(saved(twin, tmp_path), device="oracle")
    wanted = case.wanted(twin.to(torch.float32))
    assert np.abs(run(model, case) - wanted).max() < CLOSE


def test_shards_are_written_and_read(tmp_path: Path) -> None:
    case = BY_NAME["llama"]
    model, twin = loaded(case, tmp_path / "one")
    models.save(model, tmp_path / "several", shard_bytes=10_000)
    assert len(list((tmp_path / "several").glob("model-*.safetensors"))) > 2
    assert not (tmp_path / "several" / "model.safetensors").exists()
    again = models.load(tmp_path / "several", device="oracle")
    assert np.array_equal(run(again, case), run(model, case))
    back = twins.transformers().LlamaForCausalLM.from_pretrained(tmp_path / "several")
    assert np.array_equal(case.wanted(back.eval()), case.wanted(twin))
    twin.save_pretrained(tmp_path / "theirs", max_shard_size="10KB")
    again = models.load(tmp_path / "theirs", device="oracle")
    assert np.array_equal(run(again, case), run(model, case))


@pytest.mark.parametrize("name", ["small", "medium", "large", "xl"])
def test_sizes_of_gpt2(name: str) -> None:
    counts = {"small": 124439808, "medium": 354823168, "large": 774030080, "xl": 1557611200}
    found = sum(int(np.prod(p.shape)) for p in models.gpt2(name).parameters())
    assert found == counts[name]


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("smollm2-135m", 134515008),
        ("smollm2-360m", 361821120),
        ("smollm2-1.7b", 1711376384),
        ("llama-3.2-1b", 1235814400),
        ("llama-3.1-8b", 8030261248),
        ("mistral-7b", 7241732096),
        ("mixtral-8x7b", 46702792704),
        ("qwen2.5-0.5b", 494032768),
        ("qwen3-0.6b", 596049920),
    ],
)
def test_sizes_of_published_models(name: str, count: int) -> None:
    """The parameters that their authors count."""
    found = sum(int(np.prod(p.shape)) for p in models.llama(name).parameters())
    assert found == count


@pytest.mark.parametrize(
    ("model", "count", "architecture"),
    [
        (models.mamba("130m"), 129135360, "MambaForCausalLM"),
        (models.whisper("tiny"), 37760640, "WhisperForConditionalGeneration"),
        (models.whisper("base"), 72593920, "WhisperForConditionalGeneration"),
    ],
    ids=["mamba-130m", "whisper-tiny", "whisper-base"],
)
def test_published_sizes_have_the_references_parts(
    model: Any, count: int, architecture: str
) -> None:
    library = twins.transformers()
    with torch.device("meta"):
        kind = getattr(library, architecture)
        twin = kind(kind.config_class(**model.config.json()))
    theirs = {n: tuple(p.shape) for n, p in twin.named_parameters()}
    assert {n: p.shape for n, p in model.named_parameters()} == theirs
    assert sum(int(np.prod(shape)) for shape in theirs.values()) == count


def test_a_model_outside_of_a_trace_follows_its_values() -> None:
    model = models.MLP([3, 2])
    model.device = "cpu"
    x = np.ones((1, 3), np.float32)
    assert np.allclose(model(x), np.asarray(model.apply(model.init(0), x)), atol=1e-6)
    model.start_from({"0.weight": np.ones((2, 3)), "0.bias": np.zeros(2)})
    assert np.array_equal(model(x), [[3, 3]])
    assert np.array_equal(model(np.ones((2, 3), np.float32)), [[3, 3]] * 2)
    with pytest.raises(td.LoadError, match="missing: 0.bias; unexpected: none"):
        model.start_from({"0.weight": np.ones((2, 3))})
    with pytest.raises(td.LoadError, match="given the shape"):
        model.start_from({"0.weight": np.ones((2, 3)), "0.bias": np.zeros(3)})
