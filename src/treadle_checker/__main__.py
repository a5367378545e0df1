"""python -m treadle_checker FILE: is a certificate right?

Exit codes: 0 accepted, 1 rejected, 2 unreadable or not a certificate, 3 accepted, but parts of it
are not established; 130 stopped by Ctrl-C, 141 the reader of the output has gone.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from treadle_checker.certificate import Report, check_file
from treadle_checker.ending import ended

EPILOG = "Exit codes: 0 accepted, 1 rejected, 2 unreadable, 3 accepted with parts not established."


def main(arguments: Sequence[str] | None = None) -> int:
    told = "Check a certificate."
    parser = argparse.ArgumentParser(prog="treadle_checker", description=told, epilog=EPILOG)
    add_arguments(parser)

    def command() -> int:
        options = parser.parse_args(arguments)
        return run(options.file, options.public_key, options.effort, options.json, options.seed)

    return ended(command)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="what certificate.save wrote")
    parser.add_argument("--json", action="store_true", help="print JSON")
    key = "the ed25519 key, 64 digits, that must have signed it"
    parser.add_argument("--public-key", metavar="HEX", help=key)
    effort = "how often each kernel is compared with its graph; 0: not at all"
    parser.add_argument("--effort", type=int, default=1, choices=range(4), help=effort)
    seed = "repeat a run: its report tells what it was drawn with"
    parser.add_argument("--seed", type=_seed, metavar="N", help=seed)


def _seed(text: str) -> int:
    found = int(text)
    if found < 0:
        raise ValueError(text)
    return found


def run(
    file: str, public_key: str | None, effort: int, as_json: bool, seed: int | None = None
) -> int:
    """Check a file, print what was found, and give the exit code."""
    try:
        key = None if public_key is None else bytes.fromhex(public_key)
        report = check_file(file, key, effort, seed)
    except ValueError:
        report = Report("unreadable", "the public key is not hexadecimal")
    print(json.dumps(report.record, indent=1) if as_json else report)
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())
