"""Policies from their files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from egx.policies import POLICIES
from egx.policies.base import AbstractPolicy
from egx.policies.files import read_policy

# What a folder of training calls the policy in it.
POLICY_FILE = "policy.npz"


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
