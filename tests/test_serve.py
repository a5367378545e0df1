"""`treadle serve`: answers, batches, limits, access, metrics, the command, and its end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
import pytest

import treadle as td
from treadle import losses, models, nn, optim
from treadle.base.dtypes import BY_NAME
from treadle.cli.main import main
from treadle.cli.train import load_function

pytest.importorskip("starlette", reason="starlette is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is not installed")

from safetensors.numpy import load, save

from asgi_client import JSON, SAFETENSORS, Client, Request, post, scope_of
from treadle import serve
from treadle.models.decoding import bucket, slots_for
from treadle.serve.access import is_loopback, read_token
from treadle.serve.batching import Batcher
from treadle.serve.budget import Reserved, json_bytes
from treadle.serve.encoding import Named, _once, decode, read_object
from treadle.serve.metrics import Histogram
from treadle.serve.request_error import RequestError
from treadle.serve.served import Served

TOKEN = "0123456789abcdef0123"
SIZE = 4


class Net(nn.Module):
    def __init__(self) -> None:
        self.first, self.kinds, self.second = (
            nn.Linear(6, 16),
            nn.Embedding(5, 16),
            nn.Linear(16, 3),
        )

    def forward(self, x, kind):
        return td.softmax(self.second(td.tanh(self.first(x)) + self.kinds(kind)))


def predict(model, batch):
    return {"p": model(batch["x"], batch["kind"]), "flipped": td.logical_not(batch["flag"])}


SPECS = {"x": td.Spec((6,)), "kind": td.Spec((), td.int32), "flag": td.Spec((2,), td.bool_)}


def service(limits: serve.Limits | None = None) -> serve.Service:
    forward = td.compile_forward(Net(), predict, SPECS, device="cpu")
    return serve.Service({"predict": forward}, None, limits or serve.Limits(batch=SIZE))


@pytest.fixture(scope="module")
def client():
    with Client(serve.application(service())) as found:
        yield found


def drawn(seed: int) -> dict[str, np.ndarray]:
    source = np.random.default_rng(seed)
    return {
        "x": source.normal(size=6).astype(np.float32),
        "kind": np.array(source.integers(0, 5), np.int32),
        "flag": source.integers(0, 2, 2).astype(bool),
    }


def as_json(arrays: dict[str, np.ndarray]) -> bytes:
    return json.dumps({"inputs": {n: a.tolist() for n, a in arrays.items()}}).encode()


PREDICT = "/v1/forwards/predict"


def test_an_answer_is_what_the_forward_gives(client) -> None:
    forward = td.compile_forward(Net(), predict, SPECS, device="cpu")
    expected = forward(drawn(0))
    found = client.send(post(PREDICT, as_json(drawn(0)))).json["outputs"]
    np.testing.assert_allclose(found["p"], expected["p"], rtol=1e-5)
    assert found["flipped"] == expected["flipped"].tolist()


def bodies(size: int) -> dict[str, bytes]:
    """JSON that becomes as much as it can: small values, many lists and dicts, wide characters."""
    many = {
        "zeros": b"0,",
        "floats": b"0.5,",
        "integers": b"123456,",
        "lists": b"[],",
        "lists of one": b"[7],",
        "dicts": b"{},",
        "dicts of one": b'{"a":1},',
        "dicts of two": b'{"a":1,"b":[]},',
        "strings": b'"ab",',
        "wide strings": '"\N{GRINNING FACE}a",'.encode(),
        "escapes": b'"\\ud83d\\ude00 and some text",',
        "long integers": b"9" * 4000 + b",",
    }
    found = {n: b'{"x":[' + p * (size // len(p)) + p[:-1] + b"]}" for n, p in many.items()}
    text = b"some text " * (size // 10)
    found |= {"text": b'{"x":"' + text + b'"}', "wide text": b'{"x":"\\ud83d\\ude00' + text + b'"}'}
    found["nested"] = b'{"x":' + b"[" * 500 + b"]" * 500 + b"}"
    return found


@pytest.mark.parametrize("name", bodies(1))
def test_parsed_json_takes_no_more_than_is_set_aside(name: str) -> None:
    """Of bodies that others would send; and a bound that is not far from what plain numbers take."""
    body = bodies(200_000)[name]
    tracemalloc.start()
    found = read_object("test", body)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert set(found) == {"x"}
    assert peak <= json_bytes(body) + 4096
    if name == "floats":
        assert json_bytes(body) < 3 * peak


def test_requests_share_a_bounded_memory() -> None:
    """One that takes too much by itself is refused, and those together that do are sent back."""
    limits = serve.Limits(batch=SIZE, request_bytes=200_000)
    own = service(limits)
    with Client(serve.application(own)) as small:
        assert small.send(post(PREDICT, as_json(drawn(0)))).status == 200
        assert own.budget.taken == 0
        large = b'{"inputs": {"x": [' + b"[]," * 5000 + b"[]]}}"  # 15 kB that become some 700
        answer = small.send(post(PREDICT, large))
        assert (answer.status, answer.json["error"]["values"]["most"]) == (413, 200_000)
        body = as_json(drawn(0))
        other = Reserved(own.budget)
        other.hold("test", 200_000 - len(body))
        answer = small.send(post(PREDICT, body))
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert "bytes already" in answer.json["error"]["cause"]
        other.release()
        assert small.send(post(PREDICT, body)).status == 200
        wrong = small.send(post(PREDICT, b'{"inputs": {"x": 1}}'))
        assert (wrong.status, own.budget.taken) == (422, 0)
        assert "treadle_request_bytes" in small.send(Request("GET", "/metrics")).body.decode()


def test_an_error_names_no_line_of_the_service(client) -> None:
    answer = client.send(post(PREDICT, as_json({**drawn(0), "kind": np.array(5)})))
    assert answer.status == 422
    assert answer.json["error"] == {
        "operation": "predict",
        "values": {},
        "cause": "kind is 5, and embedding has 5 rows",
        "remedy": "Count from 0 to 4.",
    }


def test_json_and_safetensors_carry_the_same_bits(client) -> None:
    binary = client.send(post(PREDICT, save(drawn(1)), SAFETENSORS))
    assert binary.headers["content-type"] == SAFETENSORS
    arrays = load(binary.body)
    plain = client.send(post(PREDICT, as_json(drawn(1)))).json["outputs"]
    assert arrays["p"].tobytes() == np.array(plain["p"], np.float32).tobytes()
    mixed = client.send(post(PREDICT, as_json(drawn(1)), accept=SAFETENSORS))
    assert mixed.body == binary.body
    assert (
        client.send(post(PREDICT, save(drawn(1)), SAFETENSORS, accept=JSON)).json["outputs"]
        == plain
    )


def test_together_is_bitwise_as_alone(client) -> None:
    """The program is the same, so that neither neighbours nor places nor padding are seen."""
    requests = [post(PREDICT, save(drawn(i)), SAFETENSORS) for i in range(11)]
    alone = [client.send(r).body for r in requests]
    for order in (range(11), reversed(range(11)), (3, 3, 3, 0, 10)):
        order = list(order)
        together = client.together(requests[i] for i in order)
        assert [a.body for a in together] == [alone[i] for i in order]


def test_requests_share_calls() -> None:
    with Client(serve.application(service(serve.Limits(batch=SIZE, wait_ms=200)))) as client:
        answers = client.together(post(PREDICT, as_json(drawn(i))) for i in range(2 * SIZE))
        assert {a.status for a in answers} == {200}
        text = client.get("/metrics").body.decode()
        assert 'treadle_forward_calls_total{forward="predict"} 2' in text
        assert f'treadle_forward_requests_total{{forward="predict"}} {2 * SIZE}' in text
        assert 'treadle_requests_total{route="forward",status="200"} 8' in text
        assert "treadle_ready 1" in text


def test_no_request_compiles(monkeypatch) -> None:
    found = service()
    found.prepare()

    def build(*_: object) -> None:
        raise AssertionError("something is compiled")

    monkeypatch.setattr("treadle.step.forward.build_forward", build)
    with Client(serve.application(found)) as client:
        answers = client.together(post(PREDICT, as_json(drawn(i))) for i in range(5))
        assert {a.status for a in answers} == {200}


def test_large_arrays_are_read_and_written_aside() -> None:
    program = td.compile_forward({}, lambda m, x: x * 2, td.Spec((200, 300)), device="oracle")
    x = np.random.default_rng(0).normal(size=(200, 300)).astype(np.float32)
    with Client(serve.application(serve.Service({"double": program}))) as client:
        for kind, body in ((JSON, as_json({"input": x})), (SAFETENSORS, save({"input": x}))):
            answer = client.send(post("/v1/forwards/double", body, kind, accept=SAFETENSORS))
            np.testing.assert_array_equal(load(answer.body)["output"], 2 * x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        self.lstm, self.head = nn.LSTM(5, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0][-1])


class Images(nn.Module):
    def __init__(self) -> None:
        self.conv, self.norm, self.head = nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.Linear(96, 4)

    def forward(self, x):
        return self.head(td.relu(self.norm(self.conv(x))).flatten(1))


LLAMA = models.LlamaConfig(
    vocab_size=50,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
NETS = {
    "mlp": (lambda: models.MLP([30, 17, 5]), td.Spec((1, 30))),
    "images": (Images, td.Spec((1, 2, 6, 6))),
    "recurrent": (Recurrent, td.Spec((7, 1, 5))),
    "llama": (lambda: models.Llama(LLAMA), td.Spec((1, 9), td.int32)),
}


@pytest.mark.slow
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("size", [2, 3, 7, 8, 16, 17])
def test_places_do_not_matter(net, size) -> None:
    """Bitwise the same beside any others, near what the forward gives by itself."""
    make, spec = NETS[net]
    forward = td.compile_forward(make(), lambda m, x: m(x), spec, device="cpu")
    served = Served("net", forward)
    served.prepare(size)
    assert served.batch == size, served.alone
    rows = [served._drawn(100 + i) for i in range(size)]
    alone = [served.run([row])[0]["output"] for row in rows]
    for count in range(1, size + 1):
        for shift in (0, count // 2):
            order = np.roll(np.arange(count), shift)
            found = served.run([rows[i] for i in order])
            for i, answer in zip(order, found, strict=True):
                assert answer["output"].tobytes() == alone[i].tobytes()
    for row, answer in zip(rows, alone, strict=True):
        np.testing.assert_allclose(answer, forward(row["input"]), rtol=1e-4, atol=1e-5)


def test_values_of_a_step_are_served_as_they_are() -> None:
    spec = {"x": td.Spec((8, 3)), "y": td.Spec((8, 2))}
    step = td.compile_step(
        nn.Linear(3, 2),
        lambda m, b: losses.mse(m(b["x"]), b["y"]),
        optim.sgd(0.1),
        spec,
        device="cpu",
    )
    forward = step.attach(lambda m, x: m(x), td.Spec((3,)))
    one = post("/v1/forwards/line", {"inputs": {"input": [1.0, 2.0, 3.0]}})
    with Client(serve.application(serve.Service({"line": forward}))) as client:
        before = client.send(one).json["outputs"]["output"]
        step({"x": np.ones((8, 3), np.float32), "y": np.zeros((8, 2), np.float32)})
        after = client.send(one).json["outputs"]["output"]
    np.testing.assert_allclose(after, forward(np.array([1, 2, 3], np.float32)), rtol=1e-5)
    assert before != after


def test_what_is_not_finite_has_names_in_json() -> None:
    program = td.compile_forward({}, lambda m, x: td.log(x), td.Spec((3,)), device="cpu")
    with Client(serve.application(serve.Service({"log": program}))) as client:
        found = client.send(post("/v1/forwards/log", {"inputs": {"input": [-1.0, 0.0, 1.0]}}))
        assert found.json == {"outputs": {"output": ["NaN", "-Infinity", 0.0]}}
        nan = save({"input": np.array([np.nan, np.inf, 1], np.float32)})
        answer = load(client.send(post("/v1/forwards/log", nan, SAFETENSORS)).body)["output"]
        np.testing.assert_array_equal(answer, np.array([np.nan, np.inf, 0], np.float32))


EDGES = {
    "float64": [1e308, -5e-324, 0.1],
    "float32": [3.4028235e38, 1e-45, -0.1],
    "bfloat16": [3.3895314e38, 1.0, -0.0078125],
    "float16": [65504.0, 6e-8, -0.5],
    "int64": [2**63 - 1, -(2**63), 0],
    "int32": [2**31 - 1, -(2**31), 0],
    "uint32": [2**32 - 1, 0, 1],
    "int8": [127, -128, 0],
    "uint8": [255, 0, 1],
    "bool": [True, False, True],
}


def test_every_dtype_comes_back_as_it_went() -> None:
    specs = {name: td.Spec((3,), BY_NAME[name]) for name in EDGES}
    same = td.compile_forward({}, lambda m, b: b, specs, device="cpu")
    arrays = {n: np.array(v).astype(BY_NAME[n].numpy) for n, v in EDGES.items()}
    with Client(serve.application(serve.Service({"same": same}))) as client:
        binary = client.send(post("/v1/forwards/same", save(arrays), SAFETENSORS))
        named = [Named(n, t) for n, t in specs.items()]
        for name, array in decode("same", SAFETENSORS, binary.body, named).items():
            assert array.tobytes() == arrays[name].tobytes(), name
        plain = client.send(post("/v1/forwards/same", {"inputs": EDGES})).json["outputs"]
        for name, values in plain.items():
            assert np.array(values).astype(arrays[name].dtype).tobytes() == arrays[name].tobytes()


def test_nested_inputs_have_dotted_names() -> None:
    def nested(model, batch):
        return {"a": [batch["q"][0] + 1, None], "b": (batch["q"][1]["z"],)}

    specs = {"q": [td.Spec(()), {"z": td.Spec((0, 3))}]}
    forward = td.compile_forward({}, nested, specs, device="oracle")
    with Client(serve.application(serve.Service({"nested": forward}))) as client:
        answer = client.send(post("/v1/forwards/nested", {"inputs": {"q.0": 1, "q.1.z": []}}))
        assert answer.json == {"outputs": {"a.0": 2.0, "b.0": []}}


def test_a_forward_with_draws_answers_one_at_a_time() -> None:
    def noisy(model, x):
        return x + td.random.normal((2,))

    found = serve.Service({"noisy": td.compile_forward({}, noisy, td.Spec((2,)), device="cpu")})
    lines: list[str] = []
    found.prepare(lines.append)
    assert found.forwards["noisy"].batch == 1
    assert "1 a call (it draws random numbers" in lines[-1]
    with Client(serve.application(found)) as client:
        one = post("/v1/forwards/noisy", {"inputs": {"input": [0.0, 0.0]}})
        first, second = client.together([one, one])
        assert first.body != second.body


def test_what_is_not_exact_together_is_answered_alone(monkeypatch) -> None:
    """A program whose bits depend on places, and one that `vmap` cannot have."""
    forward = td.compile_forward({}, lambda m, x: x * 2, td.Spec((2,)), device="oracle")
    served = Served("double", forward)
    several = forward.batched(SIZE)

    def moved(batches):
        """As if lanes rounded otherwise: each place has bits of its own."""
        return several(batches) + np.arange(SIZE)[:, None] * 1e-12

    monkeypatch.setattr(forward, "batched", lambda size: moved)
    served.prepare(SIZE)
    assert (served.batch, served.alone) == (
        1,
        "its bits would depend on the place of a request among others",
    )
    row = {"input": np.array([1, 2], np.float32)}
    assert [r["output"].tolist() for r in served.run([row] * 3)] == [[2, 4]] * 3

    def refused(size):
        raise td.TraceError("vmap", "there is no rule", "")

    monkeypatch.setattr(forward, "batched", refused)
    served.prepare(SIZE)
    assert (served.batch, served.alone) == (
        1,
        "it cannot be compiled for several: there is no rule",
    )


def test_a_forward_that_changes_its_model_is_refused() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            self.seen = nn.State((), nn.init.zeros)

        def forward(self, x):
            td.update(self.seen, self.seen.tensor() + 1)
            return x + self.seen.tensor()

    forward = td.compile_forward(Counter(), lambda m, x: m(x), td.Spec((2,)), device="oracle")
    with pytest.raises(td.ArgumentError, match="calls of count change seen"):
        serve.Service({"count": forward})


def test_batched_is_the_forward_under_vmap() -> None:
    forward = td.compile_forward(Net(), predict, SPECS, device="oracle")
    rows = [drawn(i) for i in range(3)]
    found = forward.batched(3)({n: np.stack([r[n] for r in rows]) for n in SPECS})
    for i, row in enumerate(rows):
        np.testing.assert_allclose(found["p"][i], forward(row)["p"], rtol=1e-12)
    forward.check(rows[0])
    with pytest.raises(td.IndexRangeError, match="kind is 5"):
        forward.check({**rows[0], "kind": np.array(5, np.int32)})
    with pytest.raises(td.ArgumentError, match="size = 0"):
        forward.batched(0)


@pytest.mark.parametrize(
    ("forwards", "match"),
    [
        ({}, "nothing to serve"),
        ({"a b": None}, "a forward is called 'a b'"),
        ({"": None}, "a forward is called ''"),
        ({"x": lambda: 0}, "x is a function, not a forward"),
    ],
)
def test_what_cannot_be_served(forwards, match) -> None:
    with pytest.raises(td.ArgumentError, match=match):
        serve.Service(forwards)


def test_limits_are_checked() -> None:
    for wrong in ({"batch": 0}, {"wait_ms": -1}, {"queue": 1.5}, {"answer_seconds": 0}):
        with pytest.raises(td.ArgumentError, match=next(iter(wrong))):
            serve.Limits(**wrong)


# Limits and access.


def test_large_and_slow_bodies() -> None:
    limits = serve.Limits(batch=1, body_bytes=1000, body_seconds=0.05)
    with Client(serve.application(service(limits))) as client:
        large = post(PREDICT, b"[" * 2000)
        assert client.send(large).status == 413
        announced = Request("POST", PREDICT, (*large.headers, ("content-length", "1001")))
        assert client.send(announced).status == 413
        slow = Request("POST", PREDICT, large.headers, parts=(b"{", b"}"), pause=0.04)
        answer = client.send(slow)
        assert answer.status == 408
        assert answer.headers["connection"] == "close"
        assert client.send(post(PREDICT, as_json(drawn(0)))).status == 200


def test_a_full_queue_refuses_and_goes_on() -> None:
    found = service(serve.Limits(batch=1, queue=2))
    found.prepare()
    run = found.forwards["predict"].run

    def slow(rows):
        time.sleep(0.2)  # the others have come by then
        return run(rows)

    found.forwards["predict"].run = slow  # type: ignore[method-assign]
    with Client(serve.application(found)) as client:
        answers = client.together(post(PREDICT, as_json(drawn(i))) for i in range(8))
        assert sorted({a.status for a in answers}) == [200, 503]
        refused = next(a for a in answers if a.status == 503)
        assert refused.headers["retry-after"] == "1"
        assert refused.json["error"]["values"] == {"waiting": 2, "most": 2}
        assert client.send(post(PREDICT, as_json(drawn(0)))).status == 200


def test_concurrency_and_time_have_limits() -> None:
    found = service(serve.Limits(batch=1, concurrency=2, answer_seconds=0.05))
    found.prepare()
    run, is_over = found.forwards["predict"].run, threading.Event()

    def slow(rows):
        is_over.wait(60)
        return run(rows)

    found.forwards["predict"].run = slow  # type: ignore[method-assign]
    with Client(serve.application(found)) as client:
        answers = client.together(post(PREDICT, as_json(drawn(i))) for i in range(3))
        is_over.set()
        causes = [a.json["error"]["cause"] for a in answers]
        assert causes.count("2 requests are in progress") == 1
        assert causes.count("there was no answer in 0.05 s") == 2


def test_a_failing_call_fails_its_requests_alone() -> None:
    found = service(serve.Limits(batch=1))
    found.prepare()
    run, failing = (
        found.forwards["predict"].run,
        [td.DeviceError("run", "the device is lost", "Wait.")],
    )

    def fails_once(rows):
        if failing:
            raise failing.pop()
        return run(rows)

    found.forwards["predict"].run = fails_once  # type: ignore[method-assign]
    with Client(serve.application(found)) as client:
        answer = client.send(post(PREDICT, as_json(drawn(0))))
        assert answer.status == 500
        assert answer.json["error"]["cause"] == "the device is lost"
        assert client.send(post(PREDICT, as_json(drawn(0)))).status == 200


def test_health_and_ready(client) -> None:
    assert client.get("/health").json == {"status": "ok"}
    assert client.get("/ready").json == {"status": "ready"}
    described = client.get("/v1").json["forwards"]["predict"]
    assert described["inputs"]["kind"] == {"shape": [], "dtype": "int32"}
    assert described["outputs"]["p"] == {"shape": [3], "dtype": "float32"}
    assert described["batch"] == SIZE


def test_not_ready_before_it_starts_and_after_it_stops() -> None:
    found = service()
    app = serve.application(found)
    assert not found.is_ready
    client = Client(app)
    assert client.get("/ready").status == 200
    client.loop.run_until_complete(found.stop())
    assert client.get("/ready").status == 503
    assert client.get("/health").status == 200
    assert client.send(post(PREDICT, as_json(drawn(0)))).status == 503
    client.close()


def test_a_token_is_asked_for() -> None:
    with Client(serve.application(service(serve.Limits(batch=1)), TOKEN)) as client:
        one = as_json(drawn(0))
        assert client.get("/health").status == 200
        for path in ("/v1", "/metrics"):
            assert client.get(path).status == 401
            assert (
                client.get(path, authorization=f"Bearer {TOKEN}", host="example.com").status == 200
            )
        for wrong in (
            "",
            TOKEN,
            f"Basic {TOKEN}",
            f"Bearer {TOKEN}x",
            f"Bearer {TOKEN[:-1]}",
            "Bearer ü",
        ):
            answer = client.send(post(PREDICT, one, authorization=wrong))
            assert answer.status == 401, wrong
            assert answer.headers["www-authenticate"] == "Bearer"
        assert client.send(post(PREDICT, one, authorization=f"bearer {TOKEN}")).status == 200


def test_without_a_token_only_this_machine_is_answered(client) -> None:
    for host in (
        "localhost",
        "localhost:8000",
        "127.0.0.1:1",
        "[::1]",
        "[::1]:8000",
        "127.0.0.2:80",
    ):
        assert client.get("/v1", host=host).status == 200, host
    assert client.get("/v1", host="LOCALHOST").status == 200
    for host in (
        ":8000",
        "",
        "example.com",
        "localhost.example.com",
        "127.0.0.1.example.com:80",
        "[::2]",
    ):
        assert client.get("/v1", host=host).status == 421, host
    assert [h for h in ("127.0.0.1", "::1", "localhost", "127.8.8.8") if not is_loopback(h)] == []
    assert [h for h in ("0.0.0.0", "::", "10.0.0.1", "example.com", "") if is_loopback(h)] == []


def test_where_tokens_come_from(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    assert read_token(str(file), {}) == TOKEN
    assert read_token(None, {"TREADLE_TOKEN": TOKEN}) == TOKEN
    assert read_token(None, {}) is None
    for wrong in ("", "short", "ü" * 20, "a b" * 20):
        with pytest.raises(td.TreadleError, match="token"):
            read_token(None, {"TREADLE_TOKEN": wrong})
    with pytest.raises(td.LoadError, match="cannot be read: No such file"):
        read_token(str(tmp_path / "none"), {})
    file.write_text("a" * 5000)  # half of a token is none
    with pytest.raises(td.LoadError, match="more than 4096 bytes"):
        read_token(str(file), {})
    with pytest.raises(td.ArgumentError, match="reached from other machines"):
        serve.check_address("0.0.0.0", None)
    serve.check_address("0.0.0.0", TOKEN)


# Parts.


def test_a_batcher_leaves_out_who_went_away() -> None:
    calls: list[list[int]] = []

    def call(rows):
        calls.append(list(rows))
        return [10 * r for r in rows]

    async def run() -> list[int]:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(1) as executor:
            batcher: Batcher[int, int] = Batcher("x", call, executor, size=3, wait=0.01, most=4)
            waiting = [asyncio.ensure_future(batcher.answer(i)) for i in range(4)]
            await asyncio.sleep(0)
            with pytest.raises(RequestError, match="4 requests wait already"):
                await batcher.answer(9)
            waiting[1].cancel()
            batcher.start()
            found = [await waiting[i] for i in (0, 2, 3)]
            await batcher.stop()
            return found

    assert asyncio.run(run()) == [0, 20, 30]
    assert calls == [[0, 2], [3]]


def test_who_is_in_a_call_when_it_stops_is_told() -> None:
    begun, is_over = threading.Event(), threading.Event()

    def slow(rows):
        begun.set()
        is_over.wait(60)
        return rows

    async def main() -> None:
        with ThreadPoolExecutor(1) as threads:
            batcher = Batcher("predict", slow, threads, size=1, wait=0.0, most=4)
            batcher.start()
            asked = [asyncio.create_task(batcher.answer(i)) for i in range(2)]
            await asyncio.to_thread(begun.wait, 60)
            await batcher.stop()
            found = await asyncio.gather(*asked, return_exceptions=True)
            is_over.set()
        assert [type(f) for f in found] == [asyncio.CancelledError] * 2

    asyncio.run(main())


def test_a_service_that_was_stopped_does_not_start_again() -> None:
    found = service()
    Client(serve.application(found)).close()
    with pytest.raises(td.ArgumentError, match=r"was stopped.*another Service"):
        found.start()


def test_a_name_twice_is_found_in_one_pass() -> None:
    """A look at all names for each would take hours where a body has a million."""
    looks = 0

    class Name(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal looks
            looks += 1
            return str(self) == str(other)

    names = [Name(i) for i in range(1000)]
    with pytest.raises(ValueError, match="'999' is there twice"):
        _once([(name, 0) for name in (*names, Name(999))])
    assert looks < 10_000


def test_histograms_count_up_to_each_bound() -> None:
    times = Histogram("t", "", (0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 7.0):
        times.observe(value, route='a"b')
    assert list(times.lines()) == [
        r't_bucket{route="a\"b",le="0.1"} 2',
        r't_bucket{route="a\"b",le="1"} 3',
        r't_bucket{route="a\"b",le="+Inf"} 4',
        r't_sum{route="a\"b"} 7.65',
        r't_count{route="a\"b"} 4',
    ]


# A language model.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = models.LlamaConfig(
        vocab_size=32,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    path = tmp_path_factory.mktemp("llama")
    models.save(models.Llama(config), path)
    return path


@pytest.fixture(scope="module")
def texts(folder):
    found = serve.Service({}, models.load(folder, device="cpu"), serve.Limits(context=24))
    with Client(serve.application(found)) as client:
        client.service = found
        yield client


GENERATE = "/v1/generate"


def test_a_model_continues_prompts(texts, folder) -> None:
    model = models.load(folder, device="cpu")
    for settings in ({}, {"temperature": 0.7, "top_k": 5, "seed": 3}):
        expected = model.generate([1, 2, 3], 5, eos_token_id=(), **settings)[3:].tolist()
        asked = {"prompt": [1, 2, 3], "max_new_tokens": 5, **settings}
        found = texts.send(post(GENERATE, asked)).json
        count = found["new_tokens"]
        assert found["tokens"] == expected[:count]
        assert found["ended"] == ("length" if count == 5 else "stop")
        streamed = texts.send(post(GENERATE, {**asked, "stream": True}))
        assert streamed.headers["content-type"].startswith("text/event-stream")
        events = [
            json.loads(e.removeprefix("data: ")) for e in streamed.body.decode().split("\n\n") if e
        ]
        assert [e["token"] for e in events[:-1]] == expected[:count]
        assert events[-1] == {"new_tokens": count, "ended": found["ended"]}


def test_no_prompt_compiles(texts, folder) -> None:
    """All lengths within the context, likeliest tokens and drawn ones, use what was prepared."""
    session = texts.service.texts.model._holder.session
    before = session.forwards
    for length in range(1, 24):
        for temperature in (0, 1):
            asked = {
                "prompt": [1] * length,
                "max_new_tokens": 24 - length,
                "temperature": temperature,
            }
            assert texts.send(post(GENERATE, asked)).status == 200
    assert session.forwards == before
    text = texts.service.texts
    assert text.lengths()[0] == max(range(1, 24), key=lambda n: slots_for(n, 24 - n))
    assert sorted(map(bucket, text.lengths())) == sorted({bucket(n) for n in range(1, 24)})


def test_a_text_is_asked_for_in_json(texts) -> None:
    answer = texts.send(post(GENERATE, b"", SAFETENSORS))
    assert answer.status == 415
    assert answer.json["error"]["cause"].startswith(f"the body is of the type '{SAFETENSORS}'")
    assert answer.json["error"]["remedy"].startswith("Send application/json, in UTF-8")


def test_streams_are_in_progress_until_they_end(texts) -> None:
    service, seen = texts.service, []
    generate = service.texts._generate

    def looking(asked, told):
        def noting(piece):
            seen.append(service.in_progress)
            told(piece)

        generate(asked, noting)

    service.texts._generate = looking
    try:
        asked = {"prompt": [1, 2, 3], "max_new_tokens": 4, "stream": True}
        assert texts.send(post(GENERATE, asked)).status == 200
    finally:
        service.texts._generate = generate
    assert set(seen) == {1}
    assert service.in_progress == 0


def test_a_text_stops_when_nobody_waits_for_it(texts) -> None:
    """Without a stream too: others wait for their turn."""
    service, made = texts.service, []
    generate = service.texts._generate

    def looking(asked, told):
        asked.stopped.wait(60)  # set when the client goes away
        generate(asked, told)
        made.append(asked.new)

    async def send() -> None:
        body = json.dumps({"prompt": [1], "max_new_tokens": 20}).encode()
        messages = [
            {"type": "http.request", "body": body, "more_body": False},
            {"type": "http.disconnect"},
        ]

        async def receive():
            return messages.pop(0)

        async def sent(message) -> None:
            assert message["type"].startswith("http.response")

        await texts.app(scope_of(post(GENERATE, body)), receive, sent)

    service.texts._generate = looking
    try:
        texts.loop.run_until_complete(asyncio.wait_for(send(), 60))
    finally:
        service.texts._generate = generate
    assert made == [0]


def test_texts_take_turns(texts) -> None:
    asked = [{"prompt": [i], "max_new_tokens": 4} for i in range(6)]
    alone = [texts.send(post(GENERATE, a)).body for a in asked]
    assert [a.body for a in texts.together(post(GENERATE, a) for a in asked)] == alone
    text = texts.get("/metrics").body.decode()
    assert re.search(r"^treadle_generated_tokens_total \d+$", text, re.MULTILINE)


def test_the_example_is_served(tmp_path: Path, monkeypatch) -> None:
    """`examples/serve_digits.py`: what it trains and saves is what its forwards give."""
    path = Path(__file__).resolve().parent.parent / "examples" / "serve_digits.py"
    monkeypatch.setattr(sys, "path", list(sys.path))
    names = vars(sys.modules[load_function(path, "forwards").__module__])
    weights = tmp_path / "digits.safetensors"
    forward = td.compile_forward(names["Net"](), names["read"], td.Spec((8, 8)), device="cpu")
    forward.save(weights)
    with Client(serve.application(serve.Service(names["forwards"](str(weights))))) as client:
        image = np.random.default_rng(0).random((8, 8), np.float32)
        found = client.send(post("/v1/forwards/digits", as_json({"input": image}))).json["outputs"]
        assert found["digit"] == int(forward(image)["digit"])
        np.testing.assert_allclose(sum(found["probabilities"]), 1, rtol=1e-5)


def test_text_needs_a_tokenizer(texts) -> None:
    answer = texts.send(post(GENERATE, {"prompt": "Once"}))
    assert answer.status == 422
    assert "no tokenizer" in answer.json["error"]["cause"]


def test_pieces_of_text(folder, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    vocabulary = {f"w{i}": i for i in range(32)}
    built = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    built.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    (tmp_path / "tokenizer.json").write_text(built.to_str())
    model = models.load(folder, device="cpu")
    model.tokenizer = models.Tokenizer(tmp_path / "tokenizer.json")
    with Client(serve.application(serve.Service({}, model, serve.Limits(context=8)))) as client:
        found = client.send(post(GENERATE, {"prompt": "w1 w2", "max_new_tokens": 3})).json
        assert "w1 w2" + found["text"] == model.generate("w1 w2", found["new_tokens"])
        streamed = client.send(
            post(GENERATE, {"prompt": "w1 w2", "max_new_tokens": 3, "stream": True})
        )
        events = [json.loads(e[6:]) for e in streamed.body.decode().split("\n\n") if e]
        assert "".join(e["text"] for e in events[:-1]) == found["text"]


def test_a_text_ends_when_the_time_is_over(texts) -> None:
    limits = serve.Limits(context=24, answer_seconds=1e-9)
    model = texts.service.texts.model
    found = serve.Service({}, model, limits)
    found.is_prepared = True
    with Client(serve.application(found)) as client:
        answer = client.send(post(GENERATE, {"prompt": [1], "max_new_tokens": 5})).json
        assert answer == {"tokens": [], "new_tokens": 0, "ended": "time"}


# The process.

FILE = """
import treadle as td
from treadle import nn

