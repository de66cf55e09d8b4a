"""HDP's log-probability of one grouping and one placement in plain NumPy, double precision."""

from __future__ import annotations

from typing import Any

import numpy as np


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max()
    return x - np.log(np.exp(x).sum())


class Oracle:
    """`weights` are the network's leaves by name, `context` its inputs, as NumPy arrays."""

    def __init__(self, weights: dict[str, Any], context: dict[str, np.ndarray], c: float, t: float):
        self.w, self.x, self.c, self.t = weights, context, c, t

    def dense(self, name: str, x: np.ndarray) -> np.ndarray:
        weight, bias = self.w[name]
        return x @ weight + bias

    def log_p(self, x: np.ndarray) -> np.ndarray:
        return log_softmax(self.c * np.tanh(x / self.t))

    def cell(self, name: str, h: np.ndarray, c: np.ndarray, x: np.ndarray) -> Any:
        gates = self.dense(f"{name}.inputs", x) + self.dense(f"{name}.states", h)
        read, forget, new, show = np.split(gates, 4)
        c = sigmoid(forget + 1.0) * c + sigmoid(read) * np.tanh(new)
        return sigmoid(show) * np.tanh(c), c

    def grouping(self, groups: list[int]) -> float:
        total = 0.0
        for op, group in enumerate(groups):
            hidden = np.maximum(self.dense("grouper.0", self.x["inputs"][op]), 0.0)
            total += self.log_p(self.dense("grouper.1", hidden))[group]
        return total

    def embeddings(self, groups: list[int], count: int) -> dict[int, np.ndarray]:
        ops = len(groups)
        sent = np.zeros((count, count))
        for a, b, size in zip(self.x["producer"], self.x["consumer"], self.x["bytes"], strict=True):
            sent[groups[a], groups[b]] += size
        rows = {}
        for g in sorted(set(groups)):
            mine = [i for i in range(ops) if groups[i] == g]
            row = [
                self.x["inputs"][mine].mean(0),
                self.x["sizes"][mine].sum(0),
                [len(mine) / ops],
                sent[g] / max(sent[g].sum(), 1.0),
                sent[:, g] / max(sent[:, g].sum(), 1.0),
            ]
            hidden = self.dense("embedding", np.concatenate(row))
            rows[g] = np.maximum(hidden, 0.0)
        return rows

    def placement(self, groups: list[int], chosen: dict[str, list[int]], count: int) -> float:
        width = self.w["encoder.states"][0].shape[0]
        h, c, states = np.zeros(width), np.zeros(width), {}
        for g, row in self.embeddings(groups, count).items():
            h, c = self.cell("encoder", h, c, row)
            states[g] = h
        h, c, total = np.zeros(width), np.zeros(width), 0.0
        before = {name: len(self.w[f"last.{name}"]) - 1 for name in chosen}
        for g, state in states.items():
            last = sum(self.w[f"last.{name}"][before[name]] for name in chosen)
            h, c = self.cell("decoder", h, c, np.concatenate([state, last]))
            scores = [
                self.dense(
                    "attention.2",
                    np.tanh(self.dense("attention.0", s) + self.dense("attention.1", h)),
                )[0]
                for s in states.values()
            ]
            weight = np.exp(log_softmax(np.array(scores)))
            seen = np.concatenate([h, weight @ np.array(list(states.values()))])
            for name in chosen:
                before[name] = chosen[name][g]
                total += self.log_p(self.dense(f"heads.{name}", seen))[chosen[name][g]]
        return total
