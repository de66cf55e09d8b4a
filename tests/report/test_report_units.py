import math

import pytest

from egx.report.units import (
    TIMES,
    format_bytes,
    format_count,
    format_duration,
    format_percent,
    format_seconds,
    format_speedup,
    shorten,
    significant,
)


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [(0.0, 3, "0"), (0.01234, 3, "0.0123"), (1.2345, 3, "1.23"), (9.996, 3, "10.0"),
     (123.4, 3, "123"), (123456.0, 3, "123456"), (-2.5, 2, "-2.5")],
)  # fmt: skip
def test_significant_digits_without_exponents(value, digits, text):
    assert significant(value, digits) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.50 KiB"), (24 * 2**20, "24 MiB"),
     (2**31 + 2**20, "2.00 GiB"), (math.inf, "unbounded"), (5 * 2**40, "5 TiB")],
)  # fmt: skip
def test_bytes_are_exact_when_whole(value, text):
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0 s"), (9.99999997e-07, "1.000 µs"), (374.096e-6, "374.1 µs"), (0.0123, "12.30 ms"),
     (2.5, "2.500 s"), (3e-12, "0.003000 ns")],
)  # fmt: skip
def test_seconds_reach_their_unit_in_float32_too(value, text):
    assert format_seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.042, "42 ms"), (0.9999, "1.0 s"), (9.96, "10 s"), (59.6, "1 min 00 s"),
     (185.0, "3 min 05 s"), (7620.0, "2 h 07 min")],
)  # fmt: skip
def test_durations(value, text):
    assert format_duration(value) == text


def test_speedup_is_dashed_where_it_means_nothing():
    assert format_speedup(3.0, 2.0) == f"1.500{TIMES}"
    assert format_speedup(30.0, 2.0) == f"15.0{TIMES}"
    assert format_speedup(0.0, 2.0) == format_speedup(2.0, 0.0) == "-"
    assert format_speedup(2.0, math.inf) == "-"


def test_small_formats():
    assert format_percent(0.0125) == "1.25 %"
    assert format_percent(math.nan) == "-"
    assert format_count(8.18e9, "FLOP") == "8.18 GFLOP"
    assert format_count(12, "FLOP") == "12 FLOP"
    assert shorten("a_very_long_name_of_an_op", 11) == "a_ver…an_op"
    assert shorten("short", 11) == "short"
