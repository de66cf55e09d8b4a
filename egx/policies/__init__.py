"""Policies by the names under which checkpoints know them."""

from egx.policies.base import AbstractPolicy
from egx.policies.go_net import GoPolicy
from egx.policies.graph_unet import GraphUNetPolicy
from egx.policies.move_net import MovePolicy
from egx.policies.regal_net import RegalPolicy
from egx.policies.sequence_net import SequencePolicy

POLICIES: dict[str, type[AbstractPolicy]] = {
    "graph_unet": GraphUNetPolicy,
    "regal": RegalPolicy,
    "gas": SequencePolicy,
    "go": GoPolicy,
    "regal_plus": MovePolicy,
}
