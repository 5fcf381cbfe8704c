"""How a mixer of ours starts in the place of a softmax: what it adds to the projections does nothing at first."""

import torch
from torch import nn

from scanvas.backbones.mixers.delta import DeltaMixer
from scanvas.backbones.mixers.gated_softmax import GatedSoftmaxAttention
from scanvas.backbones.mixers.gla import GatedLinearAttention
from scanvas.backbones.mixers.l2 import HeadScale
from scanvas.backbones.mixers.mala import MALAAttention
from scanvas.backbones.mixers.mlla import MLLAAttention
from scanvas.backbones.mixers.nala import NaLaAttention
from scanvas.backbones.mixers.rala import RALAAttention

_GATES = (
    (GatedSoftmaxAttention, 1.0),
    (MALAAttention, 1.0),
    (RALAAttention, 1.0),
    (MLLAAttention, 1.278465),
    (NaLaAttention, 1.278465),
)
"""Mixers whose gate is a projection of the input, and what makes it one; SiLU(1.278465) = 1."""


@torch.no_grad()
def start_neutral(mixer: nn.Module) -> None:
    """Convolutions that add something start at zero, those that stand before or behind a projection pass their input
    through, gates and factors are one, and networks that change queries and keys change nothing.

    The gate of ``GatedLinearAttention`` divides the output between the scan and the local features, and a sigmoid is
    one only where it learns nothing any more. It starts at a half, with norms of two and of zero: the scan alone."""
    through = isinstance(mixer, (GatedLinearAttention, DeltaMixer))
    for name in ("conv", "q_conv", "k_conv", "value_conv"):
        conv = getattr(mixer, name, None)
        if conv is not None and (through or name == "value_conv"):
            conv.init_identity()
        elif conv is not None:
            nn.init.zeros_(conv.weight)
            nn.init.zeros_(conv.bias)
    for kind, one in _GATES:
        gate = getattr(mixer, "gate_proj", None)
        if isinstance(mixer, kind) and gate is not None:
            nn.init.zeros_(gate.weight)
            nn.init.constant_(gate.bias, one)
    if isinstance(mixer, GatedLinearAttention) and mixer.local_norm is not None:
        nn.init.zeros_(mixer.gate_proj.weight)
        nn.init.zeros_(mixer.gate_proj.bias)
        nn.init.constant_(mixer.out_norm.weight, 2.0)
        nn.init.zeros_(mixer.local_norm.weight)
    for name in ("q_modulator", "k_modulator"):
        if hasattr(mixer, name):
            getattr(mixer, name).init_identity()
    if getattr(mixer, "kernel_net", None) is not None:
        nn.init.zeros_(mixer.kernel_net[-1].weight)
        nn.init.zeros_(mixer.kernel_net[-1].bias)
    if isinstance(getattr(mixer, "scale", None), HeadScale):
        nn.init.ones_(mixer.scale.weight)
