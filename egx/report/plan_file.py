"""plan.json: a plan as a file, one line a record, and read back field by field."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

import numpy as np

from egx.errors import EgxError, FormatError
from egx.files import read_json, write_whole
from egx.hardware.spec import Hardware
from egx.json_fields import Fields
from egx.report.plan import ModelId, Placed, Plan
from egx.training.result import BOUND_STATUSES

FORMAT = "egx plan"
VERSION = 1
PROBLEM = "memory placement"

NUMBERS = (
    "flops_per_s",
    "level_bytes",
    "read_bytes_per_s",
    "write_bytes_per_s",
    "link_bytes_per_s",
    "link_latency_s",
    "launch_s",
)
SCALARS = (
    "prefetch",
    "latency_s",
    "reference_s",
    "first_fit_s",
    "bound_s",
    "bound_status",
    "algorithm",
    "seed",
    "evaluations",
)


def write_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Writes a plan; the file appears whole or not at all."""
    write_whole(path, plan_text(_to_json(plan)))


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """Reads what `write_plan` wrote.

    Raises:
        FormatError: naming the file, the field, its value and what was expected.
    """
    data = read_json(path, FORMAT, VERSION)
    return _plan(Fields(data, str(path), ""))


def _to_json(plan: Plan) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "egx": plan.egx,
        "problem": PROBLEM,
        "name": plan.name,
        "model": dataclasses.asdict(plan.model),
        "hardware": hardware_json(plan.hardware),
        **{name: getattr(plan, name) for name in SCALARS},
        "weights": [_without_tensor(record) for record in plan.weights],
        "tensors": [dataclasses.asdict(record) for record in plan.tensors],
    }


def hardware_json(hardware: Hardware) -> dict[str, Any]:
    """All numbers of a machine, with its names."""
    return {
        "name": hardware.name,
        "devices": list(hardware.device_names),
        "levels": list(hardware.level_names),
        **{name: _numbers(getattr(hardware, name)) for name in NUMBERS},
    }


def _without_tensor(record: Placed) -> dict[str, Any]:
    entry = dataclasses.asdict(record)
    del entry["tensor"]
    return entry


def _numbers(array: Any) -> Any:
    """Nested lists; float32 by its shortest form, which reads back to the same bits."""
    values = np.asarray(array)
    if values.ndim:
        return [_numbers(row) for row in values]
    return "inf" if np.isinf(values) else float(str(values))


def plan_text(data: dict[str, Any]) -> str:
    """JSON with one line per record, so that plans can be read, compared and searched."""
    lines = []
    for key, value in data.items():
        if isinstance(value, list):
            rows = ",\n".join(f"  {_dump(row)}" for row in value)
            body = f"[\n{rows}\n ]" if value else "[]"
        elif isinstance(value, dict):
            rows = ",\n".join(f"  {json.dumps(k)}: {_dump(v)}" for k, v in value.items())
            body = f"{{\n{rows}\n }}"
        else:
            body = _dump(value)
        lines.append(f" {json.dumps(key)}: {body}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _dump(value: Any) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False)


def _plan(fields: Fields) -> Plan:
    if fields.text("problem") != PROBLEM:
        raise fields.error("problem", f"{PROBLEM!r} or 'execution'")
    scalars = [f.name for f in dataclasses.fields(Plan)]
    fields.only("format", "version", "problem", *scalars)
    hardware = read_hardware(fields.inner("hardware"))
    model = read_model(fields.inner("model"))
    bound, status = read_bound(fields, "bound_s")
    levels = hardware.level_names
    return Plan(
        name=fields.text("name"),
        model=model,
        hardware=hardware,
        prefetch=fields.whole("prefetch"),
        latency_s=fields.number("latency_s"),
        reference_s=fields.number("reference_s"),
        first_fit_s=fields.number("first_fit_s"),
        bound_s=bound,
        bound_status=status,
        algorithm=fields.optional("algorithm", "text"),
        seed=fields.optional("seed", "whole"),
        evaluations=fields.optional("evaluations", "whole"),
        weights=tuple(_placed(r, model, levels, False) for r in fields.records("weights")),
        tensors=tuple(_placed(r, model, levels, True) for r in fields.records("tensors")),
        egx=fields.text("egx"),
    )


def read_bound(fields: Fields, field: str) -> tuple[float | None, str | None]:
    """A bound and, beside it, what is known of it."""
    status = fields.optional("bound_status", "text")
    if status not in (*BOUND_STATUSES, None):
        raise fields.error("bound_status", f"one of {', '.join(BOUND_STATUSES)}, or null")
    bound = fields.optional(field, "number")
    if (bound is None) != (status is None):
        raise fields.error(field, "a number with bound_status beside it, or null for both")
    return bound, status


def read_model(fields: Fields) -> ModelId:
    """How a plan names its model."""
    fields.only(*(f.name for f in dataclasses.fields(ModelId)))
    return ModelId(
        source=fields.text("source"),
        options=dict(fields.inner("options").data),
        digest=fields.text("digest"),
        ops=fields.whole("ops", 1),
        tensors=fields.whole("tensors"),
        unit_bytes=fields.whole("unit_bytes", 1),
    )


def read_hardware(fields: Fields) -> Hardware:
    """The machine that `hardware_json` wrote."""
    fields.only("name", "devices", "levels", *NUMBERS)
    numbers = {}
    for name in NUMBERS:
        try:
            numbers[name] = np.asarray(fields.data.get(name, "nothing"), np.float64)
        except (TypeError, ValueError):
            raise fields.error(name, "a rectangular list of numbers") from None
    devices, levels = fields.names("devices"), fields.names("levels")
    try:
        hardware = Hardware(
            **numbers, name=fields.text("name"), level_names=levels, device_names=devices
        )
    except EgxError as error:
        raise FormatError(f"{fields.file}: {fields.where}: {error}") from None
    if len(levels) != hardware.num_levels or len(set(levels)) != len(levels):
        raise fields.error("levels", f"{hardware.num_levels} different names, as level_bytes has")
    if len(devices) != hardware.num_devices:
        raise fields.error("devices", f"{hardware.num_devices} names, as level_bytes has")
    return hardware


def _placed(fields: Fields, model: ModelId, levels: tuple[str, ...], is_tensor: bool) -> Placed:
    names = [f.name for f in dataclasses.fields(Placed) if is_tensor or f.name != "tensor"]
    fields.only(*names)
    index = fields.whole("level_index", 0, len(levels) - 1)
    level = fields.text("level")
    if level != levels[index]:
        raise fields.error("level", f"{levels[index]!r}, the name of level {index}")
    first = fields.whole("first_step", 0, model.ops - 1)
    return Placed(
        op=fields.text("op"),
        op_index=fields.whole("op_index", 0, model.ops - 1),
        op_type=fields.text("op_type"),
        tensor=fields.text("tensor") if is_tensor else None,
        level=level,
        level_index=index,
        bytes=fields.whole("bytes"),
        first_step=first,
        last_step=fields.whole("last_step", first, model.ops - 1),
    )
