"""Policies from their files."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from egx.policies import POLICIES
from egx.policies.base import AbstractPolicy
from egx.policies.files import read_policy

# What a folder of training calls the policy in it.
POLICY_FILE = "policy.npz"

# The trained policies that come with egx.
PRETRAINED = Path(__file__).parent / "pretrained"


def load_policy(
    path: str | os.PathLike[str], *, kinds: Sequence[type[AbstractPolicy]] = ()
) -> AbstractPolicy:
    """The policy that `policy.save(path)` wrote.

    Args:
        path: the file, or a folder that `egx train` wrote.
        kinds: classes of your own that it may be of, beside those of egx.

    Raises:
        CheckpointError: if the file is missing, damaged, of another version or of no known class.
    """
    known = [*POLICIES.values(), *kinds]
    file = Path(path) / POLICY_FILE if Path(path).is_dir() else path
    return read_policy(file, {kind.__name__: kind for kind in known})


def load_shipped(name: str) -> AbstractPolicy:
    """A policy of `PRETRAINED` by the name of its file, also while a program is being traced.

    Raises:
        CheckpointError: if there is none.
    """
    # As constants where a program is being traced.
    return jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, _stored(name))


@functools.cache
def _stored(name: str) -> AbstractPolicy:
    with jax.ensure_compile_time_eval():
        policy = load_policy(PRETRAINED / f"{name}.npz")
        # NumPy arrays belong to no trace.
        return jax.tree.map(lambda x: np.asarray(x) if eqx.is_array(x) else x, policy)
