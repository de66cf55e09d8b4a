"""`egx calibrate`; `egx.cli` has its options."""

from __future__ import annotations

from argparse import Namespace

from egx.execution.calibration import calibrate as measure
from egx.report.console import console, print_table
from egx.report.tables import hardware_table


def calibrate(options: Namespace) -> int:
    """Measures this machine's JAX devices and writes them as a machine file."""
    out = console()
    machine = measure(options.out, name=options.name, overwrite=options.overwrite)
    for device in range(machine.num_devices):
        print_table(out, hardware_table(machine, device))
    out.print(f"wrote {options.out}; use it with --hardware {options.out}")
    return 0
