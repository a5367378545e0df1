"""The `treadle` command: arguments in, exit code out."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import treadle as td
from treadle.base.errors import TreadleError
from treadle.cli.bench import WORKLOADS, run_bench
from treadle.cli.check import add_check, run_check
from treadle.cli.conformance import run_conformance
from treadle.cli.demo import STEPS, TARGET, run_demo
from treadle.cli.environment import run_info
from treadle.cli.explain import run_explain
from treadle.cli.export_web import EXPORT, run_export_web
from treadle.cli.fuzz import SECONDS, run_fuzz
from treadle.cli.generate import run_generate
from treadle.cli.launch import add_launch, run_launch
from treadle.cli.serve import add_serve, run_serve
from treadle.cli.tour import run_tour
from treadle.cli.train import FUNCTION, report, run_train
from treadle.pipeline import DEVICES
from treadle_checker.ending import ended

_SIGNALS = "130 Ctrl-C, 141 the reader of the output has gone."
EPILOG = f"Exit codes: 0 all is well, 1 a check or the command failed, 2 wrong usage, {_SIGNALS}"
TRAIN_EPILOG = f"Exit codes: 0 all is well, 1 training failed, 2 wrong usage, {_SIGNALS}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Wrong usage exits with 2, as argparse does."""
    return ended(lambda: _called(arguments))


def _called(arguments: Sequence[str] | None) -> int:
    options = build_parser().parse_args(arguments)
    try:
        return _run(options)
    except (TreadleError, KeyboardInterrupt) as error:
        return report(error)


def _run(options: argparse.Namespace) -> int:
    if options.command == "tour":
        return run_tour(steps=options.steps, seed=options.seed, full=options.full)
    if options.command == "train":
        return run_train(options.file, options.set, options.resume, options.settings)
    if options.command == "launch":
        return run_launch(options)
    if options.command == "explain":
        return run_explain(options.file, options.set, options.json)
    if options.command == "export-web":
        return run_export_web(options.file, options.out, options.set)
    if options.command == "bench":
        return run_bench(options.workload, options.device, options.seconds, options.json)
    if options.command == "fuzz":
        return run_fuzz(options)
    if options.command == "conformance":
        return run_conformance(options)
    if options.command == "generate":
        return run_generate(options)
    if options.command == "serve":
        return run_serve(options)
    if options.command == "check":
        return run_check(options)
    if options.command == "info":
        return run_info(options.json)
    return run_demo(steps=options.steps, seed=options.seed)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="treadle",
        description="Trace, differentiate and train neural networks, exactly where possible.",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"treadle {td.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_train(commands)
    add_launch(commands)
    _add_explain(commands)
    _add_export_web(commands)
    _add_bench(commands)
    add_check(commands)
    _add_fuzz(commands)
    _add_conformance(commands)
    _add_generate(commands)
    add_serve(commands, EPILOG, DEVICES)
    _add_info(commands)
    _add_tour(commands)
    return parser


