"""Ops along the axis of a picture: one column each, or several ops in a column when there are many.

Shapes: N ops, M levels, B columns, E = B + 1 edges of columns.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int, Shaped

MAX_COLUMNS = 400


def column_edges(steps: int, columns: int = MAX_COLUMNS) -> Int[np.ndarray, " E"]:
    """Boundaries of the columns: one per op, or evenly many ops in each when there are too many."""
    if steps <= columns:
        return np.arange(steps + 1)
    return np.round(np.linspace(0, steps, columns + 1)).astype(int)


def level_shares(
    level: Int[np.ndarray, " N"],
    size: Int[np.ndarray, " N"],
    edges: Int[np.ndarray, " E"],
    levels: int,
) -> Float[np.ndarray, "B M"]:
    """The share of a column's bytes on each level; all 0 where there are no bytes."""
    amount = np.zeros((len(size), levels))
    amount[np.arange(len(size)), level] = size
    column = np.add.reduceat(amount, edges[:-1], axis=0)
    return column / np.maximum(column.sum(axis=1, keepdims=True), 1)


def column_max(
    values: Shaped[np.ndarray, " N"], edges: Int[np.ndarray, " E"]
) -> Float[np.ndarray, " B"]:
    """The largest of the values that share a column."""
    return np.maximum.reduceat(values, edges[:-1]).astype(float)


def step_label(steps: int, edges: Int[np.ndarray, " E"]) -> str:
    """What to write under the axis."""
    columns = len(edges) - 1
    if columns >= steps:
        return "op, in the order of execution"
    return f"op, in the order of execution ({steps:,} ops in {columns} columns)"
