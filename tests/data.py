"""The one place that knows where data made by others lies; it is never part of the project."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_ROOT = Path(os.environ.get("EGX_DATA", Path(__file__).parents[2] / "shared" / "data"))


def data_dir(*parts: str) -> Path:
    """A folder or file of the shared data; skips the calling test when it is absent."""
    path = _ROOT.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"{path} is absent (set EGX_DATA)")
    return path