def _add_train(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    train = commands.add_parser(
        "train",
        help="run the training that a Python file describes",
        description=f"Call the function {FUNCTION!r} of a Python file. Its arguments are the "
        "settings, which --set changes: treadle train net.py --set lr=1e-3 --set epochs=5",
        epilog=TRAIN_EPILOG,
    )
    train.add_argument("file", metavar="FILE.py", help=f"has a function {FUNCTION!r}")
    _add_settings(train)
    train.add_argument(
        "--resume", action="store_true", help='go on with a run that was stopped: resume="auto"'
    )
    train.add_argument(
        "--settings", action="store_true", help="show what can be set, and do not train"
    )


def _add_explain(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    explain = commands.add_parser(
        "explain",
        help="what the training steps of a Python file are compiled to, and why",
        description=f"Call the function {FUNCTION!r} of a Python file, or run the file if it has "
        "none, until a step is about to run. Print for each step what was recognised where, which "
        "rules were applied, its kernels by modelled cost, its memory by phase, and what a memory "
        "budget lets run again.",
        epilog=EPILOG,
    )
    explain.add_argument("file", metavar="FILE.py", help="compiles a training step")
    _add_settings(explain)
    explain.add_argument("--json", action="store_true", help="print JSON")


def _add_export_web(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    export = commands.add_parser(
        "export-web",
        help="a folder with a page that trains a model in the browser",
        description=f"Call the function {EXPORT!r} of a Python file with the folder, or export the "
        "first training step that the file compiles. The page needs a browser with WebGPU and any "
        "server of files.",
        epilog=EPILOG,
    )
    export.add_argument("file", metavar="FILE.py", help="compiles a training step")
    export.add_argument("--out", required=True, metavar="FOLDER", help="new, or exported before")
    _add_settings(export)


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an argument of the function; may be given several times",
    )


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    bench = commands.add_parser(
        "bench",
        help="how fast small training steps are on this machine",
        description="Train small models for a few seconds each and say how long a step takes.",
        epilog=EPILOG,
    )
    bench.add_argument(
        "workload", nargs="*", type=_workload, help=f"of {', '.join(WORKLOADS)} (default: all)"
    )
    bench.add_argument("--device", choices=("auto", *DEVICES), default="auto")
    bench.add_argument(
        "--seconds", type=_seconds, default=2.0, metavar="S", help="for each (default: %(default)s)"
    )
    bench.add_argument("--json", action="store_true", help="print JSON")


def _workload(text: str) -> str:
    if text not in WORKLOADS:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of: {', '.join(WORKLOADS)}")
    return text


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = -1.0
    if not 0 <= minutes <= 24 * 60:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of minutes")
    return 60 * minutes


def _add_fuzz(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    fuzz = commands.add_parser(
        "fuzz",
        help="random programs on a device against the oracle",
        description="Draw random programs, run them on a device and compare what they give with "
        "the float64 oracle. What is wrong, unsteady, refused, crashes or hangs is made small and "
        "printed as a script.",
        epilog=EPILOG,
    )
    fuzz.add_argument(
        "--seconds",
        type=_seconds,
        metavar="S",
        help=f"how long (default: {SECONDS:g}, unless --cases is given)",
    )
    fuzz.add_argument("--minutes", type=_minutes, metavar="M", help="the same in minutes")
    fuzz.add_argument("--cases", type=_count, metavar="N", help="how many (default: no limit)")
    fuzz.add_argument("--seed", type=_count, metavar="N", help="(default: another one each time)")
    fuzz.add_argument("--device", choices=("auto", *DEVICES), default="cpu")
    fuzz.add_argument(
        "--processes", type=_count, metavar="N", help="at a time (default: as many as processors)"
    )
    fuzz.add_argument("--only", default="", metavar="FAMILY,…", help="families to begin with")
    fuzz.add_argument(
        "--mode", choices=("forward", "gradient", "training"), help="(default: all of them)"
    )
    fuzz.add_argument(
        "--replay",
        type=_case,
        metavar="SEED:INDEX",
        help="one case again, with its --only and --mode",
    )
    fuzz.add_argument(
        "--corpus", metavar="FOLDER", help="run its programs first, and write new findings to it"
    )
    fuzz.add_argument("--json", action="store_true", help="print JSON")
    fuzz.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)


def _add_conformance(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    conformance = commands.add_parser(
        "conformance",
        help="the error of every op on a device, measured against its contract",
        description="Run samples of every op in every dtype that it takes on a device, compare "
        "them with the float64 oracle, and print which part of what its contract allows each is "
        "off by.",
        epilog=EPILOG,
    )
    conformance.add_argument("--device", choices=("auto", *DEVICES), default="cpu")
    conformance.add_argument("--only", default="", metavar="OP,…", help="some ops")
    _add_count(conformance, "--seed", 0, "seed of the operands")
    conformance.add_argument("--json", action="store_true", help="print JSON")


def _add_generate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    generate = commands.add_parser(
        "generate",
        help="continue a text with a model of a Hugging Face folder or a GGUF file",
        description="Load a folder with config.json, safetensors and tokenizer.json, and continue "
        "a prompt. The likeliest tokens are taken unless --temperature is given.",
        epilog=EPILOG,
    )
    generate.add_argument(
        "folder", metavar="DIR", help="has config.json and model.safetensors; or x.gguf"
    )
    generate.add_argument("prompt", help="text, or tokens with --tokens")
    _add_count(generate, "--max-new-tokens", 50, "the most tokens that follow")
    generate.add_argument("--tokens", action="store_true", help="the prompt is numbers, no text")
    generate.add_argument("--temperature", type=float, default=0.0, metavar="T")
    generate.add_argument("--top-k", type=int, metavar="K")
    generate.add_argument("--top-p", type=float, metavar="P")
    generate.add_argument("--min-p", type=float, metavar="P")
    generate.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X")
    generate.add_argument("--beams", type=int, default=1, metavar="N")
    generate.add_argument("--stop", action="append", default=[], metavar="TEXT")
    _add_count(generate, "--seed", 0, "seed of the draws")
    generate.add_argument("--device", choices=("auto", *DEVICES), default="auto")
    generate.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")


def _case(text: str) -> tuple[int, int]:
    seed, separator, index = text.partition(":")
    if not (separator and seed.isdecimal() and index.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not SEED:INDEX, as in 7:1234")
    return int(seed), int(index)


def _add_info(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    info = commands.add_parser(
        "info",
        help="versions, devices, threads, the plan cache",
        description="What this installation has and uses.",
        epilog=EPILOG,
    )
    info.add_argument("--json", action="store_true", help="print JSON")


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    demo = commands.add_parser(
        "demo",
        help="train a small network on handwritten digits, in seconds",
        description="Train a small convolutional network natively on the handwritten digits that "
        "come with the package, count how many of the held-out ones it recognises (at least "
        f"{TARGET:.0%} are wanted), and compare the first steps with the float64 oracle's, in "
        "losses and in time.".replace("%", "%%"),
        epilog=EPILOG,
    )
    _add_count(demo, "--steps", STEPS, "training steps")
    _add_count(demo, "--seed", 0, "seed of the parameters and of the order of batches")


def _add_tour(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    tour = commands.add_parser(
        "tour",
        help="what the demo stands on: graphs, gradients and checks of them",
        description="A small classifier, shown stage by stage: its code, its graph, the "
        "graph of its gradients, their values and checks of them, and gradient descent by hand. "
        "Everything runs in the float64 oracle; nothing is compiled.",
        epilog=EPILOG,
    )
    _add_count(tour, "--steps", 30, "steps of gradient descent")
    _add_count(tour, "--seed", 0, "seed of the data and the parameters")
    tour.add_argument(
        "--full", action="store_true", help="print the differentiated graph without leaving out"
    )


def _add_count(parser: argparse.ArgumentParser, name: str, default: int, meaning: str) -> None:
    parser.add_argument(
        name, type=_count, default=default, metavar="N", help=f"{meaning} (default: %(default)s)"
    )


def _count(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return number
