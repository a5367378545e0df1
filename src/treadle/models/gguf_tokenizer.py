"""Tokenizers of GGUF files as a tokenizer.json, and back: byte-level BPE, SentencePiece's BPE."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from treadle.base.errors import LoadError, TreadleError
from treadle.interop import gguf
from treadle.models.tokenizer import Tokenizer

LONGEST = 256  # letters of a token that is made of others
PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type

ONE_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
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
    if not isinstance(kind, str) or kind not in READERS:
        cause = f"{file.path} has a tokenizer of the kind {str(kind)[:40]!r}"
        raise LoadError("load", cause, f"Known are: {', '.join(READERS)}. Pass tokens, not text.")
    tokens = _texts(file, "tokens")
    types = file.metadata.get(f"{PREFIX}token_type", np.full(len(tokens), NORMAL))
    if not isinstance(types, np.ndarray) or len(types) != len(tokens):
        raise LoadError("load", f"{file.path} has other token_type than tokens", "Pass tokens.")
    if len(set(tokens)) < len(tokens):
        raise LoadError("load", f"{file.path} has a token twice", "Pass tokens, not text.")
    kinds = types.tolist()
    added = [
        _added(i, tokens[i], kind != USER)
        for i, kind in enumerate(kinds)
        if kind in (CONTROL, USER, UNKNOWN)
    ]
    found = {"version": "1.0", "added_tokens": added, **READERS[kind](file, tokens, kinds)}
    found["model"] |= {"type": "BPE", "vocab": {t: i for i, t in enumerate(tokens)}}
    return json.dumps(found)


def _byte_level(file: gguf.File, tokens: list[str], kinds: list[int]) -> dict[str, Any]:
    """GPT-2's, whose merges are told; text is cut first."""
    cut = file.metadata.get(f"{PREFIX}pre", "gpt-2")
    if not isinstance(cut, str) or cut not in CUTS:
        cause = f"{file.path} cuts text as {str(cut)[:40]!r} does"
        raise LoadError("load", cause, f"Known are: {', '.join(CUTS)}. Pass tokens, not text.")
    model = {"merges": _texts(file, "merges"), "ignore_merges": cut == "llama-bpe"}
    return {
        "model": {**model, "byte_fallback": False, "fuse_unk": False},
        "pre_tokenizer": CUTS[cut],
        "normalizer": {"type": "NFC"} if cut == "qwen2" else None,
        "decoder": {**_BYTES, "use_regex": True},
        "post_processor": _begun(file, tokens, False),
    }


def _pieces(file: gguf.File, tokens: list[str], kinds: list[int]) -> dict[str, Any]:
    """SentencePiece's BPE, whose merges are the pairs that make a token, in the order of scores."""
    scores = file.metadata.get(f"{PREFIX}scores")
    if not isinstance(scores, np.ndarray) or len(scores) != len(tokens):
        raise LoadError("load", f"{file.path} has other scores than tokens", "Pass tokens.")
    known = {t: i for i, t in enumerate(tokens) if kinds[i] == NORMAL and len(t) <= LONGEST}
    order = sorted(known.values(), key=lambda i: -float(scores[i]))
    splits = ((tokens[i][:at], tokens[i][at:]) for i in order for at in range(1, len(tokens[i])))
    merges = [f"{a} {b}" for a, b in splits if a in known and b in known]
    model = {"merges": merges, "ignore_merges": False, "byte_fallback": True, "fuse_unk": True}
    if UNKNOWN in kinds:
        model["unk_token"] = tokens[kinds.index(UNKNOWN)]
    is_begun = file.metadata.get(f"{PREFIX}add_space_prefix", True) is not False
    steps = [*([_BEGUN] if is_begun else []), _SPACES]
    return {
        "model": model,
        "pre_tokenizer": None,
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "decoder": _joined(is_begun),
        "post_processor": _begun(file, tokens, True),
    }


READERS = {"gpt2": _byte_level, "llama": _pieces}
_BEGUN = {"type": "Prepend", "prepend": "▁"}
_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}


def _joined(is_begun: bool) -> dict[str, Any]:
    """Tokens become text: bytes are put together, and the first space goes."""
    spaces = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    parts: list[dict[str, Any]] = [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}]
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return {"type": "Sequence", "decoders": [*parts, *([strip] if is_begun else [])]}


def _texts(file: gguf.File, key: str) -> list[str]:
    found = file.metadata.get(f"{PREFIX}{key}")
    if isinstance(found, np.ndarray) and not found.size:  # a list of none is of no kind
        return []
    if isinstance(found, list) and all(isinstance(t, str) for t in found):
        return [str(t) for t in found]
    cause = f"{file.path} has no {PREFIX}{key}"
    raise LoadError("load", cause, "Pass tokens, not text.")


def _added(id_: int, content: str, is_special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": id_, "content": content, "special": is_special, **flags}


def _begun(file: gguf.File, tokens: Sequence[str], is_usual: bool) -> dict[str, Any] | None:
    """What puts the first token before a text, where the file says so or it is usual."""
    first = file.metadata.get(f"{PREFIX}bos_token_id")
    is_told = file.metadata.get(f"{PREFIX}add_bos_token", is_usual)
    if is_told is not True or not isinstance(first, int):
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
    kind = _kind(given)
    if kind is None:
        return none
    model = given["model"]
    names = {i: t for t, i in model["vocab"].items()}
    added = {t["id"]: t for t in given["added_tokens"]}
    names |= {i: t["content"] for i, t in added.items()}
    first = _first(given.get("post_processor"))
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    tokens = [names.get(i, f"[PAD{i}]") for i in range(size)]
    found = {**kind, "tokens": tokens, "add_bos_token": first is not None}
    found["token_type"] = np.array(
        [_type(i, names, added, model.get("unk_token")) for i in range(size)], np.int32
    )
    if first is not None:
        found["bos_token_id"] = first
    if kind["model"] == "gpt2":
        found["merges"] = merges
    else:
        found["scores"] = _scores(tokens, merges)
    return {f"{PREFIX}{key}": value for key, value in found.items()}


def _kind(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Which of the tokenizers that are read this is."""
    cut = next((n for n, c in CUTS.items() if _is_same(c, given.get("pre_tokenizer"))), None)
    if given["model"]["type"] != "BPE":
        return None
    if cut is not None:
        return {"model": "gpt2", "pre": cut}
    if given.get("pre_tokenizer") is None and given["model"].get("byte_fallback"):
        for is_begun in (True, False):
            steps = [*([_BEGUN] if is_begun else []), _SPACES]
            if _is_same({"type": "Sequence", "normalizers": steps}, given.get("normalizer")):
                return {"model": "llama", "pre": "default", "add_space_prefix": is_begun}
    return None


def _type(i: int, names: Mapping[int, str], added: Mapping[int, Any], unknown: object) -> int:
    if i not in names:
        return UNUSED
    if names[i] == unknown:
        return UNKNOWN
    if i in added:
        return CONTROL if added[i]["special"] else USER
    return BYTE if ONE_BYTE.fullmatch(names[i]) else NORMAL


def _scores(tokens: Sequence[str], merges: Sequence[str]) -> np.ndarray:
    """What orders merges: a token that is made earlier has more; letters are not made."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", "", 1), rank)
    return np.array([-ranks.get(t, len(merges)) for t in tokens], np.float32)


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
