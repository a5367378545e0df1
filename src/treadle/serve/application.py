"""HTTP: routes, bodies and answers around a `Service`, as an ASGI application of Starlette."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from treadle.serve.access import admit
from treadle.serve.budget import (
    TOKENIZED,
    VALUE,
    Reserved,
    array_bytes,
    json_bytes,
    request_bytes,
)
from treadle.serve.encoding import JSON, KINDS, Arrays, decode, encode, read_object
from treadle.serve.metrics import TEXT
from treadle.serve.request_error import RequestError, overloaded, shown
from treadle.serve.served import Served
from treadle.serve.service import Service
from treadle.serve.texts import Asked, Texts

ASIDE = 1 << 17  # bytes that are read or written in another thread: chosen, some milliseconds
TOKEN_BYTES, FIELD_BYTES = 64, 1 << 16  # of a body: for each token of the context, and the rest
CLOSE = {"connection": "close"}  # the rest of a body is not waited for
EVENTS = "text/event-stream"
Found = TypeVar("Found")
Endpoint = Callable[[Request], Awaitable[Response]]
_log = logging.getLogger("treadle.serve")


def application(service: Service, token: str | None = None) -> Starlette:
    """The service as an ASGI application. With a token every request but for health must have it.

    Without one, only requests for localhost are answered. What was not prepared before is when the
    application starts.
    """
    return Application(service, token).starlette()


class Watched(Response):
    """A response, and what is called when it has been sent, or nobody is left to read it."""

    def __init__(self, response: Response, on_end: Callable[[], None]):
        self.response, self.on_end = response, on_end
        self.status_code = response.status_code

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.response(scope, receive, send)
        finally:
            self.on_end()


class Application:
    """Endpoints of a service, each around what all requests go through."""

    def __init__(self, service: Service, token: str | None):
        self.service, self.limits, self.token = service, service.limits, token

    def starlette(self) -> Starlette:
        routes = [
            Route("/health", self._open("health", self.health), methods=["GET"]),
            Route("/ready", self._open("ready", self.ready), methods=["GET"]),
            Route("/metrics", self._guarded("metrics", self.metrics), methods=["GET"]),
            Route("/v1", self._guarded("describe", self.describe), methods=["GET"]),
            Route("/v1/forwards/{name}", self._counted("forward", self.forward), methods=["POST"]),
        ]
        if self.service.texts is not None:
            generate = self._counted("generate", self.generate)
            routes.append(Route("/v1/generate", generate, methods=["POST"]))
        found = Starlette(
            routes=routes,
            lifespan=self._lifespan,
            exception_handlers={404: self._no_route, 405: self._no_route},
        )
        found.router.redirect_slashes = False
        return found

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        if not self.service.is_prepared:
            await asyncio.to_thread(self.service.prepare)
        self.service.start()
        try:
            yield
        finally:
            await self.service.stop()

    # What all requests go through.

    def _open(self, route: str, endpoint: Endpoint) -> Endpoint:
        """Errors as JSON, and every request is counted."""

        async def call(request: Request) -> Response:
            start = time.monotonic()
            try:
                response = await endpoint(request)
            except RequestError as error:
                response = _refused(error)
            except ClientDisconnect:
                response = Response(status_code=400)  # nobody reads it
            except Exception:
                _log.exception("a request to %s failed", route)
                cause = "the service failed, and has written down why"
                response = _refused(RequestError(500, route, cause, "Ask who runs it."))
            self.service.metrics.requests.add(route=route, status=str(response.status_code))
            self.service.metrics.seconds.observe(time.monotonic() - start, route=route)
            return response

        return call

    def _guarded(self, route: str, endpoint: Endpoint) -> Endpoint:
        """For those who may ask."""

        async def call(request: Request) -> Response:
            admit(request.headers, self.token)
            return await endpoint(request)

        return self._open(route, call)

    def _counted(self, route: str, endpoint: Endpoint) -> Endpoint:
        """As many at a time as the limits say, once all is compiled."""

        async def call(request: Request) -> Response:
            service, most = self.service, self.limits.concurrency
            if not service.is_ready:
                raise overloaded(route, "the service is starting or stopping", {})
            if service.in_progress >= most:
                values = {"in_progress": service.in_progress, "most": most}
                raise overloaded(route, f"{most} requests are in progress", values)
            service.in_progress += 1
            held = request.state.held = Reserved(service.budget)
            try:
                response = await endpoint(request)
            except BaseException:
                self._answered(held)
                raise
            return Watched(response, partial(self._answered, held))

        return self._guarded(route, call)

    def _answered(self, held: Reserved) -> None:
        self.service.in_progress -= 1
        held.release()

    async def _no_route(self, request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 404
        headers = dict(getattr(error, "headers", None) or {})
        path = str(request.scope["path"])  # not the URL, which is not always one
        cause = f"there is no {request.method[:20]} {shown(path)}"
        values = {"method": request.method[:20], "path": path[:100]}
        remedy = "There are GET /health, /ready, /metrics and /v1, and POST to what /v1 names."
        self.service.metrics.requests.add(route="other", status=str(status))
        return _refused(RequestError(status, "route", cause, remedy, values, headers))

    # The endpoints.

    async def health(self, request: Request) -> Response:
        """The process is alive."""
        return _json({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Requests are answered."""
        if not self.service.is_ready:
            raise overloaded("ready", "the service is starting or stopping", {})
        return _json({"status": "ready"})

    async def metrics(self, request: Request) -> Response:
        return Response(self.service.metrics.text(), media_type=TEXT)

    async def describe(self, request: Request) -> Response:
        return _json(self.service.described())

    async def forward(self, request: Request) -> Response:
        """One request for a forward: arrays in, arrays out."""
        served = self.service.served(request.path_params["name"])
        kind = _content_kind(served.name, request)
        wanted = _answer_kind(served.name, request, kind)
        held: Reserved = request.state.held
        arrays = await self._arrays(served, kind, request)
        served.check(arrays)
        answering = array_bytes(served.outputs, is_json=wanted == JSON)
        held.hold(served.name, array_bytes(served.inputs, is_json=False) + answering)
        found = await self.service.call(served, arrays)
        answer = await _aside(partial(encode, wanted, found), sum(a.nbytes for a in found.values()))
        held.hold(served.name, len(answer))
        return Response(answer, media_type=wanted)

    async def _arrays(self, served: Served, kind: str, request: Request) -> Arrays:
        """The arrays of a body, which is held no longer than it takes to read them."""
        body = await self._body(served.name, request, self.limits.body_bytes)
        cost = await _aside(partial(request_bytes, kind, body, served.inputs), len(body))
        request.state.held.hold(served.name, cost)
        return await _aside(partial(decode, served.name, kind, body, served.inputs), len(body))

    async def generate(self, request: Request) -> Response:
        """A text that follows a prompt, at once or piece by piece."""
        texts = self.service.texts
        assert texts is not None
        _content_kind("generate", request, (JSON,))
        asked = await self._asked(texts, request)
        texts.check_queue()
        if asked.streams:
            return StreamingResponse(_events(texts, asked), media_type=EVENTS)
        async with _stopped_with(request, asked):
            pieces = [piece async for piece in texts.pieces(asked)]
        found = "".join(map(str, pieces)) if asked.is_text else pieces
        return _json({_name_of(asked, "text", "tokens"): found, **_ending(asked)})

    async def _asked(self, texts: Texts, request: Request) -> Asked:
        """What a body asks for; of a long text not more is read than the context can hold."""
        held: Reserved = request.state.held
        most = min(self.limits.body_bytes, FIELD_BYTES + TOKEN_BYTES * texts.context)
        body = await self._body("generate", request, most)
        held.hold("generate", (2 + TOKENIZED) * len(body) + json_bytes(body))
        given = await _aside(partial(read_object, "generate", body), len(body))
        asked = await asyncio.to_thread(texts.ask, given)
        held.hold("generate", VALUE * texts.context)
        return asked

    async def _body(self, operation: str, request: Request, most: int) -> bytes:
        """All of a body that is not too large and comes in time."""
        announced = request.headers.get("content-length", "0")
        if announced.isdecimal() and len(announced) < 20 and int(announced) > most:
            raise _too_large(operation, most)
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                async for part in request.stream():
                    size += len(part)
                    if size > most:
                        raise _too_large(operation, most)
                    request.state.held.hold(operation, 2 * size)  # the parts, and then all of it
                    parts.append(part)
        except TimeoutError:
            seconds = self.limits.body_seconds
            cause = f"{size} bytes came in {seconds:g} s, and not all of them"
            values = {"bytes": size, "seconds": seconds}
            raise RequestError(408, operation, cause, "Send it faster.", values, CLOSE) from None
        return b"".join(parts)


