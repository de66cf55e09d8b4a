"""Policies by the names under which checkpoints know them."""

from egx.policies.base import AbstractPolicy
from egx.policies.graph_unet import GraphUNetPolicy

POLICIES: dict[str, type[AbstractPolicy]] = {"graph_unet": GraphUNetPolicy}
