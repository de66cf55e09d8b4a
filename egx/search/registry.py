"""Searchers by name, with options checked against the fields of their class."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable, Mapping
from typing import Any, cast, get_type_hints

import numpy as np

from egx.errors import SearchError
from egx.search.annealing import Annealing
from egx.search.base import AbstractSearch
from egx.search.brkga import BRKGA, brkga_seeded
from egx.search.egrl import EGRL, ea, pg
from egx.search.egrl_plus import EGRLPlus
from egx.search.evosax import EvosaxSearch, strategies
from egx.search.go import Go
from egx.search.go_plus import go_plus
from egx.search.gradient import GradientSearch
from egx.search.greedy_dp import GreedyDP
from egx.search.hdp import HDP
from egx.search.idrs import IDRS
from egx.search.local import Local
from egx.search.random import RandomSearch
from egx.search.regal import Regal, gas
from egx.search.regal_plus import regal_plus

EVOSAX = "evosax:"
_LARGEST = float(np.finfo(np.float32).max)

# A class, or a function whose return annotation is the class.
SEARCHES: dict[str, Callable[..., AbstractSearch]] = {
    "annealing": Annealing,
    "brkga": BRKGA,
    "brkga_seeded": brkga_seeded,
    "ea": ea,
    "egrl": EGRL,
    "egrl_plus": EGRLPlus,
    "gas": gas,
    "go": Go,
    "go_plus": go_plus,
    "gradient": GradientSearch,
    "greedy_dp": GreedyDP,
    "hdp": HDP,
    "idrs": IDRS,
    "local": Local,
    "pg": pg,
    "random": RandomSearch,
    "regal": Regal,
    "regal_plus": regal_plus,
}


def searches() -> tuple[str, ...]:
    """The names that `make_search` knows, in alphabetical order, but for `evosax:STRATEGY`."""
    return tuple(sorted(SEARCHES))


def search_options(name: str) -> tuple[str, ...]:
    """The options of a searcher: its fields, and those of its parts as `part.field`."""
    return tuple(_fields(name))


def _fields(name: str) -> dict[str, dataclasses.Field]:
    """The field of each option."""
    make: Any = _maker(name)
    kind: Any
    if isinstance(make, functools.partial):
        kind, fixed = make.func, tuple(make.keywords)
    else:
        kind, fixed = make if isinstance(make, type) else get_type_hints(make)["return"], ()
    options = {}
    for field in dataclasses.fields(kind):
        if not field.init or field.name in fixed:
            continue
        options[field.name] = field
        part = _part_of(field)
        if part is not None:
            options |= {f"{field.name}.{inner.name}": inner for inner in dataclasses.fields(part)}
    return options


def _part_of(field: dataclasses.Field) -> type | None:
    """The class of a field that is a part of a searcher, with options of its own."""
    part: Any = field.default_factory
    if part is dataclasses.MISSING:
        return None
    if not isinstance(part, type):
        part = get_type_hints(part).get("return")
    return cast(type, part) if dataclasses.is_dataclass(part) else None


def _check_kind(option: str, field: dataclasses.Field, value: Any) -> None:
    """Raises SearchError for a value of another kind than its field holds."""
    part = _part_of(field)
    if part is not None and not isinstance(value, part):
        raise SearchError(
            f"{option} must be a {part.__name__}, got {value!r}; {option}.NAME sets a part of it"
        )
    if field.type == "bool" and not isinstance(value, bool):
        raise SearchError(f"{option} must be true or false, got {value!r}")
    # A sweep traces numbers, or stacks them.
    if not isinstance(field.default, float | np.ndarray) or hasattr(value, "dtype"):
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) <= _LARGEST:
        raise SearchError(f"{option} must be a number, got {value!r}")


def close_to(name: str, known: tuple[str, ...]) -> str:
    """ "; did you mean ...?", or nothing when no known name is close, whatever its case."""
    cased = {k.lower(): k for k in known}
    close = [cased[k] for k in difflib.get_close_matches(name.lower(), cased, n=3, cutoff=0.5)]
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _maker(name: str) -> Callable[..., AbstractSearch]:
    if name.startswith(EVOSAX):
        strategy = name.removeprefix(EVOSAX)
        if strategy not in strategies():
            known = tuple(sorted(strategies()))
            raise SearchError(
                f"evosax has no strategy {strategy!r}{close_to(strategy, known)} "
                f"(known: {', '.join(known)})"
            )
        return functools.partial(EvosaxSearch, strategy=strategy)
    if name not in SEARCHES:
        known = (*searches(), "exact", f"{EVOSAX}STRATEGY")
        raise SearchError(
            f"no searcher is named {name!r}{close_to(name, known)} (known: {', '.join(known)})"
        )
    return SEARCHES[name]


def make_search(
    name: str,
    options: Mapping[str, Any] | None = None,
    *,
    budget: int | None = None,
    policy: Any = None,
) -> AbstractSearch:
    """The searcher called `name`.

    Args:
        name: one of `searches()`, or `evosax:STRATEGY`.
        options: values of its fields; `part.field` reaches into a part.
        budget: the run's budget, for searchers that plan with it; `options` go first.
        policy: a trained policy to start from.

    Raises:
        SearchError: for an unknown name (with the closest known ones), or an unknown or
            impossible option.
    """
    if options is not None and not isinstance(options, Mapping):
        raise SearchError(f"options must be a dict of the searcher's settings, got {options!r}")
    make, fields, options = _maker(name), _fields(name), dict(options or {})
    known = tuple(fields)
    for option, value in options.items():
        if option not in known:
            takes = ", ".join(known) or "no options"
            raise SearchError(
                f"{name} has no option {option!r}{close_to(str(option), known)} (it takes {takes})"
            )
        _check_kind(option, fields[option], value)
    if budget is not None and "budget" in known:
        options.setdefault("budget", float(budget))
    if policy is not None:
        if "policy" not in known:
            raise SearchError(f"{name} has no policy to start from")
        options["policy"] = policy
    whole = {option: value for option, value in options.items() if "." not in option}
    changes: dict[str, dict[str, Any]] = {}
    for option, value in options.items():
        if option not in whole:
            part, field = option.split(".")
            changes.setdefault(part, {})[field] = value
    try:
        # All at once: only what comes out must be possible.
        for part, changed in changes.items():
            start = whole[part] if part in whole else getattr(make(), part)
            whole[part] = dataclasses.replace(start, **changed)
        search = make(**whole)
    except (TypeError, ValueError, OverflowError) as error:
        if isinstance(error, SearchError):
            raise
        raise SearchError(f"{name} cannot be made with {options}: {error}") from error
    return search


def find_search(
    algorithm: str | AbstractSearch,
    options: Mapping[str, Any] | None = None,
    *,
    budget: int | None = None,
    policy: Any = None,
) -> tuple[AbstractSearch, str]:
    """A searcher and the name to show, from a name with options as in `make_search`, or from a
    searcher, which takes none."""
    if isinstance(algorithm, str):
        return make_search(algorithm, options, budget=budget, policy=policy), algorithm
    if not isinstance(algorithm, AbstractSearch):
        raise SearchError(f"algorithm must be a name or a searcher, got {algorithm!r}")
    if options or policy is not None:
        raise SearchError(
            "options and policy set the fields of a searcher given by name; "
            f"give them to {type(algorithm).__name__} itself"
        )
    return algorithm, type(algorithm).__name__
