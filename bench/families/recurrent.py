"""Sequences step by step: GRU and LSTM, speech with CTC, translation, linear recurrences."""

from __future__ import annotations

from typing import Any

import numpy as np

from families.entry import Arrays, Entry, classes, floats, lengths


def language(s: Any, cell: str, vocabulary: int, d: int, layers: int, **others: int) -> Any:
    """The next token by a recurrent layer, (T, N), with or without lengths."""
    nn = s.nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte, self.head = nn.Embedding(vocabulary, d), nn.Linear(d, vocabulary)
            self.cell = getattr(nn, cell)(d, d, layers)

        def forward(self, batch: Any) -> Any:
            x = self.wte(batch["x"])
            if "lengths" in batch:
                y = s.recurrent(self.cell, x, batch["lengths"])
            else:
                y = self.cell(x)[0]
            return s.cross_entropy(self.head(y), batch["y"])

    return Model()


def tokens(rng: np.random.Generator, n: int, t: int, vocabulary: int, **others: Any) -> Arrays:
    return {"x": classes(rng, vocabulary, t, n), "y": classes(rng, vocabulary, t, n)}


def uneven(rng: np.random.Generator, n: int, t: int, vocabulary: int, **others: Any) -> Arrays:
    """Sequences that end early, their labels there −100."""
    ends = lengths(rng, t, n)
    batch = tokens(rng, n, t, vocabulary)
    batch["y"][np.arange(t)[:, None] >= ends] = -100
    return batch | {"lengths": ends}


def tagger(s: Any, vocabulary: int, d: int, count: int, **others: int) -> Any:
    """A bidirectional LSTM with lengths that gives every token a tag."""
    nn = s.nn

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte, self.head = nn.Embedding(vocabulary, d), nn.Linear(2 * d, count)
            self.lstm = nn.LSTM(d, d, bidirectional=True)

        def forward(self, batch: Any) -> Any:
            y = s.recurrent(self.lstm, self.wte(batch["x"]), batch["lengths"])
            return s.cross_entropy(self.head(y), batch["y"])

    return Tagger()


def tagged(
    rng: np.random.Generator, n: int, t: int, vocabulary: int, count: int, **others: int
) -> Arrays:
    batch = uneven(rng, n, t, vocabulary)
    tags = classes(rng, count, t, n)
    return batch | {"y": np.where(batch["y"] < 0, -100, tags).astype(np.int32)}


