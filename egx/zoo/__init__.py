"""Models with true shapes and figures, built op by op; some of them as whole training steps."""

from egx.zoo.amoebanet import amoebanet
from egx.zoo.bert import bert
from egx.zoo.inception import inception_v3
from egx.zoo.recurrent import gnmt, rnnlm
from egx.zoo.registry import load, names, register
from egx.zoo.resnet import resnet50, resnet101
from egx.zoo.transformer_xl import transformer_xl
from egx.zoo.wavenet import wavenet

__all__ = [
    "amoebanet",
    "bert",
    "gnmt",
    "inception_v3",
    "load",
    "names",
    "register",
    "resnet50",
    "resnet101",
    "rnnlm",
    "transformer_xl",
    "wavenet",
]
