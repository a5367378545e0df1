"""Requests to an ASGI application in this process, without sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

JSON, SAFETENSORS = "application/json", "application/safetensors"


@dataclass(frozen=True)
class Request:
    """What is sent; `parts` of a body come one by one, and `pause` seconds after each."""

    method: str = "GET"
    path: str = "/"
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    parts: tuple[bytes, ...] = ()
    pause: float = 0.0


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def post(path: str, body: bytes | object, kind: str = JSON, **headers: str) -> Request:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    named = [(n.replace("_", "-"), v) for n, v in headers.items()]
    return Request("POST", path, (("content-type", kind), *named), content)


class Client:
    """An application that has started, in an event loop that runs while requests are awaited."""

    def __init__(self, app: Any):
        self.app, self.loop = app, asyncio.new_event_loop()
        self._lifespan = app.router.lifespan_context(app)
        self.loop.run_until_complete(self._lifespan.__aenter__())

    def close(self) -> None:
        self.loop.run_until_complete(self._lifespan.__aexit__(None, None, None))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, request: Request) -> Answer:
        return self.loop.run_until_complete(self._send(request))

    def get(self, path: str, **headers: str) -> Answer:
        return self.send(Request("GET", path, tuple(headers.items())))

    def together(self, requests: Iterable[Request]) -> list[Answer]:
        async def every() -> list[Answer]:
            return await asyncio.gather(*map(self._send, requests))

        return self.loop.run_until_complete(every())

    async def _send(self, request: Request) -> Answer:
        parts = list(request.parts or [request.body])
        sent: list[dict[str, Any]] = []
        over = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if not parts:
                await over.wait()
                return {"type": "http.disconnect"}
            part = parts.pop(0)
            if request.pause:
                await asyncio.sleep(request.pause)
            return {"type": "http.request", "body": part, "more_body": bool(parts)}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await self.app(scope_of(request), receive, send)
        over.set()
        start = sent[0]
        headers = {n.decode(): v.decode() for n, v in start["headers"]}
        body = b"".join(m.get("body", b"") for m in sent[1:])
        return Answer(start["status"], headers, body)


def scope_of(request: Request) -> dict[str, Any]:
    given = {n.lower() for n, _ in request.headers}
    headers: Sequence[tuple[str, str]] = request.headers
    if "host" not in given:
        headers = (*headers, ("host", "localhost:8000"))
    path, _, query = request.path.partition("?")
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode("utf-8", "replace"),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(n.lower().encode(), v.encode("utf-8", "replace")) for n, v in headers],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
    }
