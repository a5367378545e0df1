"""A service on a socket: what is no HTTP, many clients at once, and those that go away."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection

import pytest

pytest.importorskip("starlette", reason="starlette is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is not installed")

import uvicorn

import treadle as td
from asgi_client import JSON, SAFETENSORS
from malformed_requests import GENERATE, GOOD_BODY, PREDICT, TEXT, good_file
from test_serve_malformed import service
from treadle import nn, serve
from treadle.serve.server import configured

# What is no HTTP: bytes on a socket.

HEAD = f"POST {PREDICT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
WHOLE = f"Content-Length: {len(GOOD_BODY)}\r\n\r\n".encode() + GOOD_BODY


def raw_requests() -> dict[str, bytes]:
    """Bytes that are not a request, or not one that may be answered."""
    lines = {
        "no method": b" / HTTP/1.1",
        "no version": b"GET /health",
        "a word": b"hello",
        "zeros": b"\0\0\0\0",
        "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        "HTTP/2": b"PRI * HTTP/2.0",
        "two spaces": b"GET  /health  HTTP/1.1",
        "a tab": b"GET\t/health\tHTTP/1.1",
        "a path with a space": b"GET /he alth HTTP/1.1",
        "a path that is no ASCII": b"GET /h\xc3\xa9 HTTP/1.1",
        "a zero in the path": b"GET /he\0alth HTTP/1.1",
        "a method that is no token": b"G{T /health HTTP/1.1",
        "lower case": b"get /health http/1.1",
    }
    found = {name: line + b"\r\nHost: localhost\r\n\r\n" for name, line in lines.items()}
    for name, header in {
        "no colon": b"abc",
        "no name": b": x",
        "a space in a name": b"a b: x",
        "a zero in a value": b"a: x\0y",
        "folded": b"a: x\r\n  y: z\0",
        "a name that is no ASCII": b"\xc3\xa9: x",
        "two lengths": b"Content-Length: 1\r\nContent-Length: 2",
        "a negative length": b"Content-Length: -1",
        "a length in hex": b"Content-Length: 0x10",
        "a length of words": b"Content-Length: ten",
        "a length beyond all": b"Content-Length: " + b"9" * 30,
        "a length with a sign": b"Content-Length: +5",
        "an unknown transfer": b"Transfer-Encoding: gzip",
        "two transfers": b"Transfer-Encoding: chunked, chunked",
        "a large header": b"a: " + b"x" * 100_000,
        "many headers": b"\r\n".join(b"a%d: x" % i for i in range(20_000)),
    }.items():
        found[f"header: {name}"] = HEAD.encode() + header + b"\r\n\r\n"
    chunked = HEAD.encode() + b"Transfer-Encoding: chunked\r\n\r\n"
    for name, body in {
        "no size": b"\r\nabc",
        "a size that is none": b"zz\r\nabc",
        "a negative size": b"-1\r\nabc",
        "a size beyond all": b"f" * 30 + b"\r\nabc",
        "longer than it says": b"1\r\nabc\r\n0\r\n\r\n",
    }.items():
        found[f"chunk: {name}"] = chunked + body
    found["no host"] = HEAD.replace("Host: localhost\r\n", "").encode() + WHOLE
    found["two hosts"] = HEAD.encode() + b"Host: example.com\r\n" + WHOLE
    found["another host"] = HEAD.replace("localhost", "example.com").encode() + WHOLE
    found["a body that is cut"] = HEAD.encode() + WHOLE[:-5]
    found["headers that are cut"] = HEAD.encode()
    found["nothing"] = b""
    return found


@pytest.fixture(scope="module")
def port():
    with listening_server(service()) as (_, found):
        yield found


@contextmanager
def listening_server(found: serve.Service) -> Iterator[tuple[uvicorn.Server, int]]:
    """A service in a thread, on a port of its own."""
    found.prepare()
    server = uvicorn.Server(configured(found, None))
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(64)
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield server, listening.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(30)
        assert not thread.is_alive()


def sent(port: int, request: bytes) -> bytes:
    """What comes back until the connection is closed."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        try:
            connection.sendall(request)
            return b"".join(iter(lambda: connection.recv(4096), b""))
        except ConnectionError:  # closed before all was read
            return b""


def check_raw(port: int, name: str, request: bytes) -> None:
    answer = sent(port, request)
    assert answer.startswith(b"HTTP/1.1 4") or (name in SILENT and not answer), (name, answer)
    fine = sent(port, HEAD.encode() + b"Connection: close\r\n" + WHOLE)
    assert fine.startswith(b"HTTP/1.1 200"), name


RAW = raw_requests()
# Closed without a word: what never was a request; or with so much unread that the answer is lost.
SILENT = ("nothing", "headers that are cut", "zeros", "TLS", "a word")
SILENT += ("header: a large header", "header: many headers")


