"""Data made by others, for tests that need it."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.data import DATA


def data_dir(*parts: str) -> Path:
    """A folder or file of the shared data; skips the calling test when it is absent."""
    path = DATA.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"{path} is absent (set EGX_DATA)")
    return path
