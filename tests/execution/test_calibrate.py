"""The machine file that calibration writes: complete, read back as measured, with its sources."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import egx
from egx.cli import main
from egx.errors import HardwareError
from egx.execution.calibration import Sizes

TINY = Sizes(matrix=32, elements=2**12, copy_bytes=2**12, steps=8, row=4, largest=1, repeats=3)


def test_measures_devices_and_links_into_a_file_that_loads(tmp_path):
    path = tmp_path / "here.toml"
    machine = egx.calibrate(path, devices=jax.devices()[:2], sizes=TINY)
    assert (machine.name, machine.num_devices, machine.num_levels) == ("here", 2, 1)
    assert machine.device_names == ("cpu0", "cpu1")
    # Nothing on a real computer is outside of these.
    assert (np.asarray(machine.flops_per_s) > 1e4).all()
    assert (np.asarray(machine.flops_per_s) < 1e17).all()
    for rate in (machine.read_bytes_per_s, machine.write_bytes_per_s):
        assert ((np.asarray(rate) > 1e4) & (np.asarray(rate) < 1e15)).all()
    assert ((np.asarray(machine.launch_s) > 1e-8) & (np.asarray(machine.launch_s) < 10)).all()
    between = ~np.eye(2, dtype=bool)
    assert (np.asarray(machine.link_latency_s)[between] > 0).all()
    assert (np.asarray(machine.link_bytes_per_s)[between] > 1e4).all()
    assert machine.level_bytes.min() > 2**20
    again = egx.hardware.load(path)
    np.testing.assert_array_equal(machine.flops_per_s, again.flops_per_s)
    sources = [found.source for found in egx.hardware.sources(path).values()]
    assert all(source and "20" in source for source in sources)
    assert sum("measured by egx.calibrate" in source for source in sources) == 2 * 5 + 2 * 2
    # It is a machine like any other.
    model = egx.trace(lambda x: (x @ x).sum(), jax.ShapeDtypeStruct((64, 64), np.float32))
    assert egx.Execution(model, machine).reference_cost > 0


def test_mistakes_name_what_is_wrong(tmp_path, capsys, unchecked):
    with pytest.raises(HardwareError, match=r"machine.txt: expected a path that ends in .toml"):
        egx.calibrate(tmp_path / "machine.txt")
    path = tmp_path / "here.toml"
    path.write_text("mine")
    with pytest.raises(HardwareError, match=r"here.toml: is there already"):
        egx.calibrate(path)
    assert path.read_text() == "mine"
    with pytest.raises(HardwareError, match="devices is empty"):
        egx.calibrate(tmp_path / "none.toml", devices=[])
    (tmp_path / "folder.toml").mkdir()
    # All of these before anything is measured.
    for given, words in (
        ({"path": 3}, "path must be that of a .toml file, got 3"),
        ({"path": tmp_path / "folder.toml"}, "folder.toml: is a folder"),
        ({"path": path / "deep.toml"}, "deep.toml: cannot be written"),
        ({"devices": jax.devices()[0]}, "devices must be a list of JAX devices"),
        ({"devices": ["cpu"]}, "devices must hold JAX devices, .* got 'cpu'"),
        ({"devices": jax.devices()[:1] * 2}, "devices names one twice: cpu0, cpu0"),
        ({"name": 3}, "name must be a string, got 3"),
        ({"sizes": {"row": 4}}, "sizes must be a Sizes, got {'row': 4}"),
        ({"dtype": np.int32}, "dtype must be a floating-point type, got int32"),
        ({"dtype": np.float64}, "JAX computes float64 as float32"),
    ):
        with pytest.raises(HardwareError, match=words):
            egx.calibrate(**{"path": tmp_path / "new.toml", **given})
    with pytest.raises(HardwareError, match="sizes: row must be a whole number of 1 or more"):
        Sizes(row=0)
    assert not (tmp_path / "new.toml").exists()
    assert main(["calibrate", "--out", str(path)]) == 2
    assert "is there already" in capsys.readouterr().err
