"""Options with which every searcher of the registry compiles fast."""

from __future__ import annotations

from typing import Any

import jax

from egx.policies.regal_net import RegalPolicy
from egx.policies.sequence_net import SequencePolicy

# Messages of networks are tested with the networks: without them they compile in a moment.
_NETWORK = {"width": 4, "depth": 1, "attention_heads": 1, "graph_network": False}
_POPULATION = {"evolution.size": 5, "evolution.elites": 1}


def options(genes: tuple[tuple[str, str, int], ...]) -> dict[str, dict[str, Any]]:
    """By name of the searcher; `genes` are the problem's, for fresh policies of regal and gas."""
    key = jax.random.key(0)
    return {
        "ea": {**_NETWORK, **_POPULATION},
        "egrl": {**_NETWORK, **_POPULATION},
        "pg": _NETWORK,
        "regal": {"policy": RegalPolicy(genes, width=4, rounds=1, key=key)},
        "gas": {"policy": SequencePolicy(genes, width=4, depth=1, key=key)},
        "hdp": {"width": 4, "groups": 2, "groupings": 1, "levels": 2},
        "evosax:SNES": {"population": 6},
        "evosax:SimpleGA": {"population": 6},
    }
