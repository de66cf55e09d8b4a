"""This machine's devices and links, measured with JAX and written as a machine file.

What is measured is what JAX programs reach, one program at a time: rates are those of programs
so large that their launch does not matter.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from egx.errors import HardwareError
from egx.execution.devices import checked_devices
from egx.execution.timing import median_seconds
from egx.files import write_whole
from egx.hardware.spec import Hardware
from egx.hardware.toml import load


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much work a measurement does.

    `matrix` (rows of the square matrices that are multiplied), `elements` (of the arrays that are
    read and written; a quarter of them in the elementwise program) and `copy_bytes` (sent between
    two devices) are where a measurement begins: each is doubled until a run takes `launches`
    times a launch (a copy: four times its latency), or is as large as `largest` times the first.
    Larger arrays than needed would measure how fast a host finds new pages for them. `steps`:
    multiply-adds an element in the elementwise program, enough that memory does not limit it.
    `row`: programs, or copies, in a row for the time of a launch, and the latency of a copy.
    """

    matrix: int = 512
    elements: int = 2**20
    copy_bytes: int = 2**22
    steps: int = 32
    row: int = 64
    launches: int = 16
    largest: int = 64
    repeats: int = 9

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise HardwareError(
                    f"sizes: {field.name} must be a whole number of 1 or more, got {value!r}"
                )


@dataclasses.dataclass(frozen=True)
class _Measured:
    """A device's numbers, in units of one: FLOP/s, B/s, seconds, bytes."""

    name: str
    contraction: float
    elementwise: float
    read: float
    write: float
    launch: float
    capacity: float
    capacity_source: str


def calibrate(
    path: str | os.PathLike[str],
    *,
    name: str | None = None,
    devices: Sequence[Any] | None = None,
    sizes: Sizes | None = None,
    dtype: Any = np.float32,
    overwrite: bool = False,
) -> Hardware:
    """Measures this machine's JAX devices and links, and writes them as a machine file.

    Measured per device: FLOP/s of a matrix product and of elementwise multiply-adds, bytes a
    second read (a sum) and written (a fill), seconds that each of many tiny programs in a row
    takes; between every two devices: seconds of each of many small copies back and forth, and
    bytes a second of a large one, one way at a time. All are medians. The capacity is what the
    device says, or else a share of the host's memory. Reductions and what is opaque count as
    elementwise. Nothing else should run meanwhile.

    Args:
        path: the .toml file to write; `egx.hardware.load` reads it, as does `--hardware`.
        name: of the machine; by default the file's.
        devices: what to measure; by default all of `jax.devices()`.
        sizes: how much work a measurement does.
        dtype: the floating-point type of matrices and elements.
        overwrite: replace a file that is there.

    Returns:
        The machine, as it is read back from the file.

    Raises:
        HardwareError: before anything is measured, for a path that does not end in .toml, holds
            a file or whose folder cannot be made, and for impossible arguments.
    """
    path = _target(path, overwrite)
    chosen = checked_devices(devices, HardwareError)
    names = _names(chosen)
    if len(set(names)) < len(names):
        raise HardwareError(f"devices names one twice: {', '.join(names)}")
    if name is not None and not isinstance(name, str):
        raise HardwareError(f"name must be a string, got {name!r}")
    if not isinstance(sizes, Sizes | None):
        raise HardwareError(f"sizes must be a Sizes, got {sizes!r}")
    sizes = sizes or Sizes()
    dtype = _floating(dtype)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HardwareError(f"{path}: cannot be written: {error.strerror or error}") from error
    measured = [
        _measure(device, label, sizes, dtype, len(chosen))
        for device, label in zip(chosen, names, strict=True)
    ]
    links = {
        (names[a], names[b]): _link(chosen[a], chosen[b], sizes)
        for a in range(len(chosen))
        for b in range(len(chosen))
        if a != b
    }
    text = _toml(name or path.stem, chosen, measured, links, dtype.name)
    try:
        write_whole(path, text)
    except OSError as error:
        raise HardwareError(f"{path}: cannot be written: {error.strerror or error}") from error
    return load(path)


