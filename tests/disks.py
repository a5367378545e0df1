"""Disks that are full or cannot be written to."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """A quota: writing beyond it fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def not_permitted(folder: Path) -> Iterator[None]:
    """Nothing can be made in a folder. The superuser may do anything, and steps down."""
    is_super = os.geteuid() == 0
    if is_super:
        try:
            os.seteuid(65534)
        except OSError:
            pytest.skip("the superuser of this machine cannot step down")
        os.seteuid(0)
    folder.chmod(0o555)
    if is_super:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_super:
            os.seteuid(0)
        folder.chmod(0o755)
