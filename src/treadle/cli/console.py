"""What the commands print: numbered sections, code, tables, and checks that are counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from treadle.base.terminal import Terminal, table


@dataclass(slots=True)
class Sections:
    """Prints sections, and remembers which checks failed."""

    terminal: Terminal = field(default_factory=Terminal)
    sections: int = 0
    failed: list[str] = field(default_factory=list)

    def section(self, title: str) -> None:
        self.sections += 1
        self.terminal.say("")
        self.terminal.say(f"{self.sections}. {title}", "bold")

    def say(self, text: str) -> None:
        self.terminal.say(text)

    def figure(self, text: str) -> None:
        """A line with a number that was measured here, set off on a terminal."""
        self.terminal.say(text, "figure")

    def code(self, source: str) -> None:
        """Python with line numbers."""
        for i, line in enumerate(source.split("\n"), 1):
            self.terminal.say(f"{self.terminal.styled(f'{i:4}', 'dim')} {line}".rstrip())

    def table(self, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        first, *others = table(titles, rows)
        self.terminal.say(first, "bold")
        for line in others:
            self.terminal.say(line)

    def check(self, what: str, holds: bool) -> None:
        mark = (
            self.terminal.styled("ok", "green") if holds else self.terminal.styled("FAILED", "red")
        )
        self.terminal.say(f"{mark}: {what}")
        if not holds:
            self.failed.append(what)
