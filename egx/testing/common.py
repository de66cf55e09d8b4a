"""How a check says what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from egx.errors import EgxError


class Nonconforming(EgxError, AssertionError):
    """A promise of the protocol that a problem or a searcher does not keep."""


def require(condition: Any, message: str) -> None:
    """Raises `Nonconforming` with `message` unless `condition` holds."""
    if not bool(condition):
        raise Nonconforming(message)


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Turns whatever `what` raises into `Nonconforming`."""
    try:
        yield
    except Nonconforming:
        raise
    except Exception as error:
        raise Nonconforming(f"{what} raised {type(error).__name__}: {error}") from error


def equal(a: Any, b: Any) -> bool:
    """Whether two trees hold the same bits."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in pairs)
