"""The `treadle` command: arguments in, exit code out."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import treadle as td
from treadle.cli.demo import run_demo

EPILOG = "Exit codes: 0 all is well, 1 a check of the demo failed, 2 wrong usage."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Wrong usage exits with 2, as argparse does."""
    options = build_parser().parse_args(arguments)
    # Only one subcommand exists, and the parser insists on it.
    return run_demo(steps=options.steps, seed=options.seed, full=options.full)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="treadle",
        description="Trace, differentiate and evaluate neural networks, exactly where possible.",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"treadle {td.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="a tour of a few seconds: a small classifier through every stage that exists",
        description="A small classifier through every stage that exists: its code, its graph, the "
        "graph of its gradients, their values and checks of them, and gradient descent by hand. "
        "Everything runs in the float64 oracle; nothing is compiled.",
        epilog=EPILOG,
    )
    demo.add_argument(
        "--steps",
        type=_count,
        default=30,
        metavar="N",
        help="steps of gradient descent (default: %(default)s)",
    )
    demo.add_argument(
        "--seed",
        type=_count,
        default=0,
        metavar="N",
        help="seed of the data and the parameters (default: %(default)s)",
    )
    demo.add_argument(
        "--full", action="store_true", help="print the differentiated graph without leaving out"
    )
    return parser


def _count(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return number
