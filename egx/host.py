"""Host-side labels that ride along in a pytree without reaching a compiled program."""

from __future__ import annotations

import dataclasses
from typing import Generic, TypeVar

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, eq=False)
class HostOnly(Generic[_T]):
    """A value kept beside arrays for people to read, never for programs to depend on.

    All instances are equal and hash alike, so that two problems which differ in names only
    share one compiled program. A function that is traced must not look inside.
    """

    value: _T

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HostOnly)

    def __hash__(self) -> int:
        return 0
