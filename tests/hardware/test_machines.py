"""Machines of several devices from one, and REGAL's."""

from __future__ import annotations

import numpy as np
import pytest

from egx import hardware
from egx.errors import HardwareError
from egx.hardware.machines import LINK_BYTES_PER_S, LINK_LATENCY_S


def test_copies_of_the_only_device():
    one = hardware.load("a100")
    three = hardware.with_devices(one, 3)
    assert three.name == "3 x a100"
    assert three.device_names == ("a100-0", "a100-1", "a100-2")
    for field in ("flops_per_s", "level_bytes", "read_bytes_per_s", "launch_s"):
        values = np.asarray(getattr(three, field))
        assert len(values) == 3
        assert (values == np.asarray(getattr(one, field))[0]).all()
    between = ~np.eye(3, dtype=bool)
    assert np.asarray(three.link_bytes_per_s)[between] == pytest.approx(LINK_BYTES_PER_S)
    assert np.asarray(three.link_latency_s)[between] == pytest.approx(LINK_LATENCY_S)
    fast = hardware.with_devices(one, 2, link_bytes_per_s=3e11, link_latency_s=0.0)
    assert float(fast.link_bytes_per_s[0, 1]) == pytest.approx(3e11)
    assert float(fast.link_latency_s[1, 0]) == 0.0
    same = hardware.with_devices(one, 1)
    assert (same.name, same.device_names) == ("a100", ("a100",))


PAIR = """
name = "pair"
[[device]]
name = "chip"
count = 2
launch = "1 us"
level = [{ name = "RAM", capacity = "1 GB", bandwidth = "1 GB/s" }]
rates = { other = { rate = "1 GOPS" } }
[[link]]
from = "*"
to = "*"
bandwidth = "7 GB/s"
latency = "2 us"
"""


def test_more_and_fewer_devices_of_a_machine_that_has_several():
    pair, _ = hardware.parse(PAIR)
    four = hardware.with_devices(pair, 4)
    assert four.device_names == ("chip0", "chip1", "chip2", "chip3")
    assert np.asarray(four.link_bytes_per_s)[~np.eye(4, dtype=bool)] == pytest.approx(7e9)
    one = hardware.with_devices(four, 1)
    assert one.device_names == ("chip0",)
    more = hardware.with_devices(hardware.load("p100x2"), 3)
    assert more.device_names == ("p100-0", "p100-1", "p100-2")
    unlike, _ = hardware.parse(
        PAIR.replace(
            "[[link]]",
            PAIR[PAIR.index("[[device]]") : PAIR.index("[[link]]")]
            .replace("1 GOPS", "2 GOPS")
            .replace("chip", "other")
            + "[[link]]",
        )
    )
    assert hardware.with_devices(unlike, 3).device_names == ("chip0", "chip1", "other0")
    with pytest.raises(HardwareError, match="expected 1 to 4 devices, got 5"):
        hardware.with_devices(unlike, 5)


def test_more_devices_than_fit_into_memory_are_refused():
    with pytest.raises(HardwareError, match="devices must be 4096 at most, got 99999999"):
        hardware.with_devices(hardware.load("nnpi"), 99999999)


@pytest.mark.parametrize("devices", [0, -1, 1.5, True])
def test_impossible_numbers_of_devices_are_named(devices, unchecked):
    with pytest.raises(HardwareError, match="devices must be a whole number of 1 or more"):
        hardware.with_devices(hardware.load("nnpi"), devices)
    with pytest.raises(HardwareError, match="devices must be a whole number of 1 or more"):
        hardware.regal_hardware(devices)


def test_the_machine_of_regal():
    free = hardware.regal_hardware(4, memory_bytes=1000.0)
    assert free.num_devices == 4
    assert (free.level_bytes == 1000.0).all()
    assert np.isinf(np.asarray(free.link_bytes_per_s)[0, 1])
    costly = hardware.regal_hardware(2, transfers="costly", link_latency_s=3e-6)
    assert float(costly.link_bytes_per_s[1, 0]) == 1e6
    assert float(costly.link_latency_s[1, 0]) == pytest.approx(3e-6)
    with pytest.raises(HardwareError, match="transfers must be 'free' or 'costly', got 'cheap'"):
        hardware.regal_hardware(2, transfers="cheap")
