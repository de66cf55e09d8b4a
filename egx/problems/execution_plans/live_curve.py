"""Live memory of one device along an order, while the plan that fills it is being made."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

BLOCK = 256
_CLOSED = -(2**62)


class LiveCurve:
    """Units live at each place that was opened so far, weights included.

    A tensor always lives up to the newest place when its life is prolonged, so that memory is
    added from some place on. Places stand in blocks that remember what was added to all of them:
    each operation looks at one block and at the list of blocks.
    """

    def __init__(self, places: int):
        blocks = places // BLOCK + 1
        self.value = np.full(blocks * BLOCK, _CLOSED, np.int64)
        self.added = np.zeros(blocks, np.int64)
        self.top = np.full(blocks, _CLOSED, np.int64)
        self.open_blocks = 0
        self.weights = 0
        self.held = 0  # graph outputs, which stay
        self.highest = 0  # of the curve without weights

    def open(self, place: int) -> None:
        """Opens the next place."""
        block = place // BLOCK
        self.open_blocks = block + 1
        self.value[place] = self.held - self.added[block]
        self.top[block] = max(self.top[block], self.held)
        self.highest = max(self.highest, self.held)

    def _since(self, place: int) -> int:
        """The most at any place from `place` on."""
        block = place // BLOCK
        first = self.value[place : (block + 1) * BLOCK].max() + self.added[block]
        if block + 1 == self.open_blocks:
            return int(first)
        return int(max(first, self.top[block + 1 : self.open_blocks].max()))

    def peak_with(self, ranges: Sequence[tuple[int, int]], weights: int = 0) -> int:
        """The peak once (place, units) are added, each from its place on, and `weights`."""
        peak, total = self.highest, 0
        for place, units in sorted(ranges):
            total += units
            peak = max(peak, self._since(place) + total)
        return peak + self.weights + weights

    def add(self, place: int, units: int) -> None:
        """Adds units from `place` on."""
        block = place // BLOCK
        part = self.value[place : (block + 1) * BLOCK]
        part += units
        self.top[block] = self.value[block * BLOCK : (block + 1) * BLOCK].max() + self.added[block]
        if block + 1 < self.open_blocks:
            self.added[block + 1 : self.open_blocks] += units
            self.top[block + 1 : self.open_blocks] += units
        self.highest = max(self.highest, int(self.top[: self.open_blocks].max()))
