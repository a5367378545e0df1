"""Watches over the ranks of a job from a process of its own, and says which one ended it.

It imports nothing of the package: rank 0 starts the file by itself, in a session that outlives
whatever a launcher does to the ranks. Every rank holds a connection, its lifeline, on which nothing
is said until the rank leaves or fails; when the system closes it, the rank has died. Signs of life
come on a second connection, so that they never stand before the end of a lifeline: of several
ranks that are gone the first is the one that died, and the others were ended by the launcher.
"""

from __future__ import annotations

import hmac
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

MOST_LINE = 1 << 16  # bytes
COLLECT = 0.3  # seconds in which failures of several ranks count as one
GRACE = 5.0  # seconds that ranks have to end
SILENT = 3.0  # seconds without a sign of life: three were due
JOIN = 60.0  # seconds for the first rank to connect
KILLED = 137  # the exit code of a rank that died: that of a signal 9


class Peer:
    """What is known of a rank."""

    def __init__(self, rank: int, process: int, host: str, lifeline: socket.socket):
        self.rank, self.process, self.host, self.lifeline = rank, process, host, lifeline
        self.seen, self.waits, self.place = time.monotonic(), 0, "the start"
        self.is_there, self.has_left, self.waits_long = True, False, False

    @property
    def name(self) -> str:
        return f"process {self.process} on {self.host}"

    def tell(self, **message: object) -> None:
        with suppress(OSError):
            self.lifeline.sendall(json.dumps(message).encode() + b"\n")