@pytest.mark.parametrize(
    "name",
    ["no method", "header: two lengths", "chunk: no size", "nothing", "headers that are cut"],
)
def test_what_is_no_http(port, name) -> None:
    check_raw(port, name, RAW[name])


@pytest.mark.slow
def test_all_that_is_no_http(port) -> None:
    for name, request in RAW.items():
        check_raw(port, name, request)


def trickle(connection: socket.socket, end: float) -> None:
    while time.monotonic() < end:
        connection.sendall(b"x")
        time.sleep(0.05)


@pytest.mark.parametrize("path", ["/nowhere", "/v1/forwards/none", "/health"])
def test_the_rest_of_a_body_is_not_waited_for(port, path) -> None:
    """A request that is refused before its body is read ends, however slowly the body comes."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {JSON}\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(f"{head}Content-Length: 1000000\r\n\r\n".encode())
        assert connection.recv(12) in (b"HTTP/1.1 404", b"HTTP/1.1 405")
        with pytest.raises(ConnectionError):
            trickle(connection, time.monotonic() + 30)


def test_who_does_not_read_is_not_waited_for() -> None:
    forward = td.compile_forward(
        nn.Linear(2, 2),
        lambda m, b: td.zeros((1 << 22, 2)) + b["x"],
        {"x": td.Spec((2,))},
        device="oracle",
    )
    limits = serve.Limits(batch=1, answer_seconds=0.5)
    with listening_server(serve.Service({"large": forward}, limits=limits)) as (server, port):
        head = f"POST /v1/forwards/large HTTP/1.1\r\nHost: localhost\r\nContent-Type: {JSON}\r\n"
        body = b'{"inputs": {"x": [1, 2]}}'
        rest = f"Accept: {SAFETENSORS}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.sendall(head.encode() + rest)
            assert connection.recv(15) == b"HTTP/1.1 200 OK"
            end = time.monotonic() + 30
            while server.server_state.connections and time.monotonic() < end:
                time.sleep(0.05)
            assert not server.server_state.connections


def test_as_many_connections_as_the_limit_says() -> None:
    forward = td.compile_forward(
        nn.Linear(2, 2), lambda m, b: b["x"], {"x": td.Spec((2,))}, device="oracle"
    )
    limits = serve.Limits(batch=1, connections=1)
    with listening_server(serve.Service({"same": forward}, limits=limits)) as (_, port):
        answer = sent(port, b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200")


# Many clients, and clients that go away.


def asked(port: int, path: str, body: bytes, kind: str, times: int) -> list[tuple[int, bytes]]:
    """Answers to one request after the other, on one connection."""
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    found = []
    for _ in range(times):
        connection.request("POST", path, body, {"content-type": kind})
        answer = connection.getresponse()
        found.append((answer.status, answer.read()))
    connection.close()
    return found


def check_clients(port: int, clients: int, times: int) -> None:
    bodies = [(GOOD_BODY, JSON), (good_file().body, SAFETENSORS)]
    expected = [asked(port, PREDICT, body, kind, 1)[0] for body, kind in bodies]
    assert [status for status, _ in expected] == [200, 200]
    with ThreadPoolExecutor(clients) as threads:
        every = [
            threads.submit(asked, port, PREDICT, *bodies[i % 2], times) for i in range(clients)
        ]
        for i, answers in enumerate(every):
            assert answers.result() == [expected[i % 2]] * times


def test_many_clients(port) -> None:
    check_clients(port, 50, 4)


@pytest.mark.slow
def test_two_hundred_clients(port) -> None:
    check_clients(port, 200, 50)


def waiting(port: int) -> int:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    found = re.search(r'^treadle_queue_length\{name="generate"\} (\d+)$', text, re.MULTILINE)
    assert found is not None, text
    return int(found[1])


def test_a_text_stops_when_its_reader_goes_away(port) -> None:
    body = json.dumps({**TEXT, "max_new_tokens": 20, "stream": True}).encode()
    head = f"POST {GENERATE} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {JSON}\r\n"
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            assert connection.recv(15) == b"HTTP/1.1 200 OK"
    end = time.monotonic() + 30
    while waiting(port) and time.monotonic() < end:
        time.sleep(0.02)
    assert waiting(port) == 0
    ((status, answer),) = asked(port, GENERATE, json.dumps(TEXT).encode(), JSON, 1)
    assert status == 200
    assert len(json.loads(answer)["tokens"]) == 2


METRIC = re.compile(
    r"# (HELP|TYPE) treadle_\w+ .+|treadle_\w+(\{\w+=\"[^\"]*\"(,\w+=\"[^\"]*\")*\})? [0-9.e+-]+"
)


def test_metrics_are_as_prometheus_reads_them(port) -> None:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/metrics")
    answer = connection.getresponse()
    assert answer.getheader("content-type").startswith("text/plain; version=0.0.4")
    lines = answer.read().decode().splitlines()
    connection.close()
    assert len(lines) > 20
    assert [line for line in lines if not METRIC.fullmatch(line)] == []
