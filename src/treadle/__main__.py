"""`python -m treadle` is the `treadle` command."""

from __future__ import annotations

import sys

from treadle.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
