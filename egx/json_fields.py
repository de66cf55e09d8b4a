"""Reading JSON field by field, with errors that name the file and the field.

Every reader says what it got and what it expected.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from egx.errors import FormatError


def short(value: Any) -> str:
    """A value for a message, cut to a readable length."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class Fields:
    """An object of a JSON file, which knows where it stands and checks what is read from it."""

    def __init__(self, data: Any, file: str, where: str):
        self.file, self.where = file, where
        if not isinstance(data, dict):
            at = f" {where}" if where else ""
            raise FormatError(f"{file}:{at} must be an object, got {short(data)}")
        self.data = data

    def error(self, field: str, expected: str) -> FormatError:
        if field not in self.data:
            return FormatError(f"{self.file}: {self._path(field)} is missing; expected {expected}")
        got = short(self.data[field])
        return FormatError(f"{self.file}: {self._path(field)} is {got}; expected {expected}")

    def only(self, *fields: str) -> None:
        for field in self.data:
            if field not in fields:
                raise FormatError(f"{self.file}: {self._path(field)} is no field of this file")

    def text(self, field: str) -> str:
        value = self.data.get(field)
        if not isinstance(value, str):
            raise self.error(field, "text")
        return value

    def whole(self, field: str, low: int = 0, high: int | None = None) -> int:
        value: Any = self.data.get(field)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or value < low or (high is not None and value > high):
            limit = f"{low} or more" if high is None else f"from {low} to {high}"
            raise self.error(field, f"a whole number, {limit}")
        return value

    def number(self, field: str, *, positive: bool = False) -> float:
        value: Any = self.data.get(field)
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not math.isfinite(value) or value < 0 or (positive and value == 0):
            raise self.error(field, "a number above 0" if positive else "a number, 0 or more")
        return float(value)

    def flag(self, field: str) -> bool:
        value = self.data.get(field)
        if not isinstance(value, bool):
            raise self.error(field, "true or false")
        return value

    def real(self, field: str) -> float:
        value: Any = self.data.get(field)
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not math.isfinite(value):
            raise self.error(field, "a finite number")
        return float(value)

    def listed(self, field: str, read: str, *limits: int) -> tuple[Any, ...]:
        """A list whose entries are each read as a field is."""
        value = self.data.get(field)
        if not isinstance(value, list):
            raise self.error(field, "a list")
        entries = {f"{field}[{index}]": entry for index, entry in enumerate(value)}
        inner = Fields(entries, self.file, self.where)
        return tuple(getattr(inner, read)(name, *limits) for name in entries)

    def one_of(self, field: str, known: Sequence[str]) -> str:
        value = self.data.get(field)
        if not isinstance(value, str) or value not in known:
            raise self.error(field, f"one of {', '.join(known)}")
        return value

    def names(self, field: str) -> list[str]:
        value = self.data.get(field)
        if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
            raise self.error(field, "a list of names")
        return value

    def optional(self, field: str, read: str) -> Any:
        if field in self.data and self.data[field] is None:
            return None
        return getattr(self, read)(field)

    def inner(self, field: str) -> Fields:
        if not isinstance(self.data.get(field), dict):
            raise self.error(field, "an object")
        return Fields(self.data[field], self.file, self._path(field))

    def records(self, field: str) -> Iterator[Fields]:
        value = self.data.get(field)
        if not isinstance(value, list):
            raise self.error(field, "a list of records")
        for index, entry in enumerate(value):
            yield Fields(entry, self.file, f"{self._path(field)}[{index}]")

    def _path(self, field: str) -> str:
        return f"{self.where}.{field}" if self.where else field
