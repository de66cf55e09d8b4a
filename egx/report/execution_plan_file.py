"""plan.json of an Execution problem: written with one line a record, read field by field."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from egx.errors import FormatError
from egx.files import read_json, write_whole
from egx.hardware.spec import Hardware
from egx.json_fields import Fields
from egx.problems.execution import DECISIONS, OPTIONS
from egx.report.execution_plan import ExecutionPlan, ScheduledOp, ScheduledTransfer
from egx.report.plan import ModelId
from egx.report.plan_file import (
    FORMAT,
    VERSION,
    hardware_json,
    plan_text,
    read_bound,
    read_hardware,
    read_model,
)

PROBLEM = "execution"


def write_execution_plan(plan: ExecutionPlan, path: str | os.PathLike[str]) -> None:
    """Writes a plan; the file appears whole or not at all."""
    content: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "egx": plan.egx,
        "problem": PROBLEM,
    }
    for field in dataclasses.fields(plan):
        value = getattr(plan, field.name)
        if field.name == "model":
            value = dataclasses.asdict(value)
        elif field.name == "hardware":
            value = hardware_json(value)
        elif field.name in ("ops", "transfers"):
            value = [dataclasses.asdict(record) for record in value]
        elif isinstance(value, tuple):
            value = list(value)
        if field.name != "egx":
            content[field.name] = value
    write_whole(path, plan_text(content))


def is_execution_plan(path: str | os.PathLike[str]) -> bool:
    """Whether a plan file is of an Execution problem; its other fields are not looked at.

    Raises:
        FormatError: if the file is no plan of a version that this egx reads.
    """
    return read_json(path, FORMAT, VERSION).get("problem") == PROBLEM


def read_execution_plan(path: str | os.PathLike[str]) -> ExecutionPlan:
    """Reads what `write_execution_plan` wrote.

    Raises:
        FormatError: naming the file, the field, its value and what was expected.
    """
    fields = Fields(read_json(path, FORMAT, VERSION), str(path), "")
    if fields.text("problem") != PROBLEM:
        raise fields.error("problem", repr(PROBLEM))
    fields.only(
        "format", "version", "problem", *(f.name for f in dataclasses.fields(ExecutionPlan))
    )
    hardware = read_hardware(fields.inner("hardware"))
    model = read_model(fields.inner("model"))
    bound, status = read_bound(fields, "bound")
    levels = fields.whole("fusion_levels", 1)
    given = _decisions(fields, "given")
    sending = None
    if fields.data.get("transfer_priority") is not None:
        sending = fields.listed("transfer_priority", "real")
    if ("transfer_priority" in given) != (sending is not None):
        raise fields.error("transfer_priority", "a list if `given` names it, else null")
    return ExecutionPlan(
        name=fields.text("name"),
        model=model,
        hardware=hardware,
        objective=fields.one_of("objective", OPTIONS["objective"]),
        order=fields.one_of("order", OPTIONS["order"]),
        transfer_mode=fields.one_of("transfer_mode", OPTIONS["transfers"]),
        fusion_levels=levels,
        measured=fields.flag("measured"),
        decide=_decisions(fields, "decide"),
        cost=fields.number("cost"),
        fits=fields.flag("fits"),
        makespan_s=fields.number("makespan_s"),
        peak_bytes=_per_device(fields, "peak_bytes", hardware),
        peak_bytes_over_time=_per_device(fields, "peak_bytes_over_time", hardware),
        reference_cost=fields.number("reference_cost"),
        bound=bound,
        bound_status=status,
        algorithm=fields.optional("algorithm", "text"),
        seed=fields.optional("seed", "whole"),
        evaluations=fields.optional("evaluations", "whole"),
        given=given,
        transfer_priority=sending,
        ops=tuple(_op(record, model, hardware, levels) for record in fields.records("ops")),
        transfers=tuple(_transfer(r, model, hardware) for r in fields.records("transfers")),
        egx=fields.text("egx"),
    )


def _decisions(fields: Fields, field: str) -> tuple[str, ...]:
    names = fields.listed(field, "text")
    if not set(names) <= set(DECISIONS) or len(set(names)) != len(names):
        raise fields.error(field, f"different ones of {', '.join(DECISIONS)}")
    return names


def _per_device(fields: Fields, field: str, hardware: Hardware) -> tuple[int, ...]:
    values = fields.listed(field, "whole")
    if len(values) != hardware.num_devices:
        raise fields.error(field, f"{hardware.num_devices} numbers, one per device")
    return values


def _device(fields: Fields, field: str, hardware: Hardware) -> tuple[str, int]:
    """A device by its name, and by its index in `field`_index."""
    index = fields.whole(f"{field}_index", 0, hardware.num_devices - 1)
    name = fields.text(field)
    if name != hardware.device_names[index]:
        expected = f"{hardware.device_names[index]!r}, the name of device {index}"
        raise fields.error(field, expected)
    return name, index


def _op(fields: Fields, model: ModelId, hardware: Hardware, levels: int) -> ScheduledOp:
    fields.only(*(f.name for f in dataclasses.fields(ScheduledOp)))
    device, index = _device(fields, "device", hardware)
    return ScheduledOp(
        op=fields.text("op"),
        op_index=fields.whole("op_index", 0, model.ops - 1),
        op_type=fields.text("op_type"),
        device=device,
        device_index=index,
        priority=fields.real("priority"),
        fusion=fields.whole("fusion", 0, levels - 1),
        fused_into=fields.whole("fused_into", 0, model.ops - 1),
        place=fields.whole("place"),
        start_s=fields.number("start_s"),
        finish_s=fields.number("finish_s"),
    )


def _transfer(fields: Fields, model: ModelId, hardware: Hardware) -> ScheduledTransfer:
    fields.only(*(f.name for f in dataclasses.fields(ScheduledTransfer)))
    if model.tensors == 0:
        raise FormatError(f"{fields.file}: {fields.where}: the model has no tensor to send")
    source, source_index = _device(fields, "source", hardware)
    target, target_index = _device(fields, "target", hardware)
    return ScheduledTransfer(
        tensor=fields.text("tensor"),
        tensor_index=fields.whole("tensor_index", 0, model.tensors - 1),
        use_index=fields.whole("use_index"),
        source=source,
        source_index=source_index,
        target=target,
        target_index=target_index,
        bytes=fields.whole("bytes"),
        place=fields.whole("place"),
        start_s=fields.number("start_s"),
        finish_s=fields.number("finish_s"),
    )
