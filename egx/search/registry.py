"""Searchers by name, with options checked against the fields of their class."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from egx.errors import SearchError
from egx.search.base import AbstractSearch
from egx.search.random import RandomSearch

SEARCHES: dict[str, type[AbstractSearch]] = {"random": RandomSearch}


def searches() -> tuple[str, ...]:
    """The names that `make_search` knows, in alphabetical order."""
    return tuple(sorted(SEARCHES))


def close_to(name: str, known: tuple[str, ...]) -> str:
    """ "; did you mean ...?", or nothing when no known name is close."""
    close = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def make_search(name: str, options: Mapping[str, Any] | None = None) -> AbstractSearch:
    """The searcher called `name`, its fields set by `options`.

    Raises:
        SearchError: for an unknown name (with the closest known ones), or an unknown or
            impossible option.
    """
    options = dict(options or {})
    if name not in SEARCHES:
        known = searches()
        raise SearchError(
            f"no searcher is named {name!r}{close_to(name, known)} (known: {', '.join(known)})"
        )
    kind = SEARCHES[name]
    fields = tuple(f.name for f in dataclasses.fields(kind) if f.init)
    for option in options:
        if option not in fields:
            takes = ", ".join(fields) or "no options"
            raise SearchError(
                f"{name} has no option {option!r}{close_to(option, fields)} (it takes {takes})"
            )
    try:
        return kind(**options)
    except (TypeError, ValueError) as error:
        raise SearchError(f"{name} cannot be made with {options}: {error}") from error
