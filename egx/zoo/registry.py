"""Models by name."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from egx.errors import GraphError
from egx.graph.graph import Model

_BUILDERS: dict[str, Callable[..., Model]] = {}
_Builder = TypeVar("_Builder", bound=Callable[..., Model])


def register(builder: _Builder) -> _Builder:
    """Makes a builder available under its own name; every argument needs a default."""
    name = builder.__name__
    if name in _BUILDERS:
        raise GraphError(f"zoo: a model named {name!r} is already registered")
    for parameter in inspect.signature(builder).parameters.values():
        if parameter.default is parameter.empty:
            raise GraphError(f"zoo: argument {parameter.name!r} of {name!r} needs a default")
    _BUILDERS[name] = builder
    return builder


def names() -> tuple[str, ...]:
    """The names that `load` knows, in alphabetical order."""
    return tuple(sorted(_BUILDERS))


def load(name: str, **options: Any) -> Model:
    """Builds the model called `name`; `options` are the arguments of its builder.

    Raises:
        GraphError: for an unknown name (with the closest known ones) or option.
    """
    if name not in _BUILDERS:
        close = difflib.get_close_matches(str(name).lower(), names(), n=3, cutoff=0.4)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise GraphError(f"zoo: no model is named {name!r}{hint} (known: {', '.join(names())})")
    builder = _BUILDERS[name]
    known = tuple(inspect.signature(builder).parameters)
    unknown = [option for option in options if option not in known]
    if unknown:
        raise GraphError(f"zoo: {name} takes no option {unknown[0]!r}; it takes {', '.join(known)}")
    return builder(**options)
