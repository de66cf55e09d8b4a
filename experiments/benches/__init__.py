"""What `bench_simulators.py` runs: a part a file, each with `measure` and `tables`."""

from __future__ import annotations

import importlib.util

from egx.errors import MissingExtraError

if importlib.util.find_spec("numba") is None:
    raise MissingExtraError("the loops to compare with need numba: pip install 'egx[bench]'")
