"""The `treadle` command: arguments in, exit code out."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import treadle as td
from treadle.cli.demo import STEPS, TARGET, run_demo
from treadle.cli.tour import run_tour

EPILOG = "Exit codes: 0 all is well, 1 a check failed, 2 wrong usage."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Wrong usage exits with 2, as argparse does."""
    options = build_parser().parse_args(arguments)
    if options.command == "tour":
        return run_tour(steps=options.steps, seed=options.seed, full=options.full)
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
    _add_tour(commands)
    return parser


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
