"""Fusion in plain Python, slow and obvious, written from the semantics page.

Where the page leaves room, this is what was chosen:

1. An op is asked once, on its own level; when it joins, all that joined it before comes along.
2. "v is neither opaque nor a reduction" is asked of the op itself: whatever joined it before
   passed the same question.
3. A consumer that reads the op several times is one consumer.
4. Ops of padding keep to themselves.
"""

from __future__ import annotations

from typing import Any

import numpy as np

REDUCTION, CONTRACTION, OPAQUE = 2, 3, 4
LARGEST = 64


def clusters(graph: Any, fusion: Any) -> list[int]:
    """The root of every op, padding included."""
    ops = int(np.sum(np.asarray(graph.op_mask)))
    uses = int(np.sum(np.asarray(graph.use_mask)))
    kind = np.asarray(graph.op_class).tolist()
    producer = np.asarray(graph.tensor_producer).tolist()
    held = {
        producer[t]
        for t in range(len(producer))
        if graph.tensor_mask[t] and graph.tensor_is_output[t]
    }
    pairs = [(producer[int(graph.use_tensor[u])], int(graph.use_consumer[u])) for u in range(uses)]
    level = np.asarray(fusion).tolist()
    cluster = [{i} for i in range(ops)]  # op -> the set that it is in

    def holds(members: set[int], what: int) -> bool:
        return any(kind[i] == what for i in members)

    for now in range(max(level, default=0), 0, -1):
        for v in reversed(range(ops)):
            if level[v] != now:
                continue
            consumers = {c for p, c in pairs if p == v}
            if not consumers or v in held or kind[v] in (REDUCTION, OPAQUE):
                continue
            target = cluster[min(consumers)]
            if not consumers <= target or holds(target, OPAQUE):
                continue
            if holds(target, CONTRACTION) and holds(cluster[v], CONTRACTION):
                continue
            union = target | cluster[v]
            if len(union) > LARGEST:
                continue
            for i in union:
                cluster[i] = union
    return [max(members) for members in cluster] + list(range(ops, len(kind)))