async def _aside(work: Callable[[], Found], size: int) -> Found:
    """Work on so many bytes: in another thread if others would wait for it."""
    return await asyncio.to_thread(work) if size >= ASIDE else work()


@contextlib.asynccontextmanager
async def _stopped_with(request: Request, asked: Asked) -> AsyncIterator[None]:
    """While it runs, a text is not gone on with when who asked for it goes away."""

    async def look() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        asked.stopped.set()

    looking = asyncio.create_task(look())
    try:
        yield
    finally:
        looking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await looking


def _name_of(asked: Asked, text: str, tokens: str) -> str:
    return text if asked.is_text else tokens


def _ending(asked: Asked) -> dict[str, object]:
    return {"new_tokens": asked.new, "ended": asked.ended}


async def _events(texts: Texts, asked: Asked) -> AsyncIterator[bytes]:
    """Pieces as server-sent events, and one that says why it ended."""
    name = _name_of(asked, "text", "token")
    try:
        async with contextlib.aclosing(texts.pieces(asked)) as pieces:
            async for piece in pieces:
                yield _event({name: piece})
        yield _event(_ending(asked))
    except RequestError as error:  # the answer has begun, so that its status is 200
        yield _event(json.loads(error.body()))
    except Exception:
        _log.exception("a text failed")
        cause = "the service failed, and has written down why"
        yield _event(json.loads(RequestError(500, "generate", cause, "Ask who runs it.").body()))


