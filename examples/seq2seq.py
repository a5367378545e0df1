"""A transformer that translates: numbers in words to digits, with padding masks on both sides.

    python examples/seq2seq.py

"four hundred twelve" becomes "412". Both sides differ in length, so that shorter ones are filled
with PAD: the encoder does not look at it (`src_key_padding_mask`), nor does the decoder
(`memory_key_padding_mask`, `tgt_key_padding_mask`), and the loss leaves it out (`ignore_index`).
"""

import numpy as np

import treadle as td
from treadle import losses, nn, optim

ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
).split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
WORDS = ["<pad>", *ONES, *TENS, "hundred", "thousand", "and"]
PAD, START, END = 0, 11, 12  # of targets; digit d is token d + 1
SOURCE, TARGET = 9, 6  # the longest of each, START and END included
TOKEN = {word: i for i, word in enumerate(WORDS)}


def in_words(n: int) -> list[str]:
    if n < 20:
        return [ONES[n]]
    if n < 100:
        return [TENS[n // 10 - 2]] + ([ONES[n % 10]] if n % 10 else [])
    if n < 1000:
        return [ONES[n // 100], "hundred"] + (["and", *in_words(n % 100)] if n % 100 else [])
    return [*in_words(n // 1000), "thousand"] + (in_words(n % 1000) if n % 1000 else [])


def tokens(numbers):
    """Words, and digits between START and END, each filled with PAD."""
    source = np.full((len(numbers), SOURCE), PAD, np.int32)
    target = np.full((len(numbers), TARGET), PAD, np.int32)
    for row, n in enumerate(numbers):
        words = [TOKEN[word] for word in in_words(int(n))]
        digits = [START, *(int(d) + 1 for d in str(n)), END]
        source[row, : len(words)], target[row, : len(digits)] = words, digits
    return {"source": source, "target": target}


class Translator(nn.Module):
    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2):
        options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.words, self.digits = nn.Embedding(len(WORDS), width), nn.Embedding(13, width)
        self.positions = nn.Parameter((SOURCE, width), nn.init.normal(std=0.02))
        self.encoder = nn.TransformerEncoder(
            lambda: nn.TransformerEncoderLayer(width, heads, 2 * width, **options), layers
        )
        self.decoder = nn.TransformerDecoder(
            lambda: nn.TransformerDecoderLayer(width, heads, 2 * width, **options), layers
        )
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, 13)

    def forward(self, source, target):
        hidden, length = source == PAD, target.shape[1]  # True where there is nothing to look at
        memory = self.encoder(self.words(source) + self.positions, src_key_padding_mask=hidden)
        x = self.decoder(
            self.digits(target) + self.positions[:length],
            memory,
            tgt_mask=nn.causal_mask(length),
            tgt_key_padding_mask=target == PAD,
            memory_key_padding_mask=hidden,
        )
        return self.out(self.norm(x))  # (B, T, 13)


def loss(model, batch):
    given, wanted = batch["target"][:, :-1], batch["target"][:, 1:]
    scores = model(batch["source"], given)
    return losses.cross_entropy(scores, wanted, axis=-1, ignore_index=PAD)


def translate(step, source):
    """Digits one after the other, each the likeliest."""
    target = np.full((len(source), TARGET), PAD, np.int32)
    target[:, 0] = START
    scores = step.attach(
        lambda model, b: model(b["source"], b["target"]), {"source": source, "target": target}
    )
    for i in range(TARGET - 1):
        likeliest = scores({"source": source, "target": target})[:, i].argmax(-1)
        is_done = np.isin(target[:, i], (PAD, END))
        target[:, i + 1] = np.where(is_done, PAD, likeliest)
    return target


def train(steps: int = 600, lr: float = 2e-3, width: int = 64, layers: int = 2, batch: int = 64):
    rng = np.random.default_rng(0)
    numbers = rng.permutation(10_000)
    held_out, rest = numbers[:500], numbers[500:]
    rate = optim.warmup_cosine(lr, warmup=steps // 10 + 1, steps=steps + 1)
    step = td.compile_step(
        Translator(width, layers=layers), loss, optim.adamw(rate), tokens(rest[:batch]),
        device="cpu", clip_norm=1.0,
    )  # fmt: skip
    for i in range(1, steps + 1):
        out = step(tokens(rng.choice(rest, batch)))
        if i % 100 == 0 or i == steps:
            print(f"step {i}: loss {out.loss:.4f}")
    given = tokens(held_out)
    found = translate(step, given["source"])
    right = float((found == given["target"]).all(-1).mean())
    for n, row in zip(held_out[:4], found):
        print(f"{' '.join(in_words(n))}: {''.join(str(t - 1) for t in row if 0 < t < START)}")
    print(f"{right:.1%} of {len(held_out)} numbers held out are right, digit by digit")
    return right


if __name__ == "__main__":
    train()
