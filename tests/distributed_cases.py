"""What every rank of a distributed test runs: `mpiexec -n 2 python distributed_cases.py OUT CASE …`.

Rank 0 writes what each case gave as JSON: digests of everything that must have the same bits.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import treadle as td
from treadle import losses, nn, optim
from treadle.distributed.launched import open_communicator

Batches = Iterator[dict[str, np.ndarray]]
ROWS, SHARDS = 16, 8


class Classifier(nn.Module):
    def __init__(self) -> None:
        self.fc1, self.fc2 = nn.Linear(6, 11), nn.Linear(11, 5)
        self.scale = nn.Parameter((), nn.init.ones)

    def forward(self, x: td.Tensor) -> td.Tensor:
        return self.fc2(td.relu(self.fc1(x))) * self.scale


class Images(nn.Module):
    def __init__(self) -> None:
        self.conv, self.norm = nn.Conv2d(1, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3)
        self.fc, self.drop = nn.Linear(3, 5), nn.Dropout(0.25)

    def forward(self, x: td.Tensor) -> td.Tensor:
        return self.fc(self.drop(td.relu(self.norm(self.conv(x))).mean((2, 3))))


class Text(nn.Module):
    """One block of a GPT, with tied embeddings."""

    def __init__(self, width: int = 12, heads: int = 2, words: int = 13, length: int = 6):
        self.words, self.places = nn.Embedding(words, width), nn.Parameter((length, width))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.heads = heads

    def forward(self, tokens: td.Tensor) -> td.Tensor:
        x = self.words(tokens) + self.places  # (B, T, D)
        b, t, d = x.shape
        parts = td.chunk(self.qkv(self.norm1(x)), 3, -1)
        q, k, v = (p.reshape(b, t, self.heads, -1).permute(0, 2, 1, 3) for p in parts)
        mixed = td.attention(q, k, v, causal=True).permute(0, 2, 1, 3).reshape(b, t, d)
        x = x + self.out(mixed)
        x = x + self.down(td.gelu(self.up(self.norm2(x))))
        return td.linear(x, self.words.weight)


def weighted(model: Any, batch: Any) -> Any:
    logits = model(batch["x"])
    td.metric("size", (logits * logits).mean(), batch["weight"].sum())
    each = losses.cross_entropy(logits, batch["y"], reduction="none") * batch["weight"]
    return td.Mean(each.sum(), batch["weight"].sum())


def plain(model: Any, batch: Any) -> Any:
    logits = model(batch["x"])
    right = (logits.argmax(-1) == batch["y"]).astype(td.float32)
    td.metric("accuracy", right.mean())
    return losses.cross_entropy(logits, batch["y"])


def next_word(model: Any, batch: Any) -> Any:
    logits = model(batch["tokens"])
    return losses.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch["next"].reshape(-1))


def rows(kind: str, steps: int) -> Batches:
    rng = np.random.default_rng(5)
    for step in range(steps):
        y = rng.integers(0, 5, ROWS).astype(np.int32)
        if kind == "text":
            tokens = rng.integers(0, 13, (2, ROWS, 6)).astype(np.int32)
            yield {"tokens": tokens[0], "next": tokens[1]}
        elif kind == "images":
            yield {"x": rng.standard_normal((ROWS, 1, 4, 4), np.float32), "y": y}
        else:
            large = 3e5 if kind == "large" and step % 7 == 3 else 1.0
            x = (rng.standard_normal((ROWS, 6)) * large).astype(np.float32)
            yield {"x": x, "y": y, "weight": rng.random(ROWS, np.float32)}


Case = tuple[Callable[[], nn.Module], Any, str, dict[str, Any]]
CASES: dict[str, Case] = {
    "mlp": (Classifier, weighted, "rows", {"clip_norm": 0.5}),
    "mlp, whole updates": (Classifier, weighted, "rows", {"shard_optimizer": False}),
    "cnn": (Images, plain, "images", {}),
    "cnn, per shard": (Images, plain, "images", {"batch_norm": "per shard"}),
    "gpt": (Text, next_word, "text", {"accumulate": 3, "clip_norm": 0.1}),
    "gpt, bfloat16": (Text, next_word, "text", {"clip_norm": 0.1, "precision": "bfloat16"}),
    "float16": (Classifier, weighted, "large", {"precision": "float16"}),
}
SHARDED = ", sharded"  # ends the name of a case whose parameters are; it has the other's bits
for _name in ("mlp", "cnn", "gpt", "float16"):
    *_rest, _given = CASES[_name]
    CASES[_name + SHARDED] = (*_rest, {**_given, "shard_parameters": True})
for _name in ("mlp", "cnn", "gpt", "float16"):
    for _shards in (2, 8):
        *_rest, _given = CASES[_name]
        _given = {**_given, "shards": _shards}
        CASES[f"{_name}, {_shards} shards"] = (*_rest, _given)
        CASES[f"{_name}, {_shards} shards{SHARDED}"] = (
            *_rest,
            {**_given, "shard_parameters": True},
        )
OF_PARALLEL = (
    "shard_optimizer", "shard_parameters", "batch_norm", "local", "shards", "timeout", "transport",
)  # fmt: skip


def compiled(case: str, device: str = "cpu", **more: Any) -> td.TrainStep:
    make, loss, kind, given = CASES[case]
    asked = {"optimizer": optim.adamw(1e-2), **given, **more}
    parallel = {k: asked.pop(k) for k in OF_PARALLEL if k in asked}
    parallel = {"shards": SHARDS, "timeout": 60.0, **parallel}
    batch = next(rows(kind, 1))
    return td.compile_step(
        make(),
        loss,
        asked.pop("optimizer"),
        batch,
        device=device,
        parallel=td.DataParallel(**parallel),
        **asked,
    )


def digest(state: dict[str, np.ndarray], told: list[Any]) -> str:
    found = hashlib.sha256(repr(told).encode())
    for name in sorted(state):
        found.update(name.encode() + np.ascontiguousarray(state[name]).tobytes())
    return found.hexdigest()


def trained(case: str, steps: int, device: str = "cpu", **more: Any) -> dict[str, Any]:
    """What a case gives: digests after all steps and after a resumption in the middle."""
    step = compiled(case, device, **more)
    kind = CASES[case][2]
    told: list[Any] = []
    middle: dict[str, np.ndarray] = {}
    for i, batch in enumerate(rows(kind, steps)):
        if i == steps // 2:
            middle = step.state_dict()
        out = step(batch)
        told.append((out.loss, out.grad_norm, out.metrics, out.updated))
    state = step.state_dict()
    held = sum(step.session.types[n].nbytes for n in step.session.types if ":optimizer:" in n)
    own = {step._ranks.held_name(n) for n in step.recipe.trained()}
    return {
        "digest": digest(state, told),
        "middle": digest(middle, []),
        "loss": told[-1][0],
        "skipped": step.skipped,
        "held": held,
        "parameters": sum(step.session.values[n].nbytes for n in own),
    }


def part(case: str, steps: range, path: Path) -> dict[str, Any]:
    """Some steps of a run that goes on from a file, if they are not its first, and is saved to it."""
    step = compiled(case)
    if steps.start:
        step.load(path)
    told = []
    for i, batch in enumerate(rows(CASES[case][2], steps.stop)):
        if i >= steps.start:
            out = step(batch)
            told.append(repr([out.loss, out.grad_norm, out.metrics, out.updated]))
    step.save(path)
    return {"state": digest(step.state_dict(), []), "told": told, "skipped": step.skipped}


def main() -> None:
    target, steps, *cases = sys.argv[1:]
    first, _, last = steps.rpartition("-")  # "50", or "20-50": from what the first twenty saved
    if first:
        span = range(int(first), int(last))
        found = {c: part(c, span, Path(target).with_name(f"{c}.safetensors")) for c in cases}
    else:
        found = {case: trained(case, int(steps)) for case in cases}
    if open_communicator("auto", 60.0).rank == 0:
        Path(target).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
