"""A small GPT that learns to write Python from Python's own standard library.

    python examples/gpt.py
    treadle train examples/gpt.py --set steps=4000 --set folder=run --resume

It says how well a model of letter pairs does on the same text, which the network must beat.
"""

import sysconfig
from pathlib import Path

import numpy as np

import treadle as td
from treadle import data, losses, nn, optim

VOCABULARY, CONTEXT = 128, 64  # ASCII


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiHeadAttention(width, heads, batch_first=True)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x), causal=True)
        return x + self.down(td.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width: int = 128, heads: int = 4, layers: int = 3):
        self.letters, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.letters.weight.init = self.places.weight.init = nn.init.normal(std=0.02)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens):
        x = self.letters(tokens) + self.places(td.arange(tokens.shape[1]))  # (B, T, D)
        for block in self.blocks:
            x = block(x)
        return td.linear(self.norm(x), self.letters.weight)  # (B, T, V)


def loss(model, batch):
    return losses.cross_entropy(model(batch["x"]), batch["y"], axis=-1)


def library_text(letters: int) -> np.ndarray:
    """Modules of the standard library one after the other, as tokens."""
    folder = Path(sysconfig.get_path("stdlib"))
    found, count = [], 0
    for path in sorted(folder.glob("*.py")):
        text = path.read_bytes().replace(b"\r\n", b"\n")
        found.append(np.frombuffer(text, np.uint8))
        count += len(text)
        if count >= letters:
            break
    tokens = np.concatenate(found)[:letters].astype(np.int32)
    return np.where(tokens < VOCABULARY, tokens, ord("?"))


def pairs_loss(text: np.ndarray, held_out: np.ndarray) -> float:
    """The cross-entropy on held-out text of a model that counts which letter follows which."""
    counts = np.ones((VOCABULARY, VOCABULARY))
    np.add.at(counts, (text[:-1], text[1:]), 1)
    chance = counts / counts.sum(-1, keepdims=True)
    return float(-np.log(chance[held_out[:-1], held_out[1:]]).mean())


def sample(step, start: str, count: int, temperature: float = 0.8, seed: int = 0) -> str:
    """Text that goes on from a start, one letter after the other."""
    scores = step.attach(lambda model, x: model(x)[:, -1], td.Spec((1, CONTEXT), td.int32))
    rng = np.random.default_rng(seed)
    tokens = [ord("\n")] * (CONTEXT - len(start)) + list(start.encode("ascii"))
    for _ in range(count):
        logits = scores(np.array([tokens[-CONTEXT:]], np.int32))[0].astype(np.float64) / temperature
        chance = np.exp(logits - logits.max())
        tokens.append(int(rng.choice(VOCABULARY, p=chance / chance.sum())))
    return bytes(tokens[CONTEXT - len(start) :]).decode("ascii")


def train(
    steps: int = 1500,
    batch: int = 24,
    lr: float = 2e-3,
    width: int = 128,
    layers: int = 3,
    letters: int = 2_000_000,
    sampled: int = 400,
    folder: str = "",
    resume: str | None = None,
):
    text = library_text(letters)
    cut = int(0.95 * len(text))
    windows = data.TextWindows(text[:cut], CONTEXT)
    batches = data.ArrayLoader(windows, batch, shuffle=True)
    test = data.ArrayLoader(data.TextWindows(text[cut:], CONTEXT, stride=4 * CONTEXT), 64)
    pairs = pairs_loss(text[:cut], text[cut:])
    print(f"{len(text):,} letters; a model of pairs has a loss of {pairs:.3f}")

    rate = optim.warmup_cosine(lr, warmup=max(1, steps // 20), steps=steps)
    step = td.compile_step(
        GPT(width, layers=layers), loss, optim.adamw(rate, weight_decay=0.1),
        next(iter(batches)), device="cpu", clip_norm=1.0,
    )  # fmt: skip
    history = td.Trainer(step).fit(
        batches,
        steps=steps,
        validation=test,
        validate_every=max(1, steps // 6),
        checkpoint=folder or None,
        resume=resume,
    )
    final = history.last("val/loss").value
    print(f"the network has {final:.3f} on held-out text, pairs {pairs:.3f}\n")
    print(sample(step, "def ", sampled))
    return final, pairs


if __name__ == "__main__":
    train()
