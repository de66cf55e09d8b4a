"""Find the best way to run a neural network's computation graph on given hardware."""

from egx import hardware, zoo
from egx.api import load, optimize
from egx.graph.builder import GraphBuilder
from egx.graph.graph import Graph, Model
from egx.hardware.spec import Hardware
from egx.problems.memory_placement import MemoryPlacement
from egx.search.registry import searches
from egx.training.result import Result

__all__ = [
    "Graph",
    "GraphBuilder",
    "Hardware",
    "MemoryPlacement",
    "Model",
    "Result",
    "hardware",
    "load",
    "optimize",
    "searches",
    "zoo",
]
