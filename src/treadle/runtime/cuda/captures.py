"""A function's work as a graph that can be launched.

One thread captures at a time, on a stream that nothing else uses and that waits for no other: what
other threads launch, copy or wait for meanwhile is neither captured nor in the way. The capture is
a relaxed one: what a library loads at its first launch, or what another framework frees from a
finalizer on this thread, does not end it. Our own finalizers wait until it is over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from treadle.base.errors import DeviceError
from treadle.runtime.cuda.device import Device, checked, device, said

Enqueue = Callable[[Any], None]  # puts work into the stream that it is given


class _InvalidatedError(Exception):
    """The driver gave the capture up: not what was captured is at fault."""


def captured(enqueue: Enqueue) -> Any:
    """The graph, instantiated. A capture that the driver gives up is made once more."""
    here = device()
    with here.lock:
        try:
            return _attempt(here, enqueue)
        except _InvalidatedError:
            here.captured_again += 1
        try:
            return _attempt(here, enqueue)
        except _InvalidatedError as error:
            raise DeviceError(
                "capture",
                f"the CUDA driver says {error}, twice",
                "Something in this process uses the device in a way that no graph can be captured "
                "beside, such as a profiler or another library's capture: end that first.",
            ) from error


def _attempt(here: Device, enqueue: Enqueue) -> Any:
    driver = here.driver
    graph = _recorded(here, enqueue)
    try:
        return checked(driver.cuGraphInstantiate(graph, 0), "capture")
    finally:
        driver.cuGraphDestroy(graph)


def _recorded(here: Device, enqueue: Enqueue) -> Any:
    """The graph as it was captured; whatever happens, the capture is over afterwards."""
    driver, stream = here.driver, here.capturing
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    here.releases.drain()
    here.releases.hold()
    try:
        try:
            checked(driver.cuStreamBeginCapture(stream, mode), "capture")
            enqueue(stream)
        except BaseException as failure:  # an interruption too: the stream must not stay as it is
            ended = driver.cuStreamEndCapture(stream)
            if _is_given_up(ended[0]) and isinstance(failure, Exception) and not here.lost:
                raise _InvalidatedError(_told(ended[0])) from failure
            if not int(ended[0]):
                driver.cuGraphDestroy(ended[1])
            raise
        ended = driver.cuStreamEndCapture(stream)
    finally:
        here.releases.go_on()
    if _is_given_up(ended[0]):
        raise _InvalidatedError(_told(ended[0]))
    return checked(ended, "capture")


def _is_given_up(code: Any) -> bool:
    return said(code).startswith("STREAM_CAPTURE")


def _told(code: Any) -> str:
    return f"{said(code)} ({int(code)})"
