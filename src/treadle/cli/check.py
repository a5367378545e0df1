"""`treadle check FILE`: what the checker, which knows nothing of Treadle, says of a certificate."""

from __future__ import annotations

import argparse

from treadle_checker.__main__ import EPILOG, add_arguments, run


def add_check(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    check = commands.add_parser(
        "check",
        help="check the certificate of a compiled step",
        description="Read what step.certificate.save wrote and check every part of it, by a "
        "program that imports nothing of the compiler.",
        epilog=EPILOG,
    )
    add_arguments(check)


def run_check(options: argparse.Namespace) -> int:
    return run(options.file, options.public_key, options.effort, options.json, options.seed)
