"""Load on `treadle serve`: many clients at once on loopback, what they wait and what fails.

    python bench/serve.py --clients 200 --seconds 30

A process serves a small network (784-128-10); this one is all the clients, each with a connection
of its own and one request at a time. Both share the processor.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

FILE = """
import treadle as td
from treadle import models

def forwards():
    network = models.MLP([784, 128, 10])
    return {"digits": td.compile_forward(network, lambda m, x: m(x), td.Spec((1, 784)))}
"""
JSON, SAFETENSORS = "application/json", "application/safetensors"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--json", action="store_true", help="send JSON in place of safetensors")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "serve.py"
        file.write_text(FILE)
        command = [sys.executable, "-m", "treadle", "serve", str(file), "--port", "0"]
        command += ["--batch", str(options.batch)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            load(process, options)
        finally:
            process.send_signal(signal.SIGTERM)
            print(f"the process ended with {process.wait(60)}")


def load(process: subprocess.Popen[str], options: argparse.Namespace) -> None:
    assert process.stdout is not None
    found = None
    for line in process.stdout:
        print(line, end="")
        found = re.search(r":(\d+) answers", line)
        if found:
            break
    assert found is not None
    port = int(found[1])
    request = one_request(options.json)
    run(port, request, options.clients, min(3.0, options.seconds), [])  # warms both sides up
    errors: list[str] = []
    times = np.array(run(port, request, options.clients, options.seconds, errors)) * 1000
    p50, p90, p99 = np.percentile(times, (50, 90, 99))
    print(
        f"{options.clients} clients, {options.seconds:g} s: {len(times)} answers, "
        f"{len(times) / options.seconds:.0f} a second, {len(errors)} errors; "
        f"p50 {p50:.1f} ms, p90 {p90:.1f} ms, p99 {p99:.1f} ms, longest {times.max():.1f} ms"
    )
    for error in errors[:5]:
        print(error)
    print(counted(port))


def one_request(as_json: bool) -> bytes:
    """A digit, as bytes on the wire."""
    x = np.random.default_rng(0).random((1, 784), np.float32)
    if as_json:
        kind, body = JSON, json.dumps({"inputs": {"input": x.tolist()}}).encode()
    else:
        from safetensors.numpy import save

        kind, body = SAFETENSORS, save({"input": x})
    head = f"POST /v1/forwards/digits HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def run(port: int, request: bytes, clients: int, seconds: float, errors: list[str]) -> list[float]:
    """Seconds of each answer."""
    times: list[float] = []

    async def every() -> None:
        end = time.monotonic() + seconds
        await asyncio.gather(*(client(port, request, end, times, errors) for _ in range(clients)))

    asyncio.run(every())
    return times


async def client(
    port: int, request: bytes, end: float, times: list[float], errors: list[str]
) -> None:
    """One request after the other until the time is over."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while time.monotonic() < end:
            start = time.perf_counter()
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(re.search(rb"content-length: (\d+)", head)[1])
            await reader.readexactly(length)
            times.append(time.perf_counter() - start)
            if not head.startswith(b"HTTP/1.1 200"):
                errors.append(head.decode())
        writer.close()
        await writer.wait_closed()
    except (OSError, asyncio.IncompleteReadError, TypeError) as error:
        errors.append(repr(error))


def counted(port: int) -> str:
    """How many requests a call answered, by the service's own counters."""
    import urllib.request

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    calls = int(re.search(r"^treadle_forward_calls_total.* (\d+)$", text, re.M)[1])
    rows = int(re.search(r"^treadle_forward_requests_total.* (\d+)$", text, re.M)[1])
    return f"{rows} requests in {calls} calls, {rows / calls:.1f} each"


if __name__ == "__main__":
    main()
