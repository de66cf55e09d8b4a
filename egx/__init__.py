"""Find the best way to run a neural network's computation graph on given hardware."""

from egx import errors, hardware, zoo
from egx.api import compare, optimize, optimize_seeds
from egx.baselines.exact import ExactSolution, exact
from egx.comparison import Comparison
from egx.execution.calibration import calibrate
from egx.execution.run import execute, measured_evaluator
from egx.formats.jaxpr import trace
from egx.graph.builder import GraphBuilder
from egx.graph.graph import Graph, Model
from egx.hardware.spec import Hardware
from egx.loading import load, load_workload
from egx.policies.loading import load_policy
from egx.problems.execution import Execution
from egx.problems.memory_placement import MemoryPlacement
from egx.problems.workloads import execution_problem
from egx.search.registry import searches
from egx.training.result import Result
from egx.training.trainer import train

__all__ = [
    "Comparison",
    "ExactSolution",
    "Execution",
    "Graph",
    "GraphBuilder",
    "Hardware",
    "MemoryPlacement",
    "Model",
    "Result",
    "calibrate",
    "compare",
    "errors",
    "exact",
    "execute",
    "execution_problem",
    "hardware",
    "load",
    "load_policy",
    "load_workload",
    "measured_evaluator",
    "optimize",
    "optimize_seeds",
    "searches",
    "trace",
    "train",
    "zoo",
]