def speech(s: Any, mels: int, d: int, letters: int, **others: int) -> Any:
    """Frames through strided convolutions and a bidirectional GRU to letters, by CTC."""
    nn = s.nn

    class Speech(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1 = nn.Conv1d(mels, d, 5, 2, padding=2)
            self.conv2 = nn.Conv1d(d, d, 5, padding=2)
            self.gru = nn.GRU(d, d // 2, bidirectional=True)
            self.head = nn.Linear(d, letters)

        def forward(self, batch: Any) -> Any:
            x = s.gelu(self.conv2(s.gelu(self.conv1(batch["x"]))))
            y = self.gru(x.permute(2, 0, 1))[0]  # (T, N, d)
            found = s.log_softmax(self.head(y), -1)
            return s.ctc(found, batch["text"], batch["times"], batch["lengths"])

    return Speech()


def utterances(
    rng: np.random.Generator, n: int, t: int, mels: int, letters: int, text: int, **others: int
) -> Arrays:
    return {
        "x": floats(rng, n, mels, t),
        "text": 1 + classes(rng, letters - 1, n, text),
        "times": lengths(rng, t // 2, n),
        "lengths": lengths(rng, text, n),
    }


def mamba(s: Any, vocabulary: int, d: int, states: int, layers: int, **others: int) -> Any:
    """Mamba-like: a linear recurrence whose rates depend on the input, gated."""
    nn, wide = s.nn, 2 * d

    def cell(carry: Any, row: Any) -> Any:
        decay, inputs, reads = row  # (N, wide, states) twice, (N, states)
        carry = carry * decay + inputs
        return carry, (carry * reads[:, None, :]).sum(-1)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.into = nn.LayerNorm(d), nn.Linear(d, 2 * wide)
            self.step, self.both = nn.Linear(wide, wide), nn.Linear(wide, 2 * states)
            self.rate, self.skip = s.parameter(wide, states), s.parameter(wide)
            self.out = nn.Linear(wide, d)

        def forward(self, x: Any) -> Any:  # (T, N, d)
            u, gate = self.into(self.norm(x)).chunk(2, -1)
            u = s.silu(u)
            delta = s.softplus(self.step(u))[..., None]  # (T, N, wide, 1)
            writes, reads = self.both(u).chunk(2, -1)
            decay = s.exp(delta * -s.exp(self.rate))
            inputs = delta * u[..., None] * writes[:, :, None, :]
            y = s.scan(cell, decay[0] * 0, (decay, inputs, reads))[1]
            return x + self.out((y + u * self.skip) * s.silu(gate))

    class Mamba(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte = nn.Embedding(vocabulary, d)
            self.blocks = nn.ModuleList([Block() for _ in range(layers)])
            self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocabulary)

        def forward(self, batch: Any) -> Any:
            x = self.wte(batch["x"])
            for block in self.blocks:
                x = block(x)
            return s.cross_entropy(self.head(self.norm(x)), batch["y"])

    return Mamba()


def rwkv(s: Any, vocabulary: int, d: int, layers: int, **others: int) -> Any:
    """RWKV-like: means of values whose weights fade, a rate for each channel."""
    nn = s.nn

    def before(x: Any) -> Any:  # (T, N, d), each token's predecessor
        return s.cat([x[:1] * 0, x[:-1]], 0)

    class TimeMix(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.rate, self.bonus = nn.LayerNorm(d), s.parameter(d), s.parameter(d)
            self.mix = s.parameter(3, d, spread=0.5)
            self.k, self.v, self.r, self.out = (nn.Linear(d, d, bias=False) for _ in range(4))

        def forward(self, x: Any) -> Any:
            y = self.norm(x)
            apart = before(y) - y
            k, v, r = (f(y + apart * self.mix[i]) for i, f in enumerate((self.k, self.v, self.r)))
            weight, decay, bonus = s.exp(k), s.exp(-s.exp(self.rate)), s.exp(self.bonus)

            def cell(carry: Any, row: Any) -> Any:
                (top, bottom), (w, wv) = carry, row
                out = (top + bonus * wv) / (bottom + bonus * w)
                return (top * decay + wv, bottom * decay + w), out

            zero = weight[0] * 0
            found = s.scan(cell, (zero, zero), (weight, weight * v))[1]
            return x + self.out(s.sigmoid(r) * found)

    class ChannelMix(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mix = nn.LayerNorm(d), s.parameter(2, d, spread=0.5)
            self.k, self.v = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)
            self.r = nn.Linear(d, d, bias=False)

        def forward(self, x: Any) -> Any:
            y = self.norm(x)
            apart = before(y) - y
            hidden = s.relu(self.k(y + apart * self.mix[0]))
            return x + s.sigmoid(self.r(y + apart * self.mix[1])) * self.v(hidden * hidden)

    class RWKV(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte = nn.Embedding(vocabulary, d)
            blocks = [block() for _ in range(layers) for block in (TimeMix, ChannelMix)]
            self.blocks = nn.Sequential(*blocks)
            self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocabulary)

        def forward(self, batch: Any) -> Any:
            return s.cross_entropy(
                self.head(self.norm(self.blocks(self.wte(batch["x"])))), batch["y"]
            )

    return RWKV()


def seq2seq(s: Any, vocabulary: int, d: int, **others: int) -> Any:
    """An LSTM reads, another writes and looks back at what was read."""
    nn = s.nn

    class Seq2Seq(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.source, self.target = nn.Embedding(vocabulary, d), nn.Embedding(vocabulary, d)
            self.encoder, self.decoder = nn.LSTM(d, d), nn.LSTM(d, d)
            self.query, self.mix = nn.Linear(d, d, bias=False), nn.Linear(2 * d, d)
            self.head = nn.Linear(d, vocabulary)

        def forward(self, batch: Any) -> Any:
            memory, state = self.encoder(self.source(batch["source"]))  # (T, N, d)
            found = self.decoder(self.target(batch["x"]), state)[0]
            scores = s.einsum("tnd,snd->nts", self.query(found), memory)
            seen = s.einsum("nts,snd->tnd", s.softmax(scores, -1), memory)
            mixed = s.tanh(self.mix(s.cat([found, seen], -1)))
            return s.cross_entropy(self.head(mixed), batch["y"])

    return Seq2Seq()


def translated(rng: np.random.Generator, n: int, t: int, vocabulary: int, **others: int) -> Arrays:
    return tokens(rng, n, t, vocabulary) | {"source": classes(rng, vocabulary, t, n)}


SMALL = {"n": 32, "t": 48, "vocabulary": 128, "d": 192, "layers": 2}
LARGE = {"n": 64, "t": 256, "vocabulary": 1024, "d": 1024, "layers": 2}

ENTRIES = [
    Entry(
        "gru_lengths",
        "GRU with lengths",
        language,
        uneven,
        SMALL | {"cell": "GRU"},
        LARGE | {"cell": "GRU"},
    ),
    Entry(
        "lstm_lengths",
        "bidirectional LSTM with lengths",
        tagger,
        tagged,
        {"n": 32, "t": 48, "vocabulary": 512, "d": 128, "count": 17},
        {"n": 64, "t": 256, "vocabulary": 8192, "d": 512, "count": 17},
    ),
    Entry(
        "ctc",
        "speech: convolutions, GRU, CTC",
        speech,
        utterances,
        {"n": 8, "t": 200, "mels": 40, "d": 128, "letters": 32, "text": 24},
        {"n": 32, "t": 800, "mels": 80, "d": 512, "letters": 32, "text": 100},
    ),
    Entry("gru", "GRU", language, tokens, SMALL | {"cell": "GRU"}, LARGE | {"cell": "GRU"}),
    Entry(
        "mamba",
        "selective scan",
        mamba,
        tokens,
        {"n": 4, "t": 64, "vocabulary": 128, "d": 64, "states": 16, "layers": 2},
        {"n": 8, "t": 512, "vocabulary": 1024, "d": 512, "states": 16, "layers": 4},
    ),
    Entry(
        "rwkv",
        "RWKV, fading means",
        rwkv,
        tokens,
        {"n": 4, "t": 64, "vocabulary": 128, "d": 96, "layers": 2},
        {"n": 16, "t": 256, "vocabulary": 1024, "d": 512, "layers": 4},
    ),
    Entry(
        "seq2seq",
        "seq2seq LSTM with attention",
        seq2seq,
        translated,
        {"n": 16, "t": 24, "vocabulary": 256, "d": 128},
        {"n": 64, "t": 64, "vocabulary": 8192, "d": 512},
    ),
]
