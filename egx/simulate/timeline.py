"""What a plan does when: items with their times, and live memory along items and along time.

Host-side, NumPy. Along the order of items (semantics 4.2) memory is counted as the peak of a plan
is. Along time a copy lives from the start of the op or transfer that makes it to the end of the
last one that needs it; since items of several devices overlap, that curve may be higher.

Shapes: I items, E events, N ops, D devices.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Array, Bool, Float, Int

from egx.graph.graph import Graph, real_sizes
from egx.simulate.lanes import Trace


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Items in their order; for transfers `op` and `source` are the producer and its device.

    `use` names a transfer and is -1 for ops, as `tensor` is. `root` says which item holds a fused
    op. `live_bytes` is read when an item's outputs or copy exist and nothing was dropped yet;
    `event_live_bytes` holds from its event to the next. Weights are included in both.
    """

    op: Int[np.ndarray, " I"]
    use: Int[np.ndarray, " I"]
    tensor: Int[np.ndarray, " I"]
    source: Int[np.ndarray, " I"]
    device: Int[np.ndarray, " I"]
    start_s: Float[np.ndarray, " I"]
    finish_s: Float[np.ndarray, " I"]
    live_bytes: Int[np.ndarray, "I D"]
    event_s: Float[np.ndarray, " E"]
    event_live_bytes: Int[np.ndarray, "E D"]
    weight_bytes: Int[np.ndarray, " D"]
    root: Int[np.ndarray, " N"]

    @property
    def is_transfer(self) -> Bool[np.ndarray, " I"]:
        return self.use >= 0

    @property
    def makespan_s(self) -> float:
        return float(self.finish_s.max(initial=0.0))

    @property
    def peak_bytes(self) -> Int[np.ndarray, " D"]:
        """Along the order of items: what the problem counts."""
        return np.maximum(self.live_bytes.max(0, initial=0), self.weight_bytes)

    @property
    def peak_bytes_over_time(self) -> Int[np.ndarray, " D"]:
        return np.maximum(self.event_live_bytes.max(0, initial=0), self.weight_bytes)


def timeline(
    graph: Graph,
    trace: Trace,
    device: Int[np.ndarray, " N"],
    root: Int[np.ndarray, " N"] | None,
    num_devices: int,
) -> Timeline:
    """Reads the trace of one plan; `device` [N] is read at the roots."""
    ops, tensors, uses = real_sizes(graph)
    unit = int(graph.unit_bytes)
    producer = np.asarray(graph.tensor_producer)[:tensors]
    size = np.asarray(graph.tensor_units, np.int64)[:tensors] * unit
    is_output = np.asarray(graph.tensor_is_output)[:tensors]
    use_tensor = np.asarray(graph.use_tensor)[:uses]
    root = np.arange(ops) if root is None else np.asarray(root)[:ops]
    on = np.asarray(device)[:ops][root]
    consumer = root[np.asarray(graph.use_consumer)[:uses]]
    use_producer = producer[use_tensor] if uses else np.zeros(0, int)

    # Items: the roots, and the transfers by the uses that name them.
    roots = np.flatnonzero(root == np.arange(ops))
    named = np.flatnonzero(np.asarray(trace.transfer_start_s)[:uses] >= 0)
    place = np.asarray(trace.place)
    own = place[roots]
    if trace.transfer_place is None:
        sent = place[use_producer[named]]
    else:
        sent = np.asarray(trace.transfer_place)[named]
    op = np.concatenate([roots, use_producer[named]]).astype(np.int64)
    use = np.concatenate([np.full(len(roots), -1), named])
    order = np.lexsort((use, np.concatenate([own, sent])))
    op, use = op[order], use[order]
    moves = use >= 0
    tensor = np.where(moves, use_tensor[use] if uses else -1, -1)
    target = np.where(moves, on[consumer[use]] if uses else 0, on[op])

    def times(by_op: Array, by_use: Array) -> np.ndarray:
        values = np.asarray(by_op, np.float64)[op]
        if uses:
            values = np.where(moves, np.asarray(by_use, np.float64)[use], values)
        return values

    start = times(trace.start_s, trace.transfer_start_s)
    finish = times(trace.finish_s, trace.transfer_finish_s)

    item_of_op = np.full(ops, -1)
    item_of_op[op[~moves]] = np.flatnonzero(~moves)
    # A copy is (tensor, device); what makes it and what needs it are items.
    made: dict[tuple[int, int], int] = {}
    needs: dict[tuple[int, int], list[int]] = {}
    for home in np.flatnonzero(root[producer] == producer).tolist():
        key = (home, int(on[producer[home]]))
        made[key] = int(item_of_op[producer[home]])
        needs[key] = [made[key]]
    for k in np.flatnonzero(moves).tolist():
        moved, to = int(tensor[k]), int(target[k])
        needs[moved, int(on[producer[moved]])].append(k)
        made[moved, to] = k
        needs[moved, to] = []
    for u in range(uses):
        if consumer[u] != root[use_producer[u]]:
            needs[int(use_tensor[u]), int(on[consumer[u]])].append(int(item_of_op[consumer[u]]))

    weights = np.zeros(num_devices, np.int64)
    np.add.at(weights, on, np.asarray(graph.weight_units, np.int64)[:ops] * unit)
    items = len(op)
    added = np.zeros((items, num_devices), np.int64)
    dropped = np.zeros((items, num_devices), np.int64)
    events = []
    for (t, d), by in made.items():
        added[by, d] += size[t]
        events.append((start[by], by, 0, d, size[t]))
        if is_output[t] and d == on[producer[t]]:
            continue
        dropped[max(needs[t, d]), d] += size[t]
        last = max(needs[t, d], key=lambda item: (finish[item], item))
        events.append((finish[last], last, 1, d, -size[t]))
    live = weights + np.cumsum(added, 0) - (np.cumsum(dropped, 0) - dropped)
    # At one moment items come in their order: what one drops is gone when the next starts.
    events.sort(key=lambda event: event[:3])
    steps = np.zeros((len(events), num_devices), np.int64)
    for k, event in enumerate(events):
        steps[k, event[3]] = event[4]
    return Timeline(
        op=op,
        use=use,
        tensor=tensor,
        source=on[op],
        device=target,
        start_s=start,
        finish_s=finish,
        live_bytes=live,
        event_s=np.asarray([event[0] for event in events], np.float64),
        event_live_bytes=weights + np.cumsum(steps, 0),
        weight_bytes=weights,
        root=root,
    )
