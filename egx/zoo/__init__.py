"""Models with true shapes and figures, built op by op."""

from egx.zoo.bert import bert
from egx.zoo.registry import load, names, register
from egx.zoo.resnet import resnet50, resnet101

__all__ = ["bert", "load", "names", "register", "resnet50", "resnet101"]
