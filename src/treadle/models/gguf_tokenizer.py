"""Tokenizers of GGUF files: byte-level BPE as a tokenizer.json, and back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from treadle.base.errors import LoadError, TreadleError
from treadle.interop import gguf
from treadle.models.tokenizer import Tokenizer

PREFIX = "tokenizer.ggml."
NORMAL, CONTROL, USER, UNUSED = 1, 3, 4, 5  # tokenizer.ggml.token_type

_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def _split(pattern: str) -> dict[str, Any]:
    """Text is cut by a pattern, then its bytes become letters."""
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [cut, {**_BYTES, "use_regex": False}]}


def _words(digits: str) -> str:
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


# How text is cut before pairs are merged: tokenizer.ggml.pre, and what it is in a tokenizer.json.
_DIGITS = {"type": "Digits", "individual_digits": True}
CUTS: dict[str, dict[str, Any]] = {
    "gpt-2": {**_BYTES, "use_regex": True},
    "smollm": {"type": "Sequence", "pretokenizers": [_DIGITS, {**_BYTES, "use_regex": True}]},
    "llama-bpe": _split(_words(r"\p{N}{1,3}")),
    "qwen2": _split(_words(r"\p{N}")),
}


def tokenizer_of(file: gguf.File) -> Tokenizer | None:
    """The tokenizer of a file, made when it is first used; None where the file has none."""
    if file.metadata.get(f"{PREFIX}model", "none") in ("none", "no_vocab"):
        return None
    return Tokenizer(file.path, partial(_json, file))


def _json(file: gguf.File) -> str:
    """What a tokenizer.json would say."""
    kind = file.metadata.get(f"{PREFIX}model")
    if kind != "gpt2":
        cause = f"{file.path} has a tokenizer of the kind {str(kind)[:40]!r}"
        raise LoadError("load", cause, "Byte-level BPE is read, 'gpt2'. Pass tokens, not text.")
    cut = file.metadata.get(f"{PREFIX}pre", "gpt-2")
    if not isinstance(cut, str) or cut not in CUTS:
        cause = f"{file.path} cuts text as {str(cut)[:40]!r} does"
        raise LoadError("load", cause, f"Known are: {', '.join(CUTS)}. Pass tokens, not text.")
    tokens, merges = _texts(file, "tokens"), _texts(file, "merges")
    types = file.metadata.get(f"{PREFIX}token_type", np.full(len(tokens), NORMAL))
    if not isinstance(types, np.ndarray) or len(types) != len(tokens):
        raise LoadError("load", f"{file.path} has other token_type than tokens", "Pass tokens.")
    added = [
        _added(i, t, kind == CONTROL)
        for i, (t, kind) in enumerate(zip(tokens, types.tolist(), strict=True))
        if kind in (CONTROL, USER)
    ]
    model: dict[str, Any] = {"type": "BPE", "merges": merges}
    model["vocab"] = {t: i for i, t in enumerate(tokens)}
    model |= {"ignore_merges": cut == "llama-bpe", "byte_fallback": False, "fuse_unk": False}
    found: dict[str, Any] = {"version": "1.0", "added_tokens": added, "model": model}
    found["pre_tokenizer"] = CUTS[cut]
    found["normalizer"] = {"type": "NFC"} if cut == "qwen2" else None
    found["decoder"] = {**_BYTES, "use_regex": True}
    found["post_processor"] = _begun(file, tokens)
    return json.dumps(found)


def _texts(file: gguf.File, key: str) -> list[str]:
    found = file.metadata.get(f"{PREFIX}{key}")
    if isinstance(found, list) and all(isinstance(t, str) for t in found):
        return [str(t) for t in found]
    cause = f"{file.path} has no {PREFIX}{key}"
    raise LoadError("load", cause, "Pass tokens, not text.")


def _added(id_: int, content: str, is_special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": id_, "content": content, "special": is_special, **flags}


def _begun(file: gguf.File, tokens: Sequence[str]) -> dict[str, Any] | None:
    """What puts the first token before a text, where the file says so."""
    first = file.metadata.get(f"{PREFIX}bos_token_id")
    if file.metadata.get(f"{PREFIX}add_bos_token") is not True or not isinstance(first, int):
        return None
    if not 0 <= first < len(tokens):
        raise LoadError("load", f"{file.path} has no token {first} to begin with", "Pass tokens.")
    name = tokens[first]
    start: dict[str, Any] = {"SpecialToken": {"id": name, "type_id": 0}}
    text: dict[str, Any] = {"Sequence": {"id": "A", "type_id": 0}}
    more: dict[str, Any] = {"Sequence": {"id": "B", "type_id": 0}}
    special = {name: {"id": name, "ids": [first], "tokens": [name]}}
    found: dict[str, Any] = {"type": "TemplateProcessing", "single": [start, text]}
    return {**found, "pair": [start, text, more], "special_tokens": special}


def tokenizer_metadata(tokenizer: Tokenizer | None, size: int) -> dict[str, Any]:
    """What a file says of a tokenizer; "none" where it is not one of those that are read."""
    none = {f"{PREFIX}model": "none"}
    if tokenizer is None:
        return none
    try:
        given = json.loads(tokenizer.text())
    except TreadleError:  # damaged, or `tokenizers` is not there: the model is saved without
        return none
    cut = next((n for n, c in CUTS.items() if _is_same(c, given.get("pre_tokenizer"))), None)
    model = given["model"]
    if cut is None or model["type"] != "BPE":
        return none
    names = {i: t for t, i in model["vocab"].items()}
    added = {t["id"]: t for t in given["added_tokens"]}
    names |= {i: t["content"] for i, t in added.items()}
    types = [UNUSED if i not in names else NORMAL for i in range(size)]
    for i, token in added.items():
        if i < size:
            types[i] = CONTROL if token["special"] else USER
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    first = _first(given.get("post_processor"))
    begin = {} if first is None else {f"{PREFIX}bos_token_id": first}
    return {
        f"{PREFIX}model": "gpt2",
        f"{PREFIX}pre": cut,
        f"{PREFIX}tokens": [names.get(i, f"[PAD{i}]") for i in range(size)],
        f"{PREFIX}token_type": np.array(types, np.int32),
        f"{PREFIX}merges": merges,
        f"{PREFIX}add_bos_token": first is not None,
        **begin,
    }


def _is_same(known: object, given: object) -> bool:
    """Whether two descriptions say the same, but for what decides nothing about tokens."""
    if isinstance(known, dict) and isinstance(given, dict):
        names = (known.keys() | given.keys()) - {"trim_offsets"}
        return all(_is_same(known.get(n), given.get(n)) for n in names)
    if isinstance(known, list) and isinstance(given, list):
        pairs = zip(known, given, strict=False)
        return len(known) == len(given) and all(_is_same(a, b) for a, b in pairs)
    return known == given


def _first(given: Any) -> int | None:
    """The token that a text gets before it, if any."""
    if not isinstance(given, dict):
        return None
    if given.get("type") == "Sequence":
        found = [_first(p) for p in given.get("processors", ())]
        return next((token for token in found if token is not None), None)
    start = (given.get("single") or [{}])[0].get("SpecialToken")
    return int(given["special_tokens"][start["id"]]["ids"][0]) if start else None
