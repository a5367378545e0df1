"""A tiny GPT that learns from pasted text in the browser, and writes over a cache of keys.

treadle export-web examples/web_text.py --out gpt
python -m http.server --directory gpt

With `--set steps=300` it is trained here first, and the page goes on from there.
`python examples/web_text.py` trains the same step on the text that the page begins with.
"""

import string

import numpy as np

import treadle as td
from treadle import losses, nn, optim

LETTERS = "\n " + "".join(c for c in string.printable if c.isprintable() and c != " ")
CONTEXT = 64
TEXT = """\
The weaver sits down at the loom and sets a foot on the treadle.
The treadle goes down, the warp opens, and the shuttle flies through.
The treadle comes up, the warp closes, and the thread lies in its place.
One step makes one thread, and a thousand steps make a yard of cloth.
The weaver looks at the cloth, finds what is wrong, and sets it right.
So the foot goes down again, the shuttle flies again, and the cloth grows.
"""


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x, cache=None, at=None):
        b, t, d = x.shape
        parts = self.qkv(self.norm1(x)).reshape(b, t, 3, self.heads, d // self.heads)
        q, k, v = (parts[:, :, i].transpose(1, 2) for i in range(3))  # (B, H, T, D)
        if cache is None:
            seen = td.attention(q, k, v, causal=True)
        else:  # keys and values of all positions so far, and which of them are there
            keys, values, mask = cache(k, v, at)
            seen = td.attention(q, keys, values, mask)
        x = x + self.out(seen.transpose(1, 2).reshape(b, t, d))
        return x + self.down(td.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2):
        self.letters = nn.Embedding(len(LETTERS), width)
        self.places = nn.Embedding(CONTEXT, width)
        self.letters.weight.init = self.places.weight.init = nn.init.normal(std=0.02)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens, places, caches=None, at=None):
        x = self.letters(tokens) + self.places(places)  # (B, T, D)
        for i, block in enumerate(self.blocks):
            x = block(x) if caches is None else block(x, caches[i], at)
        return td.linear(self.norm(x), self.letters.weight)  # (B, T, V)


class Decoder(nn.Module):
    """The model under its own names, with a cache for each block."""

    def __init__(self, gpt: GPT, width: int, heads: int):
        self.gpt = gpt
        self.caches = nn.ModuleList(
            nn.KVCache(1, heads, CONTEXT, width // heads) for _ in gpt.blocks
        )

    def _parts(self):
        return [*self.gpt._parts(), ("caches", self.caches)]


def loss(model, batch):
    scores = model(batch["x"], td.arange(batch["x"].shape[1]))
    return losses.cross_entropy(scores, batch["y"], axis=-1)


def decode(model, batch):
    """The scores (V,) of what follows one more letter at a position."""
    at = batch["at"]
    return model.gpt(batch["token"].reshape(1, 1), at.reshape(1), list(model.caches), at)[0, 0]


def compiled(width: int = 64, heads: int = 4, layers: int = 2, batch: int = 8, lr: float = 3e-3):
    """The training step, and the forward that writes one letter after the other."""
    gpt, spec = GPT(width, heads, layers), td.Spec((batch, CONTEXT), td.int32)
    step = td.compile_step(
        gpt, loss, optim.adamw(lr, weight_decay=0.1), {"x": spec, "y": spec}, device="cpu",
        clip_norm=1.0,
    )  # fmt: skip
    one = {"token": td.Spec((), td.int32), "at": td.Spec((), td.int32)}
    model = Decoder(gpt, width, heads)
    return step, td.compile_forward(model, decode, one, share=step, device="cpu")


def learn(step, steps: int, batch: int):
    """Updates on pieces of the text; the loss of the last."""
    tokens = np.array([LETTERS.index(c) for c in TEXT], np.int32)
    rng, last = np.random.default_rng(0), float("nan")
    for _ in range(steps):
        starts = rng.integers(0, len(tokens) - CONTEXT, batch)
        windows = tokens[starts[:, None] + np.arange(CONTEXT + 1)]
        last = step({"x": windows[:, :-1], "y": windows[:, 1:]}).loss
    return last


def export_web(
    folder: str, steps: int = 0, width: int = 64, heads: int = 4, layers: int = 2, batch: int = 8
):
    step, forward = compiled(width, heads, layers, batch)
    learn(step, steps, batch)
    settings = {"letters": LETTERS, "context": CONTEXT, "text": TEXT, "prompt": "The weaver "}
    return step.export_web(folder, page="text", forwards={"decode": forward}, settings=settings)


def train(steps: int = 150, width: int = 64, heads: int = 4, layers: int = 2, batch: int = 8):
    step, forward = compiled(width, heads, layers, batch)
    last = learn(step, steps, batch)
    print(f"loss {last:.3f} after {steps} steps")
    written = [LETTERS.index(c) for c in "The weaver "]
    for at in range(CONTEXT - 1):
        scores = forward({"token": np.int32(written[at]), "at": np.int32(at)})
        if at == len(written) - 1:
            written.append(int(scores.argmax()))
    print("".join(LETTERS[t] for t in written))
    return last


if __name__ == "__main__":
    train()
