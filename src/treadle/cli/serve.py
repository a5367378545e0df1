"""`treadle serve`: the forwards of a Python file, or a language model of a folder, over HTTP."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import treadle as td
from treadle.base.errors import ArgumentError
from treadle.cli.train import (
    FAILED,
    USAGE,
    UsageError,
    check_required,
    load_function,
    parsed,
    report,
    settings_of,
)

FUNCTION = "forwards"
FILE = "serve.py"  # as such a file is called beside weights


def add_serve(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    epilog: str,
    devices: Sequence[str],
) -> None:
    serve = commands.add_parser(
        "serve",
        help="answer HTTP requests with compiled forwards or a language model",
        description=f"Serve what the function {FUNCTION!r} of a Python file returns, forwards by "
        "name, or the language model of a Hugging Face folder or GGUF file, from which nothing is "
        "executed. Everything is compiled first. Other machines need a token: --token-file, or "
        "the environment variable TREADLE_TOKEN.",
        epilog=epilog,
    )
    serve.add_argument("path", metavar="PATH", help="serve.py, a folder with config.json, x.gguf")
    serve.add_argument("--host", default="127.0.0.1", help="(default: %(default)s)")
    serve.add_argument("--port", type=int, default=8000, help="0 for any (default: %(default)s)")
    serve.add_argument("--token-file", metavar="FILE", help="its content must come with requests")
    serve.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help=f"an argument of {FUNCTION}; may be given several times",
    )
    serve.add_argument("--device", choices=("auto", *devices), default="auto", help="of a model")
    serve.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    limits = serve.add_argument_group("limits")
    for name, kind, about in (
        ("batch", int, "requests that one call answers at most"),
        ("wait-ms", float, "how long a request waits for others"),
        ("max-body", int, "bytes of a request"),
        ("max-memory", int, "bytes that all requests take together, as they come and parsed"),
        ("max-seconds", float, "until an answer is there"),
        ("max-queue", int, "requests that wait for a forward"),
        ("max-concurrent", int, "requests at a time"),
        ("context", int, "tokens of a prompt and what follows"),
    ):
        limits.add_argument(f"--{name}", type=kind, metavar="N", help=about)


_LIMITS = {  # options, and the fields of Limits that they are
    "batch": "batch",
    "wait_ms": "wait_ms",
    "max_body": "body_bytes",
    "max_memory": "request_bytes",
    "max_seconds": "answer_seconds",
    "max_queue": "queue",
    "max_concurrent": "concurrency",
    "context": "context",
}


def run_serve(options: argparse.Namespace) -> int:
    """Serve until stopped. 0, 1 where it fails, 2 for wrong usage, 130 for Ctrl-C."""
    try:
        from treadle import serve
    except ModuleNotFoundError as error:
        print(f"treadle serve: {error}. pip install 'treadle[serve]'", file=sys.stderr)
        return FAILED
    try:
        token = serve.read_token(options.token_file)
        serve.check_address(options.host, token)
        limits = serve.Limits(**_limits(options))
    except ArgumentError as error:
        report(error)
        return USAGE
    except (KeyboardInterrupt, Exception) as error:
        return report(error)
    try:
        service = serve.Service(*_served(Path(options.path), options), limits)
    except UsageError as error:
        print(f"treadle serve: {error}", file=sys.stderr)
        return USAGE
    except (KeyboardInterrupt, Exception) as error:
        return report(error)
    serve.run(service, options.host, options.port, token, _say)
    return 0


def _say(line: str) -> None:
    print(f"treadle serve: {line}", flush=True)


def _served(
    path: Path, options: argparse.Namespace
) -> tuple[Mapping[str, td.Forward], td.models.CausalModel | None]:
    """Forwards of a Python file, or the model of a folder, whose code is never run unasked."""
    if path.suffix == ".py":
        return _forwards(path, options.set), None
    if options.set:
        raise UsageError(f"--set is for Python files, and {path} is none")
    if (path / FILE).is_file() and not (path / "config.json").is_file():
        raise UsageError(f"{path} has code, which runs if it is named: treadle serve {path / FILE}")
    model = td.models.load(path, device=options.device, precision=options.precision)
    if not isinstance(model, td.models.CausalModel):
        cause = f"{type(model).__name__} of {path} does not generate"
        remedy = f"Write a {FILE} with a function {FUNCTION!r} that compiles its forward."
        raise ArgumentError("serve", cause, remedy)
    return {}, model


def _limits(options: argparse.Namespace) -> dict[str, Any]:
    given = {field: getattr(options, name) for name, field in _LIMITS.items()}
    return {field: value for field, value in given.items() if value is not None}


def _forwards(path: Path, settings: Sequence[str]) -> Mapping[str, td.Forward]:
    """What the function of a file returns."""
    function = load_function(path, FUNCTION)
    parameters = settings_of(function)
    values = parsed(settings, parameters, path)
    check_required(path, parameters, values)
    found = function(**values)
    if not isinstance(found, Mapping) or not found:
        remedy = f'Return them by name: return {{"predict": forward}}, not {found!r:.80}.'
        raise UsageError(f"{path}: {FUNCTION} returns no forwards. {remedy}")
    return found
