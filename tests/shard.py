"""A plugin of pytest's: `SHARD=2/8 pytest -p shard` runs the third of eight parts."""

from __future__ import annotations

import os

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    part, parts = map(int, os.environ["SHARD"].split("/"))
    items[:] = items[part::parts]