def _event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _json(value: object, status: int = 200) -> Response:
    return Response(json.dumps(value).encode(), status, media_type=JSON)


def _refused(error: RequestError) -> Response:
    return Response(error.body(), error.status, error.headers, JSON)


def _content_kind(operation: str, request: Request, kinds: Sequence[str] = KINDS) -> str:
    """What a body is, by its header."""
    given = request.headers.get("content-type", "")
    kind, _, parameters = given.partition(";")
    plain = kind.strip().lower()
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    charset = parameters.strip().lower().replace('"', "")
    if plain not in kinds or coding != "identity" or charset not in ("", "charset=utf-8"):
        cause = f"the body is of the type {shown(given)}, or encoded"
        remedy = f"Send {' or '.join(kinds)}, in UTF-8 and not compressed."
        raise RequestError(415, operation, cause, remedy, {"content-type": given[:100]}, CLOSE)
    return plain


def _answer_kind(operation: str, request: Request, kind: str) -> str:
    """What an answer is: what is accepted first, or what the request is."""
    given = request.headers.get("accept", "*/*")
    for part in given.split(","):
        plain = part.partition(";")[0].strip().lower()
        if plain in KINDS:
            return plain
        if plain in ("*/*", "application/*", ""):
            return kind
    cause = f"the answer should be of the type {shown(given)}"
    remedy = f"Accept {' or '.join(KINDS)}."
    raise RequestError(406, operation, cause, remedy, {"accept": given[:100]}, CLOSE)


def _too_large(operation: str, most: int) -> RequestError:
    cause = f"the body has more than {most} bytes"
    return RequestError(413, operation, cause, "Send less at a time.", {"most": most}, CLOSE)
