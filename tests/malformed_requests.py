"""Requests that no service should answer, by name: over a thousand kinds.

They are for a service with a forward `predict` of x: float32[6], kind: int32[] below 5 and
flag: bool[2], and a language model of 32 tokens and a context of 24.
"""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Iterator
from typing import Any

from asgi_client import JSON, SAFETENSORS, Request, post

PREDICT, GENERATE = "/v1/forwards/predict", "/v1/generate"
GOOD: dict[str, Any] = {"x": [0.5, 1, -2.25, 3, 4e-3, 5], "kind": 3, "flag": [True, False]}
GOOD_BODY = json.dumps({"inputs": GOOD}).encode()
TEXT = {"prompt": [1, 2, 3], "max_new_tokens": 2}

Case = tuple[str, Request]

WRONG_VALUES: dict[str, Any] = {
    "null": None,
    "a string": "1",
    "an empty string": "",
    "a string of NaN": "NaN",
    "an object": {},
    "an object with a number": {"0": 1},
    "an empty list": [],
    "a list": [1],
    "nested lists": [[1]],
    "a list of null": [None],
    "deep lists": [[[[[[[[1]]]]]]]],
    "a long string": "9" * 5000,
    "a surrogate": "\ud800",
    "a zero byte": "\0",
}
NOT_FLOATS = {"true": True, "false": False, **WRONG_VALUES}
NOT_WHOLE = {
    "one and a half": 1.5,
    "a whole float": 3.0,
    "minus zero": -0.0,
    "2³¹": 2**31,
    "−2³¹ − 1": -(2**31) - 1,
    "2⁶³": 2**63,
    "2⁶⁴": 2**64,
    "10³⁰⁰": 10**300,
    "10⁴⁰⁰": 10**400,
    "beyond the table": 5,
    "negative": -1,
    **NOT_FLOATS,
}
NOT_FLAGS = {"zero": 0, "one": 1, "a half": 0.5, **WRONG_VALUES}

LITERALS = (
    "NaN nan NAN -NaN +NaN Infinity -Infinity +Infinity inf -inf Inf INF 1e400 -1e400 1e99999 3.5e38 -3.5e38 "
    "3.41e38 1e39 .5 5. 01 -01 +1 0x10 1_000 1e 1e+ --1 1.2.3 0b1 1f 1L 1j undefined None True False "
    'tru nul \'a\' "a /**/1 1//2 1;2 #1 @ $ \\u0031 ١ １ ½ ∞ − 1,,2 {} {1} {"a"} [1 1] (1) <1> !1 ~1'
).split()


def cases() -> list[Case]:
    """All of them, each name once."""
    families = (
        _syntax,
        _literals,
        _values,
        _shapes,
        _names,
        _encodings,
        _depths,
        _safetensors_lengths,
        _safetensors_headers,
        _safetensors_layouts,
        _types,
        _routes,
        _texts,
    )
    found: dict[str, Request] = {}
    for family in families:
        for name, request in family():
            full = f"{family.__name__[1:]}: {name}"
            assert full not in found, full
            found[full] = request
    return list(found.items())


def _json(body: bytes | str) -> Request:
    return post(PREDICT, body.encode() if isinstance(body, str) else body)


def _changed(**changes: Any) -> bytes:
    return json.dumps({"inputs": {**GOOD, **changes}}).encode()


def _syntax() -> Iterator[Case]:
    for length in range(len(GOOD_BODY)):
        yield f"cut at {length}", _json(GOOD_BODY[:length])
    for extra in (
        b"x",
        b"}",
        b"]",
        b",",
        b"{}",
        b"null",
        b"\0",
        b"\xff",
        GOOD_BODY,
        b" 1",
        b"//",
        b"\x1a",
    ):
        yield f"followed by {extra[:8]!r}", _json(GOOD_BODY + extra)
    for at in [i for i, byte in enumerate(GOOD_BODY) if chr(byte) in '{}[]:"']:
        without = GOOD_BODY[:at] + GOOD_BODY[at + 1 :]
        yield f"without {chr(GOOD_BODY[at])!r} at {at}", _json(without)
        yield f"a zero byte at {at}", _json(GOOD_BODY[:at] + b"\0" + GOOD_BODY[at + 1 :])
    for top in (
        "null",
        "true",
        "1",
        '"a"',
        "[]",
        "[{}]",
        "{}",
        '{"inputs": 1}',
        '{"inputs": null}',
    ):
        yield f"only {top}", _json(top)
    for top in (
        '{"inputs": []}',
        '{"inputs": {}}',
        '{"inputs": "x"}',
        '{"outputs": {}}',
        '{"Inputs": {}}',
    ):
        yield f"only {top}", _json(top)
    whole = GOOD_BODY.decode()
    for extra in ('"a": 1', '"inputs": {}', '"": {}', '"__proto__": {}', '"input": {}'):
        yield f"also {extra}", _json(f"{whole[:-1]}, {extra}}}")


