"""What the commands print: numbered sections, code, tables, and checks that are counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text


@dataclass(slots=True)
class Sections:
    """Prints sections, and remembers which checks failed."""

    console: Console = field(default_factory=lambda: Console(highlight=False))
    sections: int = 0
    failed: list[str] = field(default_factory=list)

    def section(self, title: str) -> None:
        self.sections += 1
        self.console.print(f"\n[bold]{self.sections}. {title}[/bold]", soft_wrap=True)

    def say(self, text: str | Text, style: str | None = None) -> None:
        self.console.print(text, style=style, markup=False, soft_wrap=True)

    def figure(self, text: str) -> None:
        """A line with a number that was measured here, set off on a terminal."""
        self.say(text, "bold cyan")

    def code(self, source: str) -> None:
        """Python with line numbers, coloured on a terminal."""
        if self.console.is_terminal:
            lines = Syntax(source, "python", theme="ansi_dark", line_numbers=True)
            self.console.print(lines)
        else:
            self.say("\n".join(f"{i:4} {s}".rstrip() for i, s in enumerate(source.split("\n"), 1)))

    def table(self, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        table = Table(*titles, box=None, pad_edge=False)
        for row in rows:
            table.add_row(*row)
        self.console.print(table)

    def check(self, what: str, holds: bool) -> None:
        mark = "[green]ok[/green]" if holds else "[red]FAILED[/red]"
        self.console.print(f"{mark}: {what}", soft_wrap=True)
        if not holds:
            self.failed.append(what)
