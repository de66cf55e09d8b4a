"""What people look at: tables, pictures, and plans that can be checked."""

from egx.report.check import PlanCheck, check_plan
from egx.report.curves import convergence
from egx.report.folder import write_folder
from egx.report.latency_plot import latency_by_op, latency_parts
from egx.report.plan import Plan, make_plan
from egx.report.plan_file import read_plan, write_plan
from egx.report.plots import level_strips, occupancy_over_steps, transition
from egx.report.tables import Table, hardware_table, level_table, model_table
from egx.report.verdict import Verdict, judge

__all__ = [
    "Plan",
    "PlanCheck",
    "Table",
    "Verdict",
    "check_plan",
    "convergence",
    "hardware_table",
    "judge",
    "latency_by_op",
    "latency_parts",
    "level_strips",
    "level_table",
    "make_plan",
    "model_table",
    "occupancy_over_steps",
    "read_plan",
    "transition",
    "write_folder",
    "write_plan",
]