def _literals() -> Iterator[Case]:
    text = GOOD_BODY.decode()
    for literal in LITERALS:
        yield f"{literal} among the floats", _json(text.replace("0.5", literal, 1))
        yield f"{literal} as the index", _json(text.replace('"kind": 3', f'"kind": {literal}', 1))
        yield f"{literal} among the flags", _json(text.replace("true", literal, 1))


def _values() -> Iterator[Case]:
    for what, value in NOT_FLOATS.items():
        yield f"x is {what}", _json(_changed(x=value))
        for at in (0, 3, 5):
            row = [*GOOD["x"]]
            row[at] = value
            yield f"x has {what} at {at}", _json(_changed(x=row))
    for what, value in NOT_WHOLE.items():
        yield f"kind is {what}", _json(_changed(kind=value))
    for what, value in NOT_FLAGS.items():
        yield f"flag is {what}", _json(_changed(flag=value))
        for at in (0, 1):
            row = [*GOOD["flag"]]
            row[at] = value
            yield f"flag has {what} at {at}", _json(_changed(flag=row))
    for digits in (310, 400, 1000, 4299, 4301, 10_000):
        text = GOOD_BODY.decode().replace("0.5", "9" * digits, 1)
        yield f"x has a number of {digits} digits", _json(text)
        yield (
            f"kind has {digits} digits",
            _json(_changed().decode().replace('"kind": 3', f'"kind": {"9" * digits}')),
        )
        yield (
            f"kind has −{digits} digits",
            _json(_changed().decode().replace('"kind": 3', f'"kind": -{"9" * digits}')),
        )


def _shapes() -> Iterator[Case]:
    for count in (0, 1, 2, 5, 7, 8, 100, 10_000):
        yield f"x has {count}", _json(_changed(x=[0.5] * count))
        yield f"x has {count} rows", _json(_changed(x=[GOOD["x"]] * count))
    for count in (0, 1, 3, 100):
        yield f"flag has {count}", _json(_changed(flag=[True] * count))
        yield f"kind has {count}", _json(_changed(kind=[3] * count))
    yield "x is a column", _json(_changed(x=[[v] for v in GOOD["x"]]))
    yield "x is two rows of three", _json(_changed(x=[GOOD["x"][:3], GOOD["x"][3:]]))
    yield "x is uneven", _json(_changed(x=[0.5, [1, 2], 3, 4, 5, 6]))
    yield "x is uneven at the end", _json(_changed(x=[0.5, 1, 2, 3, 4, []]))
    yield "flag is uneven", _json(_changed(flag=[[True], False]))


def _names() -> Iterator[Case]:
    for name in GOOD:
        yield (
            f"without {name}",
            _json(json.dumps({"inputs": {n: v for n, v in GOOD.items() if n != name}})),
        )
        twice = json.dumps({"inputs": GOOD})[:-2] + f', "{name}": {json.dumps(GOOD[name])}}}}}'
        yield f"{name} twice", _json(twice)
        for other in (
            name.upper(),
            f" {name}",
            f"{name} ",
            f"{name}\0",
            f"batch:{name}",
            f"inputs.{name}",
        ):
            renamed = {other if n == name else n: v for n, v in GOOD.items()}
            yield f"{other!r} for {name}", _json(json.dumps({"inputs": renamed}))
    for other in ("y", "", "__class__", "x.0", "\ud800", "a" * 10_000, "∂", "../x", "%s", "{0}"):
        yield f"also {other[:20]!r}", _json(_changed(**{other: 1}))
    many = {f"n{i}": i for i in range(2000)}
    yield "also 2000 others", _json(_changed(**many))
    escaped = GOOD_BODY.decode()[:-2] + ', "\\u0078": [1]}}'
    yield "x twice, once escaped", _json(escaped)


