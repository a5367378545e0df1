"""Fine-tune a model of a Hugging Face folder, write the folder back, and generate with it.

    python examples/finetune.py
    treadle train examples/finetune.py --set folder=SmolLM2-135M --set text=notes.txt

Without a folder it starts from a small Llama over letters, and learns Python from Python's own
standard library.
"""

import sysconfig
from pathlib import Path

import numpy as np

import treadle as td
from treadle import losses, models, optim

LETTERS = 128  # ASCII, for the small model, which has no tokenizer


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


def as_tokens(model: models.CausalModel, text: str) -> list[int]:
    if model.tokenizer is not None:
        return model.tokenizer.encode(text)
    return [min(ord(letter), LETTERS - 1) for letter in text]


def as_text(model: models.CausalModel, tokens: np.ndarray) -> str:
    if model.tokenizer is not None:
        return model.tokenizer.decode(tokens)
    return "".join(map(chr, tokens))


def loss(model, batch):
    logits = model(batch["tokens"][:, :-1])  # (B, T, V)
    return losses.cross_entropy(logits, batch["tokens"][:, 1:], axis=-1)


def train(
    folder: str | None = None,
    text: str | None = None,
    out: str = "finetuned",
    steps: int = 300,
    batch: int = 8,
    context: int = 64,
    rate: float = 2e-3,
    new_tokens: int = 60,
) -> None:
    """Train for some steps and save; print losses and a continuation."""
    model = small_llama() if folder is None else models.load(folder)
    source = Path(text) if text else Path(sysconfig.get_path("stdlib")) / "argparse.py"
    tokens = np.array(as_tokens(model, source.read_text()), np.int32)
    spec = {"tokens": td.Spec((batch, context + 1), td.int32)}
    step = td.compile_step(model, loss, optim.adamw(rate), spec)
    rng = np.random.default_rng(0)
    for i in range(steps):
        starts = rng.integers(0, len(tokens) - context, batch)
        rows = np.stack([tokens[s : s + context + 1] for s in starts])
        result = step({"tokens": rows})
        if i % 50 == 0 or i == steps - 1:
            print(f"step {i:4d}  loss {float(result.loss):.3f}")
    models.save(model, out, step.params)
    again = models.load(out)
    prompt = as_tokens(again, "    def ")
    found = again.generate(prompt, new_tokens, temperature=0.7, top_p=0.9, seed=1)
    print(f"from {out}: {as_text(again, found)!r}")


if __name__ == "__main__":
    train()
