"""Prints what becomes of the cases that come with `onnx`, read by `treadle.interop.onnx.load`.

python tools/onnx_cases.py [oracle | cpu]
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from onnx_cases import PASSED, counted, every_case
from treadle.interop.onnx import operators


def main() -> None:
    device = sys.argv[1] if len(sys.argv) > 1 else "oracle"
    found = list(counted(every_case(), device))
    for result, count in Counter(result for _, result in found).most_common():
        print(f"{count:5} {result}")
    passed = {op for op, result in found if result == PASSED}
    read = set(operators())
    without = ", ".join(sorted(read - passed))
    print(f"{len(found):5} cases; {len(read & passed)} of {len(read)} operators pass at least one")
    print(f"      no case passes of {without}")


if __name__ == "__main__":
    main()
