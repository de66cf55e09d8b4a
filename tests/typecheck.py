"""The run-time type checker of the tests: an int is welcome where a float is expected (PEP 484)."""

from __future__ import annotations

from beartype import BeartypeConf, beartype

checker = beartype(conf=BeartypeConf(is_pep484_tower=True))
