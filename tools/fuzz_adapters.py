"""Mutated folders of adapters: each loads, or is refused by an error of Treadle's.

    python tools/fuzz_adapters.py --count 100000 --seed 0

Bytes are changed, cut, repeated and swapped in both files, and values of the configuration and of
the header are replaced by odd ones. Anything but a `TreadleError` is printed with its seed, and so
is a load that takes longer than a second or leaves a refused model changed.
"""

from __future__ import annotations

import argparse
import json
import random
import struct
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import treadle as td
from treadle import models, nn

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2.5, 10**12, 10**400, 1e308, "", "x", "LORA", "PREFIX_TUNING",
    "BOTTLENECK", "relu", [], {}, [0], ["lm_head"], [None], [[]], {"a": 1}, {"(a+)+$": 1},
    {"q_proj": "x"}, "../../etc/passwd", "\x00", "F32", "I64", [1 << 40, 1 << 40], [-1, 4],
]  # fmt: skip
LLAMA = models.LlamaConfig(
    vocab_size=8,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
)


def model() -> models.Llama:
    return models.Llama(LLAMA)


KINDS: list[Callable[[], Any]] = [
    lambda: nn.lora(model(), r=2, targets=["q_proj", "up_proj"]),
    lambda: nn.bottleneck(model(), 2, "down_proj"),
    lambda: models.prefix_tuning(model(), 2),
]


def originals() -> list[dict[str, bytes]]:
    found = []
    for make in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            models.save_adapter(make(), folder)
            found.append({n: (Path(folder) / n).read_bytes() for n in (CONFIG, WEIGHTS)})
    return found


def changed_bytes(data: bytes, rng: random.Random) -> bytes:
    kind, at = rng.randrange(5), rng.randrange(len(data) + 1)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + bytes(rng.randrange(256) for _ in range(rng.randrange(1, 9))) + data[at:]
    if kind == 2:
        return data[:at] + data[rng.randrange(len(data) + 1) :]
    found = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        found[rng.randrange(len(found))] = rng.randrange(256)
    return bytes(found)


def changed_json(value: Any, rng: random.Random) -> Any:
    """One value somewhere inside replaced, removed or renamed."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        kind = rng.randrange(6)
        rest = {k: v for k, v in value.items() if k != key}
        if kind == 0:
            return rest
        if kind == 1:
            return {**rest, key[: len(key) // 2] + rng.choice(["", "x", "."]): value[key]}
        return {**value, key: changed_json(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        return [*value[:at], changed_json(value[at], rng), *value[at + 1 :]]
    return rng.choice(ODD)


def changed_header(data: bytes, rng: random.Random) -> bytes:
    (length,) = struct.unpack("<Q", data[:8])
    text = json.dumps(changed_json(json.loads(data[8 : 8 + length]), rng)).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def mutated(files: dict[str, bytes], rng: random.Random) -> dict[str, bytes]:
    found = dict(files)
    for _ in range(rng.choice([1, 1, 2])):
        name = rng.choice([CONFIG, WEIGHTS])
        if rng.random() < 0.4:
            found[name] = changed_bytes(found[name], rng)
            continue
        try:
            if name == CONFIG:
                found[name] = json.dumps(changed_json(json.loads(found[name]), rng)).encode()
            else:
                found[name] = changed_header(found[name], rng)
        except (ValueError, struct.error, RecursionError):  # it was changed before
            found[name] = changed_bytes(found[name], rng)
    return found


def tried(files: dict[str, bytes], folder: Path) -> str:
    """What came of a folder, in a word; raises what should not come."""
    for name, data in files.items():
        (folder / name).write_bytes(data)
    given, start = model(), time.process_time()
    before = list(given.declarations())
    try:
        models.load_adapter(given, folder)
        outcome = "loaded"
    except td.TreadleError as error:
        outcome, said = type(error).__name__, str(error)
        assert list(given.declarations()) == before, "a refused folder changed the model"
        assert len(said) < 4000, "a long message"
    assert time.process_time() - start < 1, "more than a second"
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    known, outcomes, failures = originals(), Counter[str](), 0
    with tempfile.TemporaryDirectory() as folder:
        for i in range(given.seed, given.seed + given.count):
            rng = random.Random(i)
            try:
                outcomes[tried(mutated(rng.choice(known), rng), Path(folder))] += 1
            except Exception:
                failures += 1
                print(f"seed {i}:\n{traceback.format_exc()}")
    print(f"{given.count:,} folders: {dict(outcomes)}, {failures} failures")
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()
