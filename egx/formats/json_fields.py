"""Reading JSON made by others: each entry checked, each error with its file and path."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from typing import Any

from egx.errors import FormatError
from egx.formats.workload import read_text, short


class JsonFields:
    """An object of a JSON file that knows where it stands."""

    def __init__(self, file: str, where: str, content: Any):
        self.file, self.where = file, where
        if not isinstance(content, dict):
            at = f": {where}" if where else ""
            raise FormatError(f"{file}{at}: expected an object, got {short(content)}")
        self.content: dict[str, Any] = content

    def path(self, field: str) -> str:
        """The whole path of one of its fields."""
        return f"{self.where}.{field}" if self.where else field

    def error(self, field: str, expected: str) -> FormatError:
        """What to raise about a field."""
        got = short(self.content[field]) if field in self.content else "nothing: it is missing"
        return FormatError(f"{self.file}: {self.path(field)}: expected {expected}, got {got}")

    def text(self, field: str) -> str:
        """A string."""
        value = self.content.get(field)
        if not isinstance(value, str):
            raise self.error(field, "a string")
        return value

    def number(self, field: str, *, positive: bool = False) -> float:
        """A finite number of 0 or more, or above 0."""
        value: Any = self.content.get(field)
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not math.isfinite(value) or value < 0 or (positive and value == 0):
            raise self.error(field, f"a number {'above 0' if positive else 'of 0 or more'}")
        return float(value)

    def whole(self, field: str, low: int = 0) -> int:
        """A whole number."""
        value: Any = self.content.get(field)
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise self.error(field, f"a whole number of {low} or more")
        return value

    def inner(self, field: str) -> JsonFields:
        """An object in it."""
        if not isinstance(self.content.get(field), dict):
            raise self.error(field, "an object")
        return JsonFields(self.file, self.path(field), self.content[field])

    def records(self, field: str) -> Iterator[JsonFields]:
        """The objects of a list in it."""
        value = self.content.get(field)
        if not isinstance(value, list):
            raise self.error(field, "a list of objects")
        for index, entry in enumerate(value):
            yield JsonFields(self.file, f"{self.path(field)}[{index}]", entry)


def read_object(path: str | os.PathLike[str]) -> JsonFields:
    """The object that a JSON file holds.

    Raises:
        FormatError: naming the file, and line and column where it is not JSON.
    """
    try:
        content = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        where = f"{path}:{error.lineno}"
        raise FormatError(f"{where}: not JSON, or truncated ({error.msg})") from None
    except RecursionError:
        raise FormatError(f"{path}: not JSON: it is nested too deeply") from None
    return JsonFields(os.fspath(path), "", content)
