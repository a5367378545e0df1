"""No request that is wrong gets anything but a 4xx, and none disturbs those that follow."""

from __future__ import annotations

import numpy as np
import pytest

import treadle as td
from treadle import models, nn

pytest.importorskip("starlette", reason="starlette is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is not installed")


from asgi_client import Client, Request, post
from malformed_requests import GENERATE, GOOD_BODY, PREDICT, TEXT, cases, good_file
from treadle import serve

CASES = cases()
PARTS = {"operation", "values", "cause", "remedy"}


class Net(nn.Module):
    def __init__(self) -> None:
        self.first, self.kinds = nn.Linear(6, 3), nn.Embedding(5, 3)

    def forward(self, batch):
        return td.where(batch["flag"][0], self.first(batch["x"]), self.kinds(batch["kind"]))


def service() -> serve.Service:
    specs = {"x": td.Spec((6,)), "kind": td.Spec((), td.int32), "flag": td.Spec((2,), td.bool_)}
    forward = td.compile_forward(Net(), lambda m, b: m(b), specs, device="oracle")
    config = models.LlamaConfig(
        vocab_size=32,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    model = models.Llama(config)
    model.device = "oracle"
    limits = serve.Limits(
        batch=2, context=24, body_seconds=0.2, header_seconds=0.3, body_bytes=1 << 22
    )
    return serve.Service({"predict": forward}, model, limits)


@pytest.fixture(scope="module")
def client():
    with Client(serve.application(service())) as found:
        yield found


def check(client: Client, name: str, request: Request) -> None:
    answer = client.send(request)
    assert 400 <= answer.status < 500, (name, answer)
    if request.method != "HEAD":
        error = answer.json["error"]
        assert set(error) == PARTS, name
        assert error["cause"], name
        assert error["remedy"], name
        assert len(answer.body) < 20_000, name


def check_alive(client: Client) -> None:
    for request in (post(PREDICT, GOOD_BODY), good_file(), post(GENERATE, TEXT)):
        answer = client.send(request)
        assert answer.status == 200, answer


def test_over_a_thousand_kinds_are_refused(client) -> None:
    assert len(CASES) >= 1000
    check_alive(client)
    for i, (name, request) in enumerate(CASES):
        check(client, name, request)
        if i % 200 == 0:
            check_alive(client)
    check_alive(client)
    assert client.get("/metrics").status == 200


def changed(body: bytes, source: np.random.Generator) -> bytes:
    """A body with some bytes replaced, left out, doubled or moved."""
    found = bytearray(body)
    for _ in range(source.integers(1, 5)):
        at = int(source.integers(0, len(found)))
        end = at + int(source.integers(1, 9))
        match source.integers(0, 4):
            case 0:
                found[at] = source.integers(0, 256)
            case 1:
                del found[at:end]
            case 2:
                found[at:at] = found[at:end]
            case _:
                found[at] ^= 1 << source.integers(0, 8)
        found = found or bytearray(b"{")
    return bytes(found)


def mutated(client: Client, count: int) -> None:
    """Whatever is left of a body, it is answered or refused."""
    source = np.random.default_rng(7)
    good = post(PREDICT, GOOD_BODY), good_file(), post(GENERATE, TEXT)
    statuses = []
    for i in range(count):
        request = good[i % len(good)]
        body = changed(request.body, source)
        answer = client.send(Request("POST", request.path, request.headers, body))
        assert answer.status == 200 or 400 <= answer.status < 500, (body, answer)
        statuses.append(answer.status)
    assert len(set(statuses)) > 2
    check_alive(client)


def test_mutated_bodies(client) -> None:
    mutated(client, 300)


@pytest.mark.slow
def test_many_mutated_bodies(client) -> None:
    mutated(client, 30_000)


def test_a_body_that_stops_halfway(client) -> None:
    headers = post(PREDICT, b"").headers
    for parts in ((GOOD_BODY[:9], b"", b"", b"", b""), (b"",) * 6):
        answer = client.send(Request("POST", PREDICT, headers, parts=parts, pause=0.06))
        assert answer.status == 408