def _encodings() -> Iterator[Case]:
    text = GOOD_BODY.decode()
    for coding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-7", "utf-8-sig"):
        if coding != "utf-7":  # which leaves most of ASCII as it is
            yield coding, _json(text.encode(coding))
    named = text.replace('"x"', '"ü"')
    for coding in ("latin-1", "cp1252", "cp037", "mac-roman"):
        yield coding, _json(named.encode(coding))
    for name, wrong in {
        "a lone continuation": b"\x80",
        "an overlong slash": b"\xc0\xaf",
        "an overlong zero": b"\xc0\x80",
        "an encoded surrogate": b"\xed\xa0\x80",
        "beyond Unicode": b"\xf4\x90\x80\x80",
        "five bytes": b"\xf8\x88\x80\x80\x80",
        "half a character": b"\xe2\x82",
        "all ones": b"\xff\xff",
    }.items():
        yield f"{name} in a name", _json(GOOD_BODY.replace(b'"x"', b'"' + wrong + b'"'))
        yield f"{name} before", _json(wrong + GOOD_BODY)
        yield f"{name} behind", _json(GOOD_BODY + wrong)
    for byte in range(32):
        if byte not in (9, 10, 13):
            yield (
                f"control {byte} in a name",
                _json(GOOD_BODY.replace(b'"x"', b'"x' + bytes([byte]) + b'"')),
            )
            yield (
                f"control {byte} between",
                _json(GOOD_BODY.replace(b": ", b":" + bytes([byte]), 1)),
            )


def _depths() -> Iterator[Case]:
    for depth in (7, 50, 500, 990, 1000, 1010, 5000, 100_000, 1_000_000):
        yield f"lists {depth} deep", _json("[" * depth + "]" * depth)
        yield f"lists {depth} deep, never closed", _json("[" * depth)
        yield (
            f"x is {depth} deep",
            _json('{"inputs": {"kind": 3, "x": ' + "[" * depth + "]" * depth + "}}"),
        )
        yield f"objects {depth} deep", _json('{"a":' * depth + "1" + "}" * depth)
        yield f"objects {depth} deep, never closed", _json('{"inputs":' * depth)
    for depth in range(800, 1001, 4):  # around what Python's stack holds
        deep = "[" * depth + "]" * depth
        yield f"the body {depth} deep", _json(deep)
        yield f"inputs {depth} deep", _json(f'{{"inputs": {deep}}}')
        yield f"x {depth} deep", _json(GOOD_BODY.decode().replace("0.5", deep, 1))
        for name in ("prompt", "top_p", "seed", "stop_strings", "stream", "else"):
            whole = json.dumps(TEXT)[:-1] + f', "{name}": {deep}}}'
            text = whole.replace('"prompt": [1, 2, 3], ', "") if name == "prompt" else whole
            yield f"{name} {depth} deep", post(GENERATE, text.encode())
        entry = json.dumps({**HEADER, "x": 0}).replace('"x": 0', f'"x": {deep}')
        yield f"a header {depth} deep", _file(entry.encode(), DATA)


def _file(header: bytes | dict[str, Any], data: bytes, length: int | None = None) -> Request:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    return post(PREDICT, struct.pack("<Q", size) + text + data, SAFETENSORS)


HEADER: dict[str, Any] = {
    "x": {"dtype": "F32", "shape": [6], "data_offsets": [0, 24]},
    "kind": {"dtype": "I32", "shape": [], "data_offsets": [24, 28]},
    "flag": {"dtype": "BOOL", "shape": [2], "data_offsets": [28, 30]},
}
DATA = struct.pack("<6fi2?", *GOOD["x"], GOOD["kind"], *GOOD["flag"])


def good_file() -> Request:
    return _file(HEADER, DATA)


