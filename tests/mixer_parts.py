"""What tests of mixers share."""

import torch

from scanvas.backbones.mixers import create_mixer


def build(name, dim=24, heads=2, dtype=torch.float64, seed=0, **cfg):
    torch.manual_seed(seed)
    mixer = create_mixer(name, dim, heads, dtype=dtype, **cfg)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return mixer.eval()


def tokens(grid, prefix=0, batch=2, dim=24, dtype=torch.float64):
    return torch.randn(batch, prefix + grid[0] * grid[1], dim, generator=torch.Generator().manual_seed(1), dtype=dtype)
