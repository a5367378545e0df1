"""The process that serves: uvicorn around the application, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from treadle.base.errors import DeviceError
from treadle.serve.access import check_address
from treadle.serve.application import application
from treadle.serve.limits import Limits
from treadle.serve.service import Service

BACKLOG = 2048  # connections that wait to be accepted, as uvicorn has it


def run(
    service: Service,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Answer requests until the process is told to stop; those that are there are answered then.

    The socket is opened first, so that a port that is taken is found before anything is compiled.
    """
    check_address(host, token)
    with _listening(host, port) as listening, _quiet_end():
        service.prepare(say)
        server = uvicorn.Server(configured(service, token))
        listening.listen(BACKLOG)  # who connects from here on is answered
        address = listening.getsockname()
        shown = f"[{address[0]}]" if ":" in address[0] else address[0]
        say(f"http://{shown}:{address[1]} answers. Ctrl-C or SIGTERM stops it.")
        server.run([listening])


def configured(service: Service, token: str | None) -> uvicorn.Config:
    limits = service.limits
    most = limits.connections + 1  # uvicorn refuses the connection that reaches its number
    return uvicorn.Config(
        application(service, token),
        http=_protocol(limits),
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=most,
        timeout_graceful_shutdown=limits.drain_seconds,
    )


def _protocol(limits: Limits) -> type[asyncio.Protocol]:
    """HTTP/1.1 that waits for nobody: for headers, for the rest of a body, for who reads."""

    class Timed(H11Protocol):
        _timer: asyncio.TimerHandle | None = None  # until what the client owes is there
        _unread: asyncio.TimerHandle | None = None  # until it has read what was written

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._arm()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            is_idle = self.conn.their_state is h11.IDLE  # a part of the headers is there
            if (is_idle or self._is_answered_early()) and not self.transport.is_closing():
                self._arm()
            else:
                self._disarm()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self._is_answered_early() and not self.transport.is_closing():
                self._arm()

        def _is_answered_early(self) -> bool:
            """Whether a body still comes that nobody reads: its request was refused before."""
            is_sent = self.cycle is not None and self.cycle.response_complete
            return is_sent and self.conn.their_state is h11.SEND_BODY

        def pause_writing(self) -> None:
            super().pause_writing()
            if self._unread is None:
                loop = asyncio.get_running_loop()
                # `close` would wait for the reader: what it has not taken is thrown away.
                self._unread = loop.call_later(limits.answer_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._forget_reader()

        def _forget_reader(self) -> None:
            if self._unread is not None:
                self._unread.cancel()
                self._unread = None

        def connection_lost(self, exc: Exception | None) -> None:
            self._disarm()
            self._forget_reader()
            super().connection_lost(exc)

        def _arm(self) -> None:
            if self._timer is None:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(limits.header_seconds, self.transport.close)

        def _disarm(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return Timed


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, port))
        except (OSError, OverflowError) as error:
            cause = f"{host}:{port} cannot be listened to: {error}"
            raise DeviceError("serve", cause, "Use another --host or --port.") from error
        yield listening


@contextlib.contextmanager
def _quiet_end() -> Iterator[None]:
    """SIGTERM ends the service, and is no failure: uvicorn raises it again when all is done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise SystemExit(0)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