def _safetensors_lengths() -> Iterator[Case]:
    whole = good_file().body
    for length in range(0, len(whole), 2):
        yield f"cut at {length}", post(PREDICT, whole[:length], SAFETENSORS)
    for extra in (b"\0", b"\0" * 8, whole):
        yield f"{len(extra)} bytes more", post(PREDICT, whole + extra, SAFETENSORS)
    text = json.dumps(HEADER).encode()
    for length in (
        0,
        1,
        2,
        len(text) - 1,
        len(text) + 1,
        2**16 + 1,
        2**31,
        2**32,
        2**53,
        2**63,
        2**64 - 1,
    ):
        yield f"a header of {length}", _file(text, DATA, length)
    yield "a long header", _file(json.dumps(HEADER).encode() + b" " * 70_000, DATA)
    yield "JSON sent as safetensors", post(PREDICT, GOOD_BODY, SAFETENSORS)
    yield "safetensors sent as JSON", post(PREDICT, whole, JSON)
    yield "zeros", post(PREDICT, bytes(100), SAFETENSORS)
    yield "ones", post(PREDICT, b"\xff" * 100, SAFETENSORS)
    for magic in (b"\x80\x04\x95", b"PK\x03\x04", b"\x93NUMPY", b"GGUF", b"\x89HDF", b"\x1f\x8b"):
        yield f"{magic!r}", post(PREDICT, magic + bytes(60), SAFETENSORS)


def _with(name: str, **changes: Any) -> Request:
    header = copy.deepcopy(HEADER)
    header[name] |= changes
    return _file(header, DATA)


def _safetensors_headers() -> Iterator[Case]:
    shapes: list[Any] = [
        None,
        1,
        "6",
        {},
        [6.0],
        ["6"],
        [True],
        [6, 1],
        [1, 6],
        [7],
        [-6],
        [2**64],
        [[6]],
        [None],
        [0],
    ]
    offsets: list[Any] = [
        None,
        1,
        "0,24",
        [],
        [0],
        [0, 24, 24],
        [24, 0],
        [-1, 24],
        [0, 25],
        [0, 2**63],
        [2**64, 2**65],
    ]
    offsets += [
        [0.0, 24.0],
        ["0", "24"],
        [True, 24],
        {},
        [[0], [24]],
        [None, None],
        [1, 25],
        [40, 64],
    ]
    codes: list[Any] = [
        None,
        1,
        "",
        "f32",
        "F33",
        "float32",
        "F8_E4M3",
        "I16",
        "U16",
        "U64",
        "C64",
        ["F32"],
        {},
        "\0",
    ]
    wrong = {"x": ["I32", "BOOL", "U8"], "kind": ["F32", "BOOL"], "flag": ["U8", "I8", "F32"]}
    for name in HEADER:
        for shape in shapes:
            if shape != HEADER[name]["shape"]:
                yield f"{name} of the shape {shape}", _with(name, shape=shape)
        for given in offsets:
            if given != HEADER[name]["data_offsets"]:
                yield f"{name} at {given}", _with(name, data_offsets=given)
        for code in [*codes, *wrong[name]]:
            yield f"{name} of the dtype {code!r}", _with(name, dtype=code)
        for value in (None, 1, "F32", [], {}, [HEADER[name]], {**HEADER[name], "more": 1}):
            yield f"{name} is {value!r}", _file({**HEADER, name: value}, DATA)
        for key in HEADER[name]:
            part = {k: v for k, v in HEADER[name].items() if k != key}
            yield f"{name} without {key}", _file({**HEADER, name: part}, DATA)
        yield f"without {name}", _file({n: e for n, e in HEADER.items() if n != name}, DATA)
        twice = json.dumps(HEADER)[:-1] + f', "{name}": {json.dumps(HEADER[name])}}}'
        yield f"{name} twice", _file(twice.encode(), DATA)
    for other in ("y", "", "__meta__", "x\0"):
        yield f"also {other!r}", _file({**HEADER, other: HEADER["x"]}, DATA)
    for top in (
        b"null",
        b"[]",
        b"1",
        b'"a"',
        b"{",
        b"",
        b"{}",
        b"\xff\xfe",
        b"{NaN: 1}",
        b"[" * 60_000,
    ):
        yield f"the header {top[:10]!r}", _file(top, DATA)


