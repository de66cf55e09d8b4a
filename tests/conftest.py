"""Strict tests: several CPU devices, strict dtype promotion, shapes and types checked at run time.

`EGX_TYPECHECK=0` turns the run-time checks off. With `JAX_COMPILATION_CACHE_DIR` set to a folder
that stays, a second run compiles nothing that has not changed.
"""

from __future__ import annotations

import gc
import importlib.metadata
import os
import signal
import tempfile

# Before JAX starts: the tests of devices need more than one, and compiling is most of what tests
# cost, so the compiler optimises little, and workers and the programs that they start share what
# it made. The folder is that of the process that makes it first, the parent of all others.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    compiled = tempfile.TemporaryDirectory(prefix="egx-tests-", ignore_cleanup_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = compiled.name
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ["XLA_FLAGS"] = (
    "--xla_backend_optimization_level=0 --xla_force_host_platform_device_count=4 "
    + os.environ.get("XLA_FLAGS", "")
).strip()
# Plain fusions compile faster. Newer XLA has no such flag, and ends a process that sets one.
if importlib.metadata.version("jaxlib").startswith("0.10."):
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("MPLBACKEND", "Agg")

import jaxtyping
import pytest
from jaxtyping import install_import_hook

if os.environ.get("EGX_TYPECHECK", "1") != "0":
    install_import_hook("egx", "typecheck.checker")

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")


# A shell that starts tests in the background lets them ignore Ctrl-C, which some of them press.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def unchecked():
    """Run-time type checks off: what users get who hand over a value of a wrong type."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


@pytest.fixture(autouse=True, scope="module")
def free_compiled():
    """Drops compiled programs after each file: a process may hold only so many memory maps, and a
    compiler that finds none left ends it."""
    yield
    jax.clear_caches()
    gc.collect()
