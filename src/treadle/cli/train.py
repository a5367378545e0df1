"""`treadle train FILE.py`: calls the function `train` of a file, with settings from the command."""

from __future__ import annotations

import ast
import difflib
import inspect
import os
import sys
import traceback
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from treadle.base.errors import TreadleError
from treadle.base.origin import is_own
from treadle.distributed.watch import failed
from treadle_checker.ending import INTERRUPTED, has_lost_reader

FAILED, USAGE = 1, 2
FUNCTION = "train"
LARGEST = 1 << 24  # bytes of a Python file: more is data
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


class UsageError(Exception):
    """The command was used wrongly; the message says how."""


def run_train(
    file: str, settings: Sequence[str] = (), resume: bool = False, show: bool = False
) -> int:
    """Call `train` of a file. 0, 1 where it fails, 2 for wrong usage, 130 for Ctrl-C."""
    try:
        path = Path(file)
        train = load_function(path)
        parameters = settings_of(train)
        if show:
            print(described(path, train, parameters))
            return 0
        values = parsed(settings, parameters, path)
        if resume:
            if "resume" not in parameters:
                remedy = f"Give {FUNCTION} a setting resume=None, and pass it on to Trainer.fit."
                raise UsageError(f"{path}: {FUNCTION} has no setting 'resume'. {remedy}")
            values["resume"] = "auto"
        check_required(path, parameters, values)
    except UsageError as error:
        print(f"treadle train: {error}", file=sys.stderr)
        return USAGE
    except (KeyboardInterrupt, Exception) as error:
        return report(error)
    return _called(train, values)


def _called(train: Callable[..., object], values: Mapping[str, object]) -> int:
    try:
        train(**values)
    except (KeyboardInterrupt, Exception) as error:
        return report(error)
    return 0


def report(error: BaseException) -> int:
    """An error in words: the user's mistakes without the frames of the package.

    Of several ranks one shows its own.
    """
    if isinstance(error, BrokenPipeError) and has_lost_reader():
        raise error  # no failure: `ended` returns the code of a closed pipe
    code = INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED
    if not failed(error, code):
        return code
    if isinstance(error, KeyboardInterrupt):
        print("\n".join([str(error) or "stopped", *notes(error)]), file=sys.stderr)
        return INTERRUPTED
    if isinstance(error, TreadleError):
        words = f"{type(error).__name__}: {_told(error)}"
        print("\n".join([words, *notes(error)]), file=sys.stderr)
    else:
        traceback.print_exception(type(error), error, _users(error))
    return FAILED