def _safetensors_layouts() -> Iterator[Case]:
    yield (
        "all at the start",
        _file(
            {
                n: {**e, "data_offsets": [0, e["data_offsets"][1] - e["data_offsets"][0]]}
                for n, e in HEADER.items()
            },
            DATA,
        ),
    )
    shifted = {
        n: {**e, "data_offsets": [v + 4 for v in e["data_offsets"]]} for n, e in HEADER.items()
    }
    yield "a gap before", _file(shifted, bytes(4) + DATA)
    gap = copy.deepcopy(HEADER)
    gap["flag"]["data_offsets"] = [32, 34]
    yield "a gap between", _file(gap, DATA[:28] + bytes(4) + DATA[28:])
    for byte in (2, 3, 127, 128, 255):
        yield f"a flag of {byte}", _file(HEADER, DATA[:28] + bytes([byte, 0]))
    for index in (5, 6, 100, -1, -5, 2**31 - 1, -(2**31)):
        yield f"the index {index}", _file(HEADER, DATA[:24] + struct.pack("<i", index) + DATA[28:])
    wide = copy.deepcopy(HEADER)
    wide["kind"] = {"dtype": "I64", "shape": [], "data_offsets": [24, 32]}
    wide["flag"]["data_offsets"] = [32, 34]
    for index in (2**31, -(2**31) - 1, 2**63 - 1, 2**32 + 3):
        yield (
            f"the wide index {index}",
            _file(wide, DATA[:24] + struct.pack("<q", index) + DATA[28:]),
        )
    double = {
        "x": {"dtype": "F64", "shape": [6], "data_offsets": [0, 48]},
        "kind": {"dtype": "I32", "shape": [], "data_offsets": [48, 52]},
        "flag": {"dtype": "BOOL", "shape": [2], "data_offsets": [52, 54]},
    }
    for value in (1e39, -1e39, 1e308):
        yield (
            f"the double {value}",
            _file(double, struct.pack("<6d", value, 0, 0, 0, 0, 0) + DATA[24:]),
        )


def _types() -> Iterator[Case]:
    kinds = (
        "text/plain text/html application/xml application/x-www-form-urlencoded multipart/form-data image/png "
        "application/octet-stream application/jsonx application/json2 json safetensors application/vnd.api+json "
        "application/ld+json application/pickle application/x-pickle application/x-python-pickle application/msgpack "
        "application/x-ndjson application/cbor application/protobuf application application/ /json */* text/json"
    ).split()
    for kind in (
        *kinds,
        "",
        " ",
        "application/json; charset=latin-1",
        "application/json; charset=utf-16",
        "ü",
        "\0",
    ):
        yield f"content of {kind!r}", post(PREDICT, GOOD_BODY, kind)
        yield f"a text's content of {kind!r}", post(GENERATE, TEXT, kind)
    yield "no content type", Request("POST", PREDICT, (), GOOD_BODY)
    yield "a text as safetensors", post(GENERATE, TEXT, SAFETENSORS)
    for coding in ("gzip", "deflate", "br", "zstd", "compress", "gzip, gzip", "x", ""):
        yield f"encoded as {coding!r}", post(PREDICT, GOOD_BODY, content_encoding=coding)
    for accepted in (
        "text/html",
        "image/*",
        "application/xml",
        "text/*",
        "application/pickle",
        "json",
        "x",
        "a/b, c/d",
    ):
        yield f"an answer of {accepted!r}", post(PREDICT, GOOD_BODY, accept=accepted)
    for host in (
        "example.com",
        "",
        "localhost.example.com",
        "127.0.0.1@example.com",
        "0.0.0.0",
        "[::]",
        "::1",
        "127.1",
    ):
        yield f"the host {host!r}", post(PREDICT, GOOD_BODY, host=host)