def _target(path: Any, overwrite: bool) -> Path:
    """Where the file is to be."""
    if not isinstance(path, str | os.PathLike):
        raise HardwareError(f"path must be that of a .toml file, got {path!r}")
    path = Path(path)
    if path.suffix != ".toml":
        raise HardwareError(f"{path}: expected a path that ends in .toml")
    if path.is_dir():
        raise HardwareError(f"{path}: is a folder; expected the path of a file")
    if path.exists() and not overwrite:
        raise HardwareError(f"{path}: is there already; choose another path, or overwrite it")
    return path


def _floating(dtype: Any) -> np.dtype:
    """A type that JAX computes in here: a narrower one would be measured under its name."""
    try:
        found = np.dtype(dtype)
    except TypeError as error:
        raise HardwareError(f"dtype: {error}") from None
    if not jnp.issubdtype(found, jnp.floating):
        raise HardwareError(f"dtype must be a floating-point type, got {found.name}")
    narrow = np.dtype(jax.dtypes.canonicalize_dtype(found))
    if narrow != found:
        raise HardwareError(
            f"dtype: JAX computes {found.name} as {narrow.name} unless jax_enable_x64 is set"
        )
    return found


def _names(devices: Sequence[Any]) -> list[str]:
    """ "cpu0" and the like; a name may not be another's kind."""
    return [f"{device.platform}{device.id}" for device in devices]


