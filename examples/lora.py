"""Fine-tune low-rank adapters on a frozen model of 8 or 4 bits, and write the adapters alone.

    python examples/lora.py
    treadle train examples/lora.py --set folder=SmolLM2-135M --set text=notes.txt --set form=q4_0

Without a folder it first trains a small Llama over letters on one module of Python's standard
library, and then adapts it to another.
"""

import sysconfig
from pathlib import Path

import numpy as np

import treadle as td
from treadle import losses, models, nn, optim

LETTERS = 128  # ASCII, for the small model, which has no tokenizer
LIBRARY = Path(sysconfig.get_path("stdlib"))


def small_llama() -> models.Llama:
    config = models.LlamaConfig(
        vocab_size=LETTERS,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    return models.Llama(config)


def tokens_of(model: models.CausalModel, file: Path) -> np.ndarray:
    text = file.read_text()
    if model.tokenizer is not None:
        return np.array(model.tokenizer.encode(text), np.int32)
    return np.array([min(ord(letter), LETTERS - 1) for letter in text], np.int32)


def loss(model, batch):
    logits = model(batch["tokens"][:, :-1])  # (B, T, V)
    return losses.cross_entropy(logits, batch["tokens"][:, 1:], axis=-1)


def fit(model, tokens, steps: int, batch: int, context: int, rate: float, name: str):
    """Train what is not frozen; the step."""
    spec = {"tokens": td.Spec((batch, context + 1), td.int32)}
    step = td.compile_step(model, loss, optim.adamw(rate), spec)
    rng = np.random.default_rng(0)
    for i in range(steps):
        starts = rng.integers(0, len(tokens) - context, batch)
        rows = np.stack([tokens[s : s + context + 1] for s in starts])
        result = step({"tokens": rows})
        if i % 50 == 0 or i == steps - 1:
            print(f"{name} {i:4d}  loss {float(result.loss):.3f}")
    return step


def train(
    folder: str | None = None,
    text: str | None = None,
    out: str = "adapter",
    form: str = "q8_0",
    r: int = 8,
    first_steps: int = 200,
    steps: int = 150,
    batch: int = 8,
    context: int = 64,
    rate: float = 5e-3,
) -> None:
    """Adapt a model and save the adapters; print losses, and what a step holds."""
    if folder is None:
        start = Path(f"{out}-base")
        base = small_llama()
        known = tokens_of(base, LIBRARY / "argparse.py")
        models.save(base, start, fit(base, known, first_steps, batch, context, 2e-3, "base").params)
    else:
        start = Path(folder)
    model = models.load(start)
    nn.quantize(model, form, targets="layers.*")
    nn.lora(model, r=r, alpha=2 * r, targets="layers.*")
    tokens = tokens_of(model, Path(text) if text else LIBRARY / "decimal.py")
    if text is None and len(tokens) < 2000:  # a stub that imports the module itself
        tokens = tokens_of(model, LIBRARY / "_pydecimal.py")
    step = fit(model, tokens, steps, batch, context, rate, "adapter")
    models.save_adapter(model, out, step.params)
    if step.memory is not None:
        print(f"held {step.memory.held / 1e6:.2f} MB, arena {step.memory.arena / 1e6:.2f} MB")

    # The adapters fit the model that was not quantized, too: merged, they cost nothing there.
    merged = nn.merge(models.load_adapter(models.load(start), out))
    starts = np.linspace(0, len(tokens) - context - 1, 32).astype(int)
    rows = {"tokens": np.stack([tokens[s : s + context + 1] for s in starts])}
    before, after = (
        float(td.compile_forward(m, loss, rows)(rows)) for m in (models.load(start), merged)
    )
    print(f"loss of all of the text: {before:.3f}, with the merged adapters {after:.3f}")


if __name__ == "__main__":
    train()