def _routes() -> Iterator[Case]:
    headers = (("content-type", JSON),)
    for path in (
        "/ /v1/ /v1/forwards /v1/forwards/ /v1/forwards/none /v1/forwards/predict/ /v1/forwards/predict/x /v1/predict "
        "/v2 /v1/forwards/Predict /v1/forwards/predict%00 /v1/forwards/../predict /v1/forwards/%2e%2e //v1 /v1//forwards "
        "/admin /.env /etc/passwd /../../etc/passwd /%2e%2e/ /index.html /favicon.ico /health/ /metrics/ /ready/x "
        "/v1/generate/ /v1/generate/x /docs /openapi.json /v1/forwards/__class__ /v1/forwards/{name} /v1/forwards/ü "
        "/v1/forwards/predict;x /V1 /HEALTH //[ /[ //]x[ //[::1 /v1/forwards/[ //a:b@c:d/ /\\ /v1\\ //%5b"
    ).split():
        yield f"POST {path}", Request("POST", path, headers, GOOD_BODY)
        yield f"GET {path}", Request("GET", path)
    for (
        method
    ) in "PUT DELETE PATCH OPTIONS TRACE CONNECT PROPFIND MKCOL LOCK SEARCH FOO get post".split():
        for path in ("/health", "/ready", "/metrics", "/v1", PREDICT, GENERATE):
            yield f"{method} {path}", Request(method, path, headers, GOOD_BODY)
    for path in (PREDICT, GENERATE):
        yield f"GET {path}", Request("GET", path)
        yield f"HEAD {path}", Request("HEAD", path)
    for path in ("/health", "/ready", "/metrics", "/v1"):
        yield f"POST {path}", Request("POST", path, headers, GOOD_BODY)
    yield "a long path", Request("POST", "/v1/forwards/" + "a" * 60_000, headers, GOOD_BODY)


def _texts() -> Iterator[Case]:
    def text(**changes: Any) -> Request:
        return post(GENERATE, {**TEXT, **changes})

    values = {
        **WRONG_VALUES,
        "true": True,
        "a half": 0.5,
        "10⁴⁰⁰": 10**400,
        "−1": -1,
        "1e308": 1e308,
        "2⁶⁴": 2**64,
    }
    may_be_null = {"null"}
    fine = {
        "prompt": {"a list", "nothing"},
        "max_new_tokens": set[str](),
        "stream": {"true"},
        "temperature": {*may_be_null, "a half"},
        "top_k": may_be_null,
        "top_p": may_be_null,
        "min_p": may_be_null,
        "repetition_penalty": {*may_be_null, "a half"},
        "seed": {*may_be_null, "−1"},
        "stop_strings": {*may_be_null, "an empty list"},
    }
    for name, allowed in fine.items():
        for what, value in values.items():
            if what not in allowed:
                yield f"{name} is {what}", text(**{name: value})
    for token in (32, 33, 1000, 2**31, 2**63, 2**64, 10**30, -1, -32):
        yield f"the token {token}", text(prompt=[1, token])
    for prompt in (
        [1.0],
        [True],
        ["a"],
        [None],
        [[1]],
        [1, "a"],
        [1, 2.5],
        {"a": 1},
        [{}],
        "Once upon",
    ):
        yield f"the prompt {prompt!r}", text(prompt=prompt)
    for new in (0, -5, 24, 25, 1000, 2**31, 1.5, "5", [5]):
        yield f"{new!r} new tokens", text(max_new_tokens=new)
    for length in (22, 23, 24, 25, 100, 5000):
        yield f"a prompt of {length}", text(prompt=[1] * length, max_new_tokens=3)
    for temperature in (-0.5, 1e-9, 5e-324, 101, 1e39, "hot", [1]):
        yield f"the temperature {temperature!r}", text(temperature=temperature)
    for penalty in (0, -1, 1e-9, 1e9):
        yield f"the penalty {penalty!r}", text(repetition_penalty=penalty)
    for name, value in (
        ("top_k", 0),
        ("top_p", 1.5),
        ("top_p", -0.1),
        ("min_p", 2),
        ("top_k", 2.0),
    ):
        yield f"{name} = {value!r} with a temperature", text(**{name: value}, temperature=1.0)
    yield "top_k without a temperature", text(top_k=3)
    for stops in ([""], [1], [None], ["a"], "a", ["a"] * 17, [["a"]]):
        yield f"the stops {stops!r}", text(stop_strings=stops)
    for other in (
        "num_beams",
        "share",
        "on_token",
        "use_cache",
        "eos_token_id",
        "messages",
        "",
        "Prompt",
        "n",
    ):
        yield f"the field {other!r}", text(**{other: 1})
    yield "no prompt", post(GENERATE, {"max_new_tokens": 2})
    whole = json.dumps(TEXT).encode()
    for length in range(len(whole)):
        yield f"cut at {length}", post(GENERATE, whole[:length])
    yield "the prompt twice", post(GENERATE, whole[:-1] + b', "prompt": [1]}')
    for top in (b"null", b"[]", b"1", b"[" * 100_000, b"\xff", b'{"prompt": NaN}'):
        yield f"only {top[:12]!r}", post(GENERATE, top)