def _users(error: BaseException) -> types.TracebackType | None:
    """The frames from the user's file on; all of them where it has none."""
    frames = error.__traceback__
    while frames is not None and is_own(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    return frames or error.__traceback__


def _told(error: TreadleError) -> str:
    """What an error says, without a line of the command's own, which is no line of the user's."""
    origin = error.origin
    if origin is None:
        return str(error)
    command = os.path.realpath(sys.argv[0])
    is_command = origin.file.startswith("<frozen ") or os.path.realpath(origin.file) == command
    return str(error).removesuffix(f" [{origin}]") if is_command else str(error)


def notes(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", []))


def read_source(path: Path) -> tuple[str, ast.Module]:
    """The text of a Python file, and what it says. Nothing of it is run."""
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
    except (OSError, ValueError) as error:  # a path with a zero byte is a ValueError
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{path} cannot be read: {reason}. Name a Python file.") from error
    if len(content) > LARGEST:
        raise UsageError(f"{path} has more than {LARGEST:,} bytes. Name a Python file.")
    try:
        source = content.decode("utf-8")
        return source, ast.parse(source, str(path))
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is no text in UTF-8. Name a Python file.") from error
    except SyntaxError as error:
        line = "" if error.lineno is None else f", line {error.lineno}"
        raise UsageError(f"{path}{line} is no Python: {error.msg}. Mend it first.") from error
    except (ValueError, RecursionError, MemoryError) as error:  # zero bytes, or nested too deep
        raise UsageError(f"{path} is no Python: {error}. Name a Python file.") from error


def load_function(path: Path, function: str = FUNCTION) -> Callable[..., object]:
    """The function `train` or another of a file, which is run as a module of its own."""
    source, _ = read_source(path)
    name = f"treadle_{function}_{path.stem}"
    module = types.ModuleType(name)
    module.__file__ = str(path.resolve())
    sys.modules[name] = module  # dataclasses look their module up there
    sys.path.insert(0, str(path.resolve().parent))  # as `python FILE.py` does
    exec(compile(source, str(path), "exec"), module.__dict__)
    found = module.__dict__.get(function)
    if not callable(found):
        arguments = "epochs=3, resume=None" if function == FUNCTION else ""
        remedy = f"Put what it does into: def {function}({arguments}): ..."
        raise UsageError(f"{path} has no function {function!r}. {remedy}")
    return typing.cast(Callable[..., object], found)


def settings_of(train: Callable[..., object]) -> dict[str, inspect.Parameter]:
    """The arguments that can be named."""
    try:
        signature = inspect.signature(train, eval_str=True)
    except NameError:  # an annotation that is imported for type checkers only
        signature = inspect.signature(train)
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: p for name, p in signature.parameters.items() if p.kind in kinds}


def described(
    path: Path, train: Callable[..., object], parameters: Mapping[str, inspect.Parameter]
) -> str:
    """What can be set, and what it is if it is not."""
    lines = [f"Settings of {path}:"]
    about = inspect.getdoc(train)
    if about:
        lines = [about, "", *lines]
    for name, parameter in parameters.items():
        is_needed = parameter.default is inspect.Parameter.empty
        lines.append(f"  {name}" + (" (needed)" if is_needed else f" = {parameter.default!r}"))
    return "\n".join(lines if parameters else [*lines, "  none"])


def parsed(
    settings: Sequence[str], parameters: Mapping[str, inspect.Parameter], path: Path
) -> dict[str, object]:
    """`key=value` texts as arguments."""
    values: dict[str, object] = {}
    for text in settings:
        key, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--set {text!r} is not key=value")
        if key not in parameters:
            close = difflib.get_close_matches(key, parameters, 1)
            guess = f" Did you mean {close[0]!r}?" if close else ""
            known = ", ".join(parameters) or "none"
            raise UsageError(f"{path} has no setting {key!r}.{guess} There are: {known}.")
        try:
            values[key] = converted(value, parameters[key])
        except ValueError as error:
            raise UsageError(f"--set {text}: {error}") from error
    return values


def converted(text: str, parameter: inspect.Parameter) -> object:
    """A value by the argument's annotation, by its default, or as it looks."""
    kinds = _kinds(parameter)
    if type(None) in kinds and text.lower() == "none":
        return None
    for kind in (k for k in (bool, int, float, str) if k in kinds):
        try:
            return _as(kind, text)
        except ValueError:
            continue
    if kinds & {bool, int, float}:
        wanted = " or ".join(sorted(k.__name__ for k in kinds if k is not type(None)))
        raise ValueError(f"{text!r} is not of type {wanted}")
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def _kinds(parameter: inspect.Parameter) -> set[Any]:
    if parameter.annotation is not inspect.Parameter.empty:
        given = typing.get_args(parameter.annotation) or (parameter.annotation,)
        return set(given)
    default = parameter.default
    is_told = default is not inspect.Parameter.empty and default is not None
    return {type(default)} if is_told else set()


def _as(kind: type, text: str) -> object:
    if kind is bool:
        if text.lower() in (*_TRUE, *_FALSE):
            return text.lower() in _TRUE
        raise ValueError
    return kind(text)


def check_required(
    path: Path, parameters: Mapping[str, inspect.Parameter], values: Mapping[str, object]
) -> None:
    empty = inspect.Parameter.empty
    missing = [n for n, p in parameters.items() if p.default is empty and n not in values]
    if missing:
        example = " ".join(f"--set {name}=..." for name in missing)
        raise UsageError(f"{path} needs {', '.join(missing)}: {example}")
