"""Styles, tables, and the line at the bottom of a terminal."""

from __future__ import annotations

import io
import sys

import pytest

from treadle.base.terminal import Line, Terminal, grey, table


class Screen(io.StringIO):
    """A terminal that remembers what it shows, for the few codes that are used."""

    def isatty(self) -> bool:
        return True

    def shown(self) -> list[str]:
        lines, column = [""], 0
        text = self.getvalue()
        while text:
            if text.startswith("\x1b[K"):
                lines[-1], text = lines[-1][:column], text[3:]
            elif text[0] == "\r":
                column, text = 0, text[1:]
            elif text[0] == "\n":
                column, text = 0, text[1:]
                lines.append("")
            else:
                lines[-1] = lines[-1][:column] + text[0] + lines[-1][column + 1 :]
                column, text = column + 1, text[1:]
        return lines


def _screen(monkeypatch: pytest.MonkeyPatch) -> tuple[Screen, Line]:
    """In the test and not in a fixture: pytest puts streams of its own in place in between."""
    monkeypatch.setenv("COLUMNS", "60")
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    return screen, Line(Terminal(has_colours=False))


def test_a_line_is_drawn_over_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, line = _screen(monkeypatch)
    line.start()
    line.draw("step 1/2", 0.5, "loss 0.5, a long text")
    line.draw("step 2/2", 1.0, "loss 0.25")
    line.stop()
    assert screen.shown() == [f"step 2/2 {'━' * 24} loss 0.25", ""]


def test_what_others_print_goes_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, line = _screen(monkeypatch)
    line.start()
    line.draw("one", None, "a")
    print("from a callback")
    line.draw("two", None, "b")
    sys.stderr.write("a warning\n")
    line.say("val/loss 0.1")
    line.draw("three", None, "c")
    line.stop()
    print("after")
    assert screen.shown() == [
        "from a callback",
        "a warning",
        "val/loss 0.1",
        "three c",
        "after",
        "",
    ]


def test_a_line_that_others_began_is_not_drawn_over(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, line = _screen(monkeypatch)
    line.start()
    print("waiting ...", end="")
    line.draw("one", None, "a")
    print(" done")
    line.draw("two", None, "b")
    line.stop(keep=False)
    assert screen.shown() == ["waiting ... done", ""]


def test_the_streams_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, line = _screen(monkeypatch)
    line.start()
    assert sys.stdout is not screen
    assert sys.stdout.isatty()
    line.stop()
    assert sys.stdout is sys.stderr is screen
    line.start()
    sys.stdout = other = io.StringIO()
    line.stop()
    assert sys.stdout is other


def test_a_line_is_no_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, line = _screen(monkeypatch)
    for width in (1, 5, 20, 40, 80):
        monkeypatch.setenv("COLUMNS", str(width))
        line.draw("step 1/2", 0.5, "x" * 100)
        line.erase()
        line.draw("step 1/2", 0.5, "x" * 100)
        assert len(screen.shown()[-1]) == width - 1


def test_ink_that_the_stream_can_write() -> None:
    written = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    line = Line(Terminal(written, is_live=True, has_colours=False))
    line.draw("", 0.25, "")
    written.seek(0)
    assert written.read().count("#") == 6


@pytest.mark.parametrize(
    ("variables", "is_live", "wanted"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"TERM": "dumb"}, True, False),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, True, False),
        ({"FORCE_COLOR": "1"}, False, True),
    ],
)
def test_colours(
    variables: dict[str, str], is_live: bool, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    terminal = Terminal(io.StringIO(), is_live=is_live)
    assert terminal.has_colours is wanted
    assert (terminal.styled("x", "bold") == "\x1b[1mx\x1b[0m") is wanted


def test_grey() -> None:
    assert grey(0.0) == "\x1b[48;5;232m  \x1b[0m"
    assert grey(1.0) == "\x1b[48;5;255m  \x1b[0m"


def test_table() -> None:
    assert table(["a", "long"], [["wide", "1"], ["", ""]]) == ["a     long", "wide  1", ""]
    assert table(["a", "b"], []) == ["a  b"]