class Monitor:
    """Listens to all ranks until they have left, or ends them."""

    def __init__(self, size: int, token: str, host: str, status: str | None):
        self.size, self.token, self.status = size, token, status
        self.peers: dict[int, Peer] = {}
        self.failures: dict[int, dict[str, Any]] = {}
        self.failed_at = 0.0
        # Of several lifelines that end, epoll tells the first one first; others go by numbers.
        self.selector = getattr(selectors, "EpollSelector", selectors.DefaultSelector)()
        self.server = socket.create_server((host, 0), backlog=2 * size)
        self.selector.register(self.server, selectors.EVENT_READ, self._accept)
        self.port = int(self.server.getsockname()[1])
        self.own_host = socket.gethostname()
        self.until = time.monotonic() + JOIN

    def run(self) -> None:
        while self._goes_on():
            for key, _ in self.selector.select(0.1 if self.failures else 1.0):
                key.data()
            if self.failures and time.monotonic() - self.failed_at > COLLECT:
                self._judge()

    def _goes_on(self) -> bool:
        if not self.peers:
            return time.monotonic() < self.until
        return any(peer.is_there for peer in self.peers.values())

    def _accept(self) -> None:
        link, _ = self.server.accept()
        link.settimeout(GRACE)
        lines = Lines(link)
        self.selector.register(link, selectors.EVENT_READ, lambda: self._hello(lines))

    def _hello(self, lines: Lines) -> None:
        """The first line says who it is; whoever does not know the token is nobody."""
        found = lines.read()
        hello = found[0] if found else {}
        rank, known = hello.get("rank"), hmac.compare_digest(str(hello.get("token")), self.token)
        if not known or not isinstance(rank, int) or not 0 <= rank < self.size:
            self._close(lines)
            return
        if hello.get("kind") == "life" and rank not in self.peers:
            process, host = int(hello.get("process", 0)), str(hello.get("host"))[:80]
            peer = self.peers[rank] = Peer(rank, process, host, lines.link)
            peer.tell(joined=rank)
            self._hear(lines, lambda: self._life(peer, lines), found[1:])
        else:  # the lifeline's hello may come later: links are read in any order
            self._hear(lines, lambda: self._beat(rank, lines), found[1:])

    def _hear(self, lines: Lines, what: Callable[[], None], more: list[dict[str, Any]]) -> None:
        self.selector.modify(lines.link, selectors.EVENT_READ, what)
        lines.waiting = more
        if more:
            what()

    def _close(self, lines: Lines) -> None:
        self.selector.unregister(lines.link)
        lines.link.close()

    def _beat(self, rank: int, lines: Lines) -> None:
        found = lines.read()
        if lines.is_over:
            self._close(lines)
        peer = self.peers.get(rank)
        for message in found if peer else []:
            assert peer is not None
            peer.seen = time.monotonic()
            peer.waits = int(message.get("waits", peer.waits))
            peer.place = str(message.get("place", peer.place))[:200]
            peer.waits_long = bool(message.get("waits_for_left"))
        self._end_if_one_left_early()

    def _life(self, peer: Peer, lines: Lines) -> None:
        for message in lines.read():
            if "failed" in message:
                self.failed_at = self.failed_at or time.monotonic()
                self.failures[peer.rank] = message
            elif "late" in message:
                self._late(peer, message)
            elif "left" in message:
                peer.has_left, peer.waits = True, int(message["left"])
                self._end_if_one_left_early()
        if lines.is_over:
            self._close(lines)
            peer.is_there = False
            if not peer.has_left and not self.failures:
                text = (
                    f"rank {peer.rank} of {self.size} has died ({peer.name}; last seen in "
                    f"{peer.place}): killed by a signal or for want of memory, or crashed. "
                    'The other ranks were ended. Go on from the last checkpoint: resume="auto"'
                )
                self._end(text, peer.rank, KILLED)

    def _judge(self) -> None:
        """One of those that failed may tell its error; then all end."""
        order = sorted(self.failures, key=lambda r: (bool(self.failures[r].get("echo")), r))
        first, code = order[0], int(self.failures[order[0]].get("code", 1))
        self._note(first, code, str(self.failures[first]["failed"]))
        for rank in order[1:]:
            self.peers[rank].tell(tells=False)
        chosen = self.peers[first]
        chosen.tell(tells=True)
        self._drain([chosen])
        self._end("", first, code)

    def _late(self, peer: Peer, message: dict[str, Any]) -> None:
        """A rank has waited too long: those who did not come that far are named."""
        peer.waits = waits = int(message["late"])
        seconds = float(message.get("seconds", 0))
        absent = [p for _, p in sorted(self.peers.items()) if p.waits < waits and p.is_there]
        missing = [str(r) for r in range(self.size) if r not in self.peers]
        told = [self._where(p) for p in absent]
        told += [f"rank {r} has not joined" for r in missing]
        cause = "; ".join(told) or f"all ranks came as far as rank {peer.rank}, and none goes on"
        text = (
            f"rank {peer.rank} of {self.size} has waited {seconds:g} s for the others: {cause}. "
            "All ranks were ended. Allow more with DataParallel(timeout=…)"
        )
        self._end(text, absent[0].rank if absent else peer.rank, 1)

    def _where(self, peer: Peer) -> str:
        silent = time.monotonic() - peer.seen
        if peer.has_left:
            return f"rank {peer.rank} has ended"
        if silent > SILENT:
            what = f"hangs, without a sign of life for {silent:.0f} s"
        else:
            what = "does not come"
        return f"rank {peer.rank} {what} ({peer.name}; last seen in {peer.place})"

    def _end_if_one_left_early(self) -> None:
        """A rank that waits for one that has ended would wait until its time limit."""
        peers = [peer for _, peer in sorted(self.peers.items())]
        for peer in peers:
            left = next((p for p in peers if p.has_left and p.waits < peer.waits), None)
            if left is None or not peer.waits_long or peer.has_left or not peer.is_there:
                continue
            text = (
                f"rank {left.rank} of {self.size} has ended ({left.name}), and rank {peer.rank} "
                f"waits for it (in {peer.place}). All ranks were ended. Let every rank make the "
                "same calls"
            )
            self._end(text, left.rank, 1)

    def _note(self, rank: int, code: int, text: str) -> None:
        """For the launch command, which waits for it."""
        if self.status is None:
            return
        aside = f"{self.status}.{os.getpid()}"
        with suppress(OSError):
            with open(aside, "w", encoding="utf-8") as file:
                json.dump({"rank": rank, "code": code, "text": text}, file)
            os.replace(aside, self.status)

    def _end(self, text: str, rank: int, code: int) -> None:
        """Say why, have all ranks end, and end those of this host that do not."""
        if text:
            self._note(rank, code, text)
            with suppress(OSError):
                print(f"treadle: {text}.", file=sys.stderr, flush=True)
        rest = [peer for peer in self.peers.values() if peer.is_there]
        for peer in rest:
            peer.tell(end=code)
        for peer in self._drain(rest):
            if peer.host == self.own_host:
                with suppress(OSError):
                    os.kill(peer.process, signal.SIGKILL)
        raise SystemExit

    def _drain(self, peers: list[Peer]) -> list[Peer]:
        """Wait for some ranks to end; those that do not."""
        until = time.monotonic() + GRACE
        for peer in peers:
            with suppress(OSError):
                while (left := until - time.monotonic()) > 0:
                    peer.lifeline.settimeout(left)
                    if not peer.lifeline.recv(MOST_LINE):
                        peer.is_there = False
                        break
        return [peer for peer in peers if peer.is_there]


class Lines:
    """JSON objects of a connection, a line each; what is no such object ends it."""

    def __init__(self, link: socket.socket):
        self.link, self.is_over = link, False
        self.waiting: list[dict[str, Any]] = []
        self._rest = b""

    def read(self) -> list[dict[str, Any]]:
        found, self.waiting = self.waiting, []
        if found:
            return found
        try:
            data = self.link.recv(MOST_LINE)
        except OSError:
            data = b""
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.is_over = not data or len(self._rest) > MOST_LINE
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if not isinstance(message, dict):
                self.is_over = True
                break
            found.append(message)
        return found


def main() -> None:
    """Read what to do from the first line of standard input, and tell the port."""
    given = json.loads(sys.stdin.readline())
    monitor = Monitor(given["size"], given["token"], given["host"], given["status"])
    print(monitor.port, flush=True)
    os.close(1)  # whoever reads it waits for its end
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends when the ranks have
    monitor.run()


if __name__ == "__main__":
    main()