def _measure(device: Any, name: str, sizes: Sizes, dtype: Any, share: int) -> _Measured:
    rng = np.random.default_rng(0)

    def put(*shape: int) -> jax.Array:
        return jax.device_put(rng.random(shape, np.float32).astype(dtype), device)

    half = jax.device_put(np.asarray(0.5, dtype), device)
    double = jax.jit(lambda x: x + x)

    # Not a single element: a runtime may run that in the caller's own thread, which is cheaper.
    little = put(4096)

    def in_a_row() -> jax.Array:
        x = little
        for _ in range(sizes.row):
            x = double(x)
        return x

    launch = median_seconds(in_a_row, repeats=sizes.repeats, warmup=2) / sizes.row

    def rate(first: int, work: Callable[[int], tuple[float, Callable[[], Any]]]) -> float:
        return _grown_rate(first, work, sizes, launch, sizes.launches * launch)

    def product(n: int) -> tuple[float, Callable[[], Any]]:
        program, a, b = jax.jit(jnp.matmul), put(n, n), put(n, n)
        return 2.0 * n**3, lambda: program(a, b)

    def polynomial(count: int) -> tuple[float, Callable[[], Any]]:
        program, x = jax.jit(_polynomial(sizes.steps)), put(count)
        return 2.0 * count * sizes.steps, lambda: program(x)

    def read(count: int) -> tuple[float, Callable[[], Any]]:
        program, x = jax.jit(jnp.sum), put(count)
        return float(x.nbytes), lambda: program(x)

    def write(count: int) -> tuple[float, Callable[[], Any]]:
        program = jax.jit(lambda value: jnp.broadcast_to(value, (count,)))
        return float(half.nbytes * count), lambda: program(half)

    capacity, source = _capacity(device, share)
    return _Measured(
        name=name,
        contraction=rate(sizes.matrix, product),
        elementwise=rate(max(sizes.elements // 4, 1), polynomial),
        read=rate(sizes.elements, read),
        write=rate(sizes.elements, write),
        launch=launch,
        capacity=capacity,
        capacity_source=source,
    )


def _grown_rate(
    first: int,
    work: Callable[[int], tuple[float, Callable[[], Any]]],
    sizes: Sizes,
    overhead_s: float,
    enough_s: float,
) -> float:
    """Work a second of the first size that takes `enough_s`; `work(size)` is (how much, run)."""
    size = first
    while True:
        amount, run = work(size)
        took = median_seconds(run, repeats=sizes.repeats, warmup=2)
        if took >= enough_s or size >= first * sizes.largest:
            # What is all overhead says nothing of the rate; it is at least that of the whole.
            return amount / max(took - overhead_s, 0.1 * took)
        size *= 2


def _polynomial(steps: int) -> Callable[[jax.Array], jax.Array]:
    """`steps` multiply-adds, each of which needs the one before."""

    def program(x: jax.Array) -> jax.Array:
        y = x
        for _ in range(steps):
            y = y * x + x
        return y

    return program


def _capacity(device: Any, share: int) -> tuple[float, str]:
    """(bytes, where that is from)."""
    stats = device.memory_stats() if hasattr(device, "memory_stats") else None
    if stats and stats.get("bytes_limit"):
        return float(stats["bytes_limit"]), "reported by the device"
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return float(total // share), f"1/{share} of the host's memory"


def _link(source: Any, target: Any, sizes: Sizes) -> tuple[float, float]:
    """(bytes a second, seconds of latency) of a copy; the latency is that of both ways."""
    few = jax.block_until_ready(jax.device_put(np.ones(4, np.uint8), source))

    def there_and_back() -> jax.Array:
        x = few
        for k in range(sizes.row):
            x = jax.device_put(x, source if k % 2 else target)
        return x

    latency = median_seconds(there_and_back, repeats=sizes.repeats, warmup=2) / sizes.row

    def copy(count: int) -> tuple[float, Callable[[], Any]]:
        x = jax.block_until_ready(jax.device_put(np.ones(count, np.uint8), source))
        return float(count), lambda: jax.device_put(x, target)

    return _grown_rate(sizes.copy_bytes, copy, sizes, latency, 4 * latency), latency


def _toml(
    name: str,
    devices: Sequence[Any],
    measured: Sequence[_Measured],
    links: dict[tuple[str, str], tuple[float, float]],
    dtype: str,
) -> str:
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    kinds = ", ".join(dict.fromkeys(_clean(device.device_kind) for device in devices))
    lines = [
        f'name = "{_clean(name)}"',
        f'description = "{len(devices)} JAX devices ({kinds}), {dtype}, jax {jax.__version__}"',
    ]
    for device, found in zip(devices, measured, strict=True):
        source = f"measured by egx.calibrate on {_clean(device.device_kind)} at {date}"
        lines += [
            "",
            "[[device]]",
            f'name = "{found.name}"',
            f'launch = {{ value = "{found.launch * 1e6:.4g} us", source = "{source}" }}',
            "",
            "[[device.level]]",
            'name = "memory"',
            f'capacity = {{ value = "{found.capacity:.0f} B", '
            f'source = "{found.capacity_source}, {date}" }}',
            f'read = {{ value = "{found.read / 1e9:.4g} GB/s", source = "{source}" }}',
            f'write = {{ value = "{found.write / 1e9:.4g} GB/s", source = "{source}" }}',
            "",
            "[device.rates]",
            f'contraction = {{ rate = "{found.contraction / 1e9:.4g} GFLOP/s", '
            f'source = "{source}" }}',
            f'other = {{ rate = "{found.elementwise / 1e9:.4g} GFLOP/s", source = "{source}" }}',
        ]
    for (sender, receiver), (rate, latency) in links.items():
        lines += [
            "",
            "[[link]]",
            f'from = "{sender}"',
            f'to = "{receiver}"',
            "both_ways = false",
            f'bandwidth = "{rate / 1e9:.4g} GB/s"',
            f'latency = "{latency * 1e6:.4g} us"',
            f'source = "measured by egx.calibrate between {sender} and {receiver} at {date}"',
        ]
    return "\n".join(lines) + "\n"


def _clean(text: str) -> str:
    """Without what TOML's strings would have to escape."""
    return re.sub(r'["\\\x00-\x1f]', "", text)
