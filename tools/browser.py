"""A page in headless Chromium, driven over the DevTools protocol; folders served on loopback."""

from __future__ import annotations

import base64
import functools
import http.server
import json
import shutil
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
FLAGS = (
    "--headless=new --no-sandbox --enable-unsafe-webgpu --use-webgpu-adapter=swiftshader "
    "--disable-background-networking --disable-component-update --disable-sync --no-first-run "
    "--disable-extensions --disable-gpu-shader-disk-cache --mute-audio --hide-scrollbars "
    "--remote-debugging-port=0 --remote-allow-origins=*"
).split()


class BrowserError(Exception):
    """The page threw, or the browser did not answer in time."""


def why_not() -> str | None:
    """Why there is no browser to test with; None if there is one."""
    if CHROMIUM is None:
        return "needs Chromium: apt-get install chromium"
    try:
        import websocket  # noqa: F401
    except ImportError:
        return "needs websocket-client: pip install treadle[test]"
    return None


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        """Requests are not printed."""

    def end_headers(self) -> None:
        self.send_header("Cache-Control", "no-store")
        super().end_headers()


@contextmanager
def served(folder: str | Path) -> Iterator[str]:
    """The address of a folder while it is served on loopback."""
    handler = functools.partial(_Quiet, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Page:
    """One page: commands in, what they return out; what the console said is kept."""

    def __init__(self, address: str, timeout: float):
        import websocket

        self._socket = websocket.create_connection(address, timeout=timeout)
        self._number, self.timeout = 0, timeout
        self.errors: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the protocol, and its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        self._socket.send(json.dumps(message))
        end = time.monotonic() + self.timeout
        while time.monotonic() < end:
            found = json.loads(self._socket.recv())
            self._note(found)
            if found.get("id") == self._number:
                if "error" in found:
                    raise BrowserError(f"{method}: {found['error']['message']}")
                return dict(found["result"])
        raise BrowserError(f"{method}: no answer in {self.timeout:g} s")

    def _note(self, event: dict[str, Any]) -> None:
        given = event.get("params", {})
        match event.get("method"):
            case "Runtime.consoleAPICalled" if given["type"] in ("error", "warning", "assert"):
                told = (a.get("value", a.get("description")) for a in given["args"])
                self.errors.append(" ".join(map(str, told)))
            case "Runtime.exceptionThrown":
                details = given["exceptionDetails"]
                told = details.get("exception", {}).get("description", details["text"])
                self.errors.append(told)
            case "Log.entryAdded" if given["entry"]["level"] in ("error", "warning"):
                entry = given["entry"]
                self.errors.append(f"{entry['text']} {entry.get('url', '')}")

    def open(self, address: str) -> None:
        self.send("Page.navigate", url=address)

    def run(self, script: str) -> Any:
        """The value of an expression, awaited."""
        found = self.send(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in found:
            details = found["exceptionDetails"]
            raise BrowserError(details.get("exception", {}).get("description", details["text"]))
        return found["result"].get("value")

    def wait_for(self, condition: str, seconds: float = 30) -> Any:
        """The value of an expression once it is true."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            found = self.run(condition)
            if found:
                return found
            time.sleep(0.05)
        raise BrowserError(f"{condition} was not true after {seconds:g} s; console: {self.errors}")

    def resize(self, width: int, height: int, scale: float = 1, mobile: bool = False) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=mobile,
        )

    def screenshot(self, path: str | Path, whole: bool = False) -> None:
        found = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        Path(path).write_bytes(base64.b64decode(found["data"]))

    def close(self) -> None:
        self._socket.close()


@contextmanager
def browser(*flags: str, timeout: float = 60) -> Iterator[Page]:
    """A fresh Chromium with one empty page; it and its profile are gone afterwards."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [CHROMIUM, *FLAGS, *flags, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            page = Page(_address(Path(profile), timeout), timeout)
            yield page
            page.send("Browser.close")
            page.close()
            process.wait(10)
        finally:
            process.kill()
            process.wait()


def _address(profile: Path, timeout: float) -> str:
    """Where the first page listens; Chromium writes its port into the profile."""
    told = profile / "DevToolsActivePort"
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if told.exists() and told.read_text().count("\n") >= 1:
            port = int(told.read_text().split()[0])
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list") as answer:
                pages = [p for p in json.load(answer) if p["type"] == "page"]
            if pages:
                return str(pages[0]["webSocketDebuggerUrl"])
        time.sleep(0.05)
    raise BrowserError(f"Chromium did not start in {timeout:g} s")