def forwards(size: int = 3):
    forward = td.compile_forward(nn.Linear(size, 2), lambda m, x: m(x), td.Spec((size,)), device="cpu")
    return {"line": forward}
"""


@pytest.fixture
def process(tmp_path: Path):
    file = tmp_path / "serve.py"
    file.write_text(FILE)
    started = subprocess.Popen(
        [sys.executable, "-m", "treadle", "serve", str(file), "--port", "0", "--set", "size=2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    yield started
    if started.poll() is None:
        started.kill()
    started.communicate()


def _port(process) -> tuple[int, list[str]]:
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        found = re.search(r"http://127\.0\.0\.1:(\d+) answers", line)
        if found:
            return int(found[1]), lines
    raise AssertionError("".join(lines) + process.stderr.read())


def _until_refused(port: int) -> None:
    for _ in range(600):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
        except ConnectionRefusedError:
            return
        time.sleep(0.05)
    raise AssertionError("the port is still open")


def test_sigterm_lets_requests_end(process) -> None:
    port, lines = _port(process)
    assert any("line: input: float32[2]; 8 a call" in line for line in lines)
    body = json.dumps({"inputs": {"input": [1.0, 2.0]}}).encode()
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("POST", "/v1/forwards/line", body, {"content-type": JSON})
    first = connection.getresponse().read()
    head = f"POST /v1/forwards/line HTTP/1.1\r\nHost: localhost\r\nContent-Type: {JSON}\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=30) as halfway:
        head += f"Expect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n"
        halfway.sendall(head.encode() + body[:10])
        assert halfway.recv(4096).startswith(b"HTTP/1.1 100")  # its headers are there
        process.send_signal(signal.SIGTERM)
        _until_refused(port)
        assert process.poll() is None
        halfway.sendall(body[10:])
        answer = b"".join(iter(lambda: halfway.recv(4096), b""))
    connection.close()
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(first)
    assert process.wait(30) == 0
    assert process.stderr.read() == ""


def test_the_command_refuses_what_it_must(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.delenv("TREADLE_TOKEN", raising=False)
    file = tmp_path / "serve.py"
    file.write_text(FILE)
    plain = str(file)
    (tmp_path / "other.py").write_text("forwards = 3")
    (tmp_path / "empty.py").write_text("def forwards(): return {}")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        cases = [
            ([plain, "--host", "0.0.0.0"], 2, "there is no token"),
            ([plain, "--batch", "0"], 2, "batch = 0"),
            ([plain, "--set", "width=3"], 2, "no setting 'width'"),
            ([str(tmp_path)], 2, f"treadle serve {file}"),
            ([str(tmp_path / "other.py")], 2, "no function 'forwards'"),
            ([str(tmp_path / "empty.py")], 2, "returns no forwards"),
            ([str(tmp_path / "none")], 1, "there is no folder"),
            ([plain, "--token-file", str(tmp_path / "none")], 1, "cannot be read"),
            ([plain, "--port", str(taken.getsockname()[1])], 1, "cannot be listened to"),
        ]
        for arguments, code, message in cases:
            assert main(["serve", *arguments]) == code, arguments
            assert message in capsys.readouterr().err
