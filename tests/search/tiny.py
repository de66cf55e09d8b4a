"""Options with which every searcher of the registry compiles fast."""

from __future__ import annotations

from typing import Any

import jax

from egx.policies.regal_net import RegalPolicy
from egx.policies.sequence_net import SequencePolicy
from egx.search.egrl import EGRL
from egx.search.egrl_plus import EGRLPlus
from egx.search.go import Go

# Messages of networks are tested with the networks: without them they compile in a moment.
_NETWORK = {"width": 4, "depth": 1, "attention_heads": 1, "graph_network": False}
_POPULATION = {"evolution.size": 5, "evolution.elites": 1}
_GO = {
    "width": 4, "rounds": 1, "layers": 0, "attention_heads": 1, "segment": 8, "passes": 1,
    "batch": 6, "ppo.epochs": 1,
}  # fmt: skip


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
        "go": _GO,
        "go_plus": {
            "go": Go(width=4, rounds=1, layers=0, attention_heads=1, segment=8, passes=1),
            "search": EGRLPlus(batch=8, gradients=False, repair=False),
            "networks": EGRL(policy_gradient=False, boltzmann_share=0.0, **_NETWORK),
            "guided": 2,
            "evolved": 2,
        },
        "regal_plus": {
            "genetic.population": 12,
            "genetic.elites": 4,
            "genetic.mutants": 2,
            "kept": 3,
            "changed": 4,
            "tried": 3,
            "steps": 2,
        },
        "evosax:SNES": {"population": 6},
        "evosax:SimpleGA": {"population": 6},
    }
