"""First values of a model, drawn while its program is compiled."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np

from treadle.nn.module import Declaration, Module
from treadle.runtime.cpu.processors import default_threads
from treadle.runtime.session import Session

MANY = 1 << 20  # elements that are worth a thread
AT_ONCE = 4  # arrays: large ones are drawn by all processors, and rounded by one


class FirstValues:
    """Values from streams of their own; `write` puts them into a session.

    A thread begins to draw those of Treadle's own initialisers at once: NumPy holds Python's lock
    for little of that. A user's initialiser runs where the user would expect it, and so does one
    that failed, whose error then tells where it was asked for.
    """

    def __init__(self, session: Session, declarations: Mapping[str, Declaration], seed: int):
        self._session, self._declarations, self._seed = session, declarations, seed
        self._drawn: dict[str, np.ndarray] = {}
        own = {n: d for n, d in declarations.items() if is_own(d)}
        self._thread: threading.Thread | None = None
        if sum(d.type.size for d in own.values()) >= MANY:
            self._thread = threading.Thread(target=self._draw, args=(own,))
            self._thread.start()

    def _draw(self, declarations: Mapping[str, Declaration]) -> None:
        def one(name: str) -> None:
            with suppress(Exception):
                self._drawn[name] = declarations[name].first_value(self._seed, name)

        with ThreadPoolExecutor(min(AT_ONCE, default_threads())) as pool:
            list(pool.map(one, declarations))

    def write(self) -> None:
        """Wait for the rest and write all of them; once is enough."""
        if self._thread is not None:
            self._thread.join()
        found, self._drawn = self._drawn, {}
        rest = {n: d for n, d in self._declarations.items() if n not in found}
        found |= {n: d.first_value(self._seed, n) for n, d in rest.items()}
        self._session.write({n: found[n] for n in self._declarations})
        self._declarations = {}


def is_own(declared: Declaration) -> bool:
    """Whether its initialiser is one of ours."""
    module = getattr(declared.init, "__module__", None) or ""
    return module.partition(".")[0] == "treadle"


def begin_model(session: Session, model: Module, seed: int) -> FirstValues:
    """Room for a model's parameters and states; values of those that are new are yet to come."""
    declarations = model.declarations()
    new = session.declare({n: d.type for n, d in declarations.items()})
    return FirstValues(session, {n: declarations[n] for n in new}, seed)


def declare_model(session: Session, model: Module, seed: int) -> None:
    """The same, with their values."""
    begin_model(session, model, seed).write()
