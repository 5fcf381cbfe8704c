"""A small ViG and an image, for tests of attention maps."""

import timm
import torch


def vig(mixer="gla", **kwargs):
    torch.manual_seed(0)
    size = {"img_size": (24, 40), "patch_size": 4, "embed_dim": 32, "depth": 2, "mlp_hidden": 32, "num_classes": 5}
    model = timm.create_model("test_vig", mixer=mixer, **{**size, **kwargs}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


PIXELS = torch.randn(1, 3, 24, 40, generator=torch.Generator().manual_seed(1))
