"""Presets, and files that people write: read right, or refused by name."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import egx.hardware
from egx.errors import HardwareError
from egx.graph.graph import OP_CLASSES
from egx.hardware.units import parse_quantity

MINIMAL = """
name = "tiny"
[[device]]
name = "chip"
launch = "2 us"
[[device.level]]
name = "DRAM"
capacity = "1 GiB"
read = "10 GB/s"
write = "5 GB/s"
[[device.level]]
name = "SRAM"
capacity = "1 MiB"
bandwidth = "100 GB/s"
[device.rates]
contraction = { rate = "2 TOPS", efficiency = 0.5 }
other = { rate = "10 GFLOP/s" }
shape = { rate = "3 GMAC/s" }
"""

LINKED = """
name = "cluster"
[[device]]
name = "gpu"
count = 3
launch = "0 s"
[[device.level]]
name = "HBM"
capacity = "16 GiB"
bandwidth = "1 TB/s"
[device.rates]
other = { rate = "1 TFLOPS" }
[[device]]
name = "cpu"
launch = "0 s"
[[device.level]]
name = "DDR"
capacity = "64 GiB"
bandwidth = "50 GB/s"
[device.rates]
other = { rate = "100 GFLOPS" }
[[link]]
from = "*"
to = "*"
bandwidth = "16 GB/s"
latency = "10 us"
[[link]]
from = "gpu"
to = "gpu"
bandwidth = "inf GB/s"
latency = "0 s"
[[link]]
from = "cpu"
to = "gpu1"
both_ways = false
bandwidth = "8 GB/s"
latency = "1 us"
"""


def read(text: str):
    return egx.hardware.parse(text, label="mine.toml")[0]


def test_a_small_file_by_hand():
    machine = read(MINIMAL)
    assert machine.name == "tiny"
    assert machine.device_names == ("chip",)
    assert machine.level_names == ("DRAM", "SRAM")
    assert machine.level_bytes.tolist() == [[2.0**30, 2.0**20]]
    np.testing.assert_array_equal(machine.read_bytes_per_s, np.float32([[10e9, 100e9]]))
    np.testing.assert_array_equal(machine.write_bytes_per_s, np.float32([[5e9, 100e9]]))
    np.testing.assert_array_equal(machine.launch_s, np.float32([2e-6]))
    # elementwise, shape, reduction, contraction, opaque; a multiply-add is two operations.
    expected = np.float32([[10e9, 6e9, 10e9, 1e12, 10e9]])
    np.testing.assert_array_equal(machine.flops_per_s, expected)


def test_links_between_copies_and_kinds():
    machine = read(LINKED)
    assert machine.device_names == ("gpu0", "gpu1", "gpu2", "cpu")
    bandwidth, latency = np.asarray(machine.link_bytes_per_s), np.asarray(machine.link_latency_s)
    assert np.isinf(bandwidth[0, 2])
    assert np.isinf(bandwidth[2, 0])
    assert bandwidth[0, 3] == bandwidth[3, 0] == bandwidth[1, 3] == np.float32(16e9)
    assert bandwidth[3, 1] == np.float32(8e9)
    assert latency[3, 1] == np.float32(1e-6)
    assert latency[1, 3] == np.float32(10e-6)
    assert latency[0, 1] == 0


def test_nnpi_has_the_figures_of_its_paper():
    machine = egx.hardware.load("nnpi")
    assert machine.level_names == ("DRAM", "LLC", "SRAM")
    assert machine.level_bytes.tolist() == [[32 * 2**30, 24 * 2**20, 4 * 2**20]]
    np.testing.assert_allclose(machine.read_bytes_per_s, [[67.2e9, 680e9, 6.8e12]], rtol=1e-6)
    np.testing.assert_array_equal(machine.read_bytes_per_s, machine.write_bytes_per_s)
    rates = [[0.7e12, 0.7e12, 0.7e12, 0.6 * 48e12, 0.7e12]]
    np.testing.assert_allclose(machine.flops_per_s, rates, rtol=1e-6)
    np.testing.assert_allclose(machine.launch_s, [1e-6], rtol=1e-6)
    assert machine.capacity_units(jnp.int32(1)).tolist() == [[2**31 - 1, 24 * 2**20, 4 * 2**20]]


@pytest.mark.parametrize("name", egx.hardware.presets())
def test_every_preset_loads_and_names_a_source_for_each_number(name):
    machine = egx.hardware.load(name)
    assert machine.name == name
    assert machine.num_levels >= 2
    numbers = egx.hardware.sources(name)
    # Capacity and bandwidth of each level, the launch, and at least one rate.
    assert len(numbers) >= 2 * machine.num_levels + 2
    for number in numbers.values():
        assert number.source is not None
        assert len(number.source) > 10


def test_there_are_chips_and_clusters():
    chips = {"nnpi", "ethos_u65", "tpu_v5e", "a100"}
    clusters = {"p100x2", "p100x4", "p100x8", "a100x8", "h100x8", "tpu_v5e_2x4"}
    assert set(egx.hardware.presets()) == chips | clusters


def test_sources_are_required_in_presets_only():
    read(MINIMAL)
    with pytest.raises(HardwareError, match=r"launch = '2 us' has no source"):
        egx.hardware.parse(MINIMAL, require_sources=True)
    numbers = egx.hardware.parse(MINIMAL)[1]
    assert numbers["device 0 (chip): launch"].text == "2 us"
    assert numbers["device 0 (chip): launch"].source is None


def test_the_nearest_source_counts():
    text = """
    name = "x"
    [[device]]
    name = "chip"
    launch = { value = "1 us", source = "measured" }
    [[device.level]]
    name = "DRAM"
    capacity = "1 GiB"
    bandwidth = { value = "1 GB/s", source = "derived" }
    source = "datasheet"
    [device.rates]
    source = "whitepaper"
    other = { rate = "1 TOPS" }
    """
    numbers = egx.hardware.parse(text, require_sources=True)[1]
    assert [number.source for number in numbers.values()] == [
        *("measured", "datasheet", "derived", "whitepaper")
    ]


def test_paths_and_names(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(MINIMAL)
    assert egx.hardware.load(path).name == "tiny"
    assert egx.hardware.load(str(path)).name == "tiny"
    with pytest.raises(HardwareError, match=r"nothere\.toml: cannot be read"):
        egx.hardware.load(tmp_path / "nothere.toml")
    with pytest.raises(HardwareError, match=r"'nnp'; did you mean nnpi\?"):
        egx.hardware.load("nnp")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(HardwareError, match="cannot be read"):
        egx.hardware.load(path)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('name = "tiny"', "", ("top level", "name is missing")),
        ('name = "tiny"', 'name = "tiny"\nlevel = 3', ("top level", "unknown key 'level'")),
        ('name = "tiny"', 'name = "tiny"\ndevise = 3', ("did you mean 'device'",)),
        ('name = "tiny"', 'name = "tiny', ("not valid TOML",)),
        ("[[device]]", "[device]", ("[[device]]",)),
        ('launch = "2 us"', "", ("device 0 (chip)", "launch is missing", "1 us")),
        ('launch = "2 us"', "launch = 2", ("launch = 2", "string with its unit")),
        ('launch = "2 us"', 'launch = "2"', ("launch = '2'", "not a number with a unit")),
        ('launch = "2 us"', 'launch = "2 GB/s"', ("launch", "'GB/s' is not a unit of time")),
        ('launch = "2 us"', 'launch = "-2 us"', ("launch = '-2 us'", "0 or more")),
        ('launch = "2 us"', 'launch = "nan us"', ("launch = 'nan us'", "not a number")),
        ('launch = "2 us"', 'launch = "inf us"', ("launch = 'inf us'", "finite")),
        ('launch = "2 us"', 'launch = { source = "x" }', ("launch", "value is missing")),
        ('launch = "2 us"', 'launch = { value = "2 us", s = 1 }', ("unknown key 's'",)),
        ('launch = "2 us"', 'launch = "2 us"\ncount = 0', ("count = 0", "1 to 4096")),
        ('launch = "2 us"', 'launch = "2 us"\ncount = 100000000', ("count", "1 to 4096")),
        ('launch = "2 us"', f'launch = "2 us"\ncount = {"9" * 5000}', ("not valid TOML",)),
        ('launch = "2 us"', f"launch = {'[' * 5000}", ("not valid TOML",)),
        ('launch = "2 us"', 'launch = "2 us"\nsource = 3', ("source = 3", "string")),
        ('capacity = "1 GiB"', "", ("level 0 (DRAM)", "capacity is missing")),
        ('capacity = "1 GiB"', 'capacity = "0 GiB"', ("level 0 (DRAM)", "greater than 0")),
        ('capacity = "1 GiB"', 'capacity = "1 GB/s"', ("capacity", "not a unit of capacity")),
        ('capacity = "1 GiB"', 'capasity = "1 GiB"', ("did you mean 'capacity'",)),
        ('capacity = "1 GiB"', 'capacity = "1 kB"', ("level 1 (SRAM)", "at most", "DRAM")),
        ('write = "5 GB/s"', "", ("level 0 (DRAM)", "write is missing")),
        ('write = "5 GB/s"', 'write = "200 GB/s"', ("level 1 (SRAM)", "at least", "DRAM")),
        ('read = "10 GB/s"', 'read = "100 GB/s"', ("level 1 (SRAM)", "bandwidth", "more than")),
        (
            'bandwidth = "100 GB/s"',
            'bandwidth = "100 GB/s"\nread = "1 TB/s"',
            ("read = '1 TB/s'", "either `bandwidth`"),
        ),
        ('name = "SRAM"', 'name = "DRAM"', ("level 1 (DRAM)", "no other level")),
        ("efficiency = 0.5", "efficiency = 1.5", ("efficiency = 1.5", "(0, 1]")),
        ("efficiency = 0.5", "efficiency = nan", ("efficiency = nan", "(0, 1]")),
        ("efficiency = 0.5", "efficiency = true", ("efficiency = True",)),
        ('rate = "2 TOPS"', 'rate = "2 TB"', ("rates, contraction", "rate = '2 TB'")),
        ('rate = "2 TOPS"', 'rate = "0 TOPS"', ("rates, contraction", "greater than 0")),
        ("other =", "elementwise =", ("rates", "reduction is missing", "`other`")),
        ("other =", "others =", ("unknown key 'others'", "did you mean 'other'")),
        ('shape = { rate = "3 GMAC/s" }', 'shape = "3 GMAC/s"', ("shape", "must be a table")),
        ("[device.rates]", "[device.rate]", ("unknown key 'rate'", "did you mean 'rates'")),
    ],
)
def test_errors_of_a_device_name_file_table_field_and_value(old, new, words):
    assert old in MINIMAL
    with pytest.raises(HardwareError) as caught:
        read(MINIMAL.replace(old, new, 1))
    for word in ("mine.toml", *words):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('from = "gpu"', 'from = "npu"', ("link 1", "from = 'npu'", "gpu0", "'*'")),
        ('to = "gpu1"', 'to = "cpu"', ("link 2 (cpu to cpu)", "other than the sender")),
        ('bandwidth = "8 GB/s"', "", ("link 2 (cpu to gpu1)", "bandwidth is missing")),
        ('latency = "1 us"', 'latency = "-1 us"', ("latency = '-1 us'", "0 or more")),
        ("both_ways = false", "both_ways = 0", ("both_ways = 0", "true or false")),
        ("both_ways = false", "both_way = false", ("unknown key 'both_way'",)),
        ('from = "*"\nto = "*"', 'from = "gpu0"\nto = "cpu"', ("no [[link]]", "'gpu1' to 'cpu'")),
        ('name = "cpu"', 'name = "gpu1"', ("two devices are named 'gpu1'",)),
        (
            'bandwidth = "50 GB/s"',
            'bandwidth = "50 GB/s"\n[[device.level]]\nname = "L2"\ncapacity = "1 MB"\n'
            'bandwidth = "1 TB/s"',
            ("'cpu' has 2 levels", "'gpu0' has 1"),
        ),
    ],
)
def test_errors_of_links(old, new, words):
    assert old in LINKED
    with pytest.raises(HardwareError) as caught:
        read(LINKED.replace(old, new, 1))
    for word in ("mine.toml", *words):
        assert word in str(caught.value)


def test_two_devices_without_a_link_are_refused():
    with pytest.raises(HardwareError, match=r"no \[\[link\]\] leads from 'gpu0' to 'gpu1'"):
        read(LINKED[: LINKED.index("[[link]]")])


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("24 MiB", "capacity", 24 * 2**20),
        ("1.5e3 kB", "capacity", 1.5e6),
        (".5GB", "capacity", 0.5e9),
        ("680 GB/s", "bandwidth", 680e9),
        ("1 µs", "time", 1e-6),
        ("48 TOPS", "rate", 48e12),
        ("1 GMACS", "rate", 2e9),
        ("0.7 TFLOP/s", "rate", 0.7e12),
    ],
)
def test_quantities(text, kind, value):
    assert parse_quantity(text, kind) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("text", ["", "GB", "1", "1 GB", "1 2 GB/s", "nan GB/s", "0x1 GB/s"])
def test_bad_quantities(text):
    with pytest.raises(ValueError, match="not a"):
        parse_quantity(text, "bandwidth")


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_the_machines_of_go(devices):
    machine = egx.hardware.load(f"p100x{devices}")
    # Not p1000, which is another GPU.
    assert machine.device_names == tuple(f"p100-{k}" for k in range(devices))
    assert machine.level_bytes[:, 0].tolist() == [16e9] * devices
    np.testing.assert_allclose(machine.read_bytes_per_s[:, 0], 732e9, rtol=1e-6)
    np.testing.assert_allclose(machine.flops_per_s, 9.3e12, rtol=1e-6)
    between = ~np.eye(devices, dtype=bool)
    # PCI Express 3.0 x16, one direction.
    rate = 16 * 8e9 * 128 / 130 / 8
    np.testing.assert_allclose(np.asarray(machine.link_bytes_per_s)[between], rate, rtol=1e-3)


def test_clusters_with_fast_links():
    """An A100 sends a gigabyte in 3.3 ms, and multiplies in TF32."""
    fast, faster = egx.hardware.load("a100x8"), egx.hardware.load("h100x8")
    assert fast.num_devices == faster.num_devices == 8
    contraction = OP_CLASSES.index("contraction")
    for machine, link, tf32, fp32 in (
        (fast, 300e9, 156e12, 19.5e12),
        (faster, 450e9, 494.5e12, 67e12),
    ):
        np.testing.assert_allclose(machine.link_bytes_per_s[0, 7], link, rtol=1e-6)
        np.testing.assert_allclose(machine.flops_per_s[3, contraction], tf32, rtol=1e-6)
        np.testing.assert_allclose(machine.flops_per_s[3, 0], fp32, rtol=1e-6)


def test_a_slice_counts_hops():
    """Chips 0 to 3 above chips 4 to 7."""
    machine = egx.hardware.load("tpu_v5e_2x4")
    hops = np.round(np.asarray(machine.link_latency_s) * 1e6).astype(int)
    assert hops[0].tolist() == [0, 1, 2, 3, 1, 2, 3, 4]
    assert hops[5].tolist() == [2, 1, 2, 3, 1, 0, 1, 2]
    np.testing.assert_array_equal(hops, hops.T)
    between = ~np.eye(8, dtype=bool)
    np.testing.assert_allclose(np.asarray(machine.link_bytes_per_s)[between], 45e9, rtol=1e-6)
