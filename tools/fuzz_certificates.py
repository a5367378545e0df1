"""Damages a small certificate in many ways and gives each to the checker.

    python tools/fuzz_certificates.py --inputs 100000 --seed 0 [--seconds 600]

Half of the inputs are damaged bytes; half are damaged values of a record, with all hashes made
right again, so that only what the record says can give it away. The checker must answer each within
its limits, raise nothing, and import nothing. Prints how many were rejected, unreadable and
accepted, and the slowest. What is accepted says nothing else: names, lines, proposals of pairs.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from treadle_checker.certificate import check_bytes
from treadle_checker.reading import digest

LIMIT = 20.0  # seconds that one input may take
# What damaged values become: sizes that lie, names that nobody knows, wrong kinds.
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 255, 2**31, 2**40, 2**62, 10**30, -(2**62), 0.5, 1e308,
    "", "add", "mul", "sub", "scan", "call", "input", "float32", "int8", "__import__", "../x",
    "a" * 300,
    [], [[]], {}, {"graph": "0" * 64}, {"float": "nan"}, {"fraction": [1, 0]}, [0, 0], [2**40],
    {"array": ["float32", [2**20], ""]},
)  # fmt: skip


def small_certificate() -> bytes:
    """Of a linear model's step: every kind of record, and little of each."""
    import treadle as td
    from treadle import losses, nn, optim

    step = td.compile_step(
        nn.Linear(3, 1, bias=False),
        lambda model, b: losses.mse(model(b["x"]), b["y"]),
        optim.sgd(0.1),
        {"x": td.Spec((2, 3)), "y": td.Spec((2, 1))},
        device="cpu",
    )
    return step.certificate.to_bytes()


def damaged_bytes(data: bytes, rng: random.Random) -> bytes:
    """Bits that flip, parts that are missing, repeated or moved."""
    found = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at, length = rng.randrange(len(found)), rng.randint(1, 60)
        match rng.randrange(6):
            case 0:
                found[at] ^= 1 << rng.randrange(8)
            case 1:
                del found[at : at + length]
            case 2:
                found[at:at] = found[at : at + length] * rng.randint(1, 50)
            case 3:
                del found[at:]
            case 4:
                found[at : at + length] = bytes(rng.choices(b'[]{},:"0129-+.eE\\u', k=length))
            case _:
                to = rng.randrange(len(found))
                found[to:to] = found[at : at + length]
        if not found:
            found = bytearray(b"{")
    return bytes(found)


def damaged_values(data: bytes, rng: random.Random) -> bytes:
    """A value of the manifest or of a record is another; the hashes are right."""
    document = json.loads(data)
    texts = dict(document["records"])
    name = rng.choice(["", *texts])
    given = json.loads(document["manifest"] if not name else texts[name])
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        given = damaged(given, rng)
    text = json.dumps(given, sort_keys=True, separators=(",", ":"))
    if not name:
        return with_manifest(document, text)
    return renamed(document, name, text)


def renamed(document: dict[str, Any], name: str, text: str) -> bytes:
    """A document in which a record has another text, and whatever names it its new name."""
    texts, changed = dict(document["records"]), [(name, text)]
    manifest = document["manifest"]
    while changed:
        old, text = changed.pop()
        texts.pop(old, None)
        new = digest(text.encode())
        manifest = manifest.replace(old, new)
        texts[new] = text
        for other, held in list(texts.items()):
            if old in held:
                changed.append((other, held.replace(old, new)))
    return with_manifest({**document, "records": texts}, manifest)


def with_manifest(document: dict[str, Any], text: str) -> bytes:
    """A document with another manifest, and its digest."""
    return json.dumps({**document, "manifest": text, "digest": digest(text.encode())}).encode()


def damaged(value: Any, rng: random.Random) -> Any:
    """One value inside another is changed."""
    at = value
    path: list[Any] = []
    while isinstance(at, (list, dict)) and at and (not path or rng.random() < 0.93):
        key = rng.choice(list(at)) if isinstance(at, dict) else rng.randrange(len(at))
        path.append(key)
        at = at[key]
    if not path:
        return copy.deepcopy(rng.choice(VALUES))
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    last = path[-1]
    match rng.randrange(5):
        case 0 if isinstance(holder, list):
            del holder[last]
        case 1 if isinstance(holder, list):
            holder.insert(last, holder[rng.randrange(len(holder))])
        case 2 if isinstance(holder, list):
            other = rng.randrange(len(holder))
            holder[last], holder[other] = holder[other], holder[last]
        case 3 if isinstance(holder[last], int) and not isinstance(holder[last], bool):
            holder[last] += rng.choice((-1, 1, 2, -7, 100))
        case _:
            holder[last] = copy.deepcopy(rng.choice(VALUES))
    return value


def inputs(data: bytes, count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    rng = random.Random(seed)
    for i in range(count):
        yield (
            ("values", damaged_values(data, rng)) if i % 2 else ("bytes", damaged_bytes(data, rng))
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--effort", type=int, default=0)
    options = parser.parse_args()
    data, start = small_certificate(), time.perf_counter()
    modules = set(sys.modules)
    counts: Counter[tuple[str, str]] = Counter()
    slowest, done = 0.0, 0
    for kind, given in inputs(data, options.inputs, options.seed):
        before = time.perf_counter()
        report = check_bytes(given, effort=options.effort)
        taken = time.perf_counter() - before
        slowest, done = max(slowest, taken), done + 1
        counts[kind, report.verdict] += 1
        assert taken < LIMIT, f"{taken:.1f} s for {given[:200]!r}"
        if before - start > options.seconds:
            break
    new = {m for m in set(sys.modules) - modules if not m.startswith(("numpy", "encodings"))}
    assert not new, new
    for (kind, verdict), n in sorted(counts.items()):
        print(f"{kind:<8}{verdict:<12}{n:>9,}")
    print(f"{done:,} inputs in {time.perf_counter() - start:.0f} s, the slowest {slowest:.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
