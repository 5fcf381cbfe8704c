"""Small models of every architecture, and the images that tests of backbones give them."""

import pytest
import timm
import torch
from mixer_cases import TYPICAL

import scanvas  # noqa: F401 - registers the models

PYRAMIDS = ["test_ravlt", "test_mavit", "test_nalaformer"]
WITH_BATCHNORM = [*PYRAMIDS, "test_mlla"]
STAGED = ["test_vig_h", *WITH_BATCHNORM]
PLAIN = ["test_vig", "test_agent_deit"]
SMALL = [*PLAIN, *STAGED]
FORMS = [
    *[("test_vig", {"mixer": mixer}) for mixer in TYPICAL],
    *[("test_vig_h", {"mixer": mixer}) for mixer in ("gla", "local")],  # what scans, and what reads the grid
    ("test_ravlt", {}),
    ("test_mavit", {"all_linear": True}),
    ("test_nalaformer", {}),
    ("test_mlla", {}),
    ("test_agent_deit", {}),
]
"""Models with the mixers that are tried in them; a paper's own architecture with its own."""


def build(name, **kwargs):
    """A model for images of 64×96 with random weights that let every part matter."""
    torch.manual_seed(0)
    size = {} if name in STAGED else {"patch_size": 8, "depth": 3}
    model = timm.create_model(name, **{"img_size": (64, 96), "num_classes": 7, **size, **kwargs}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1 and parameter.device.type != "meta":
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif name in WITH_BATCHNORM and parameter.device.type != "meta":
                # As they start, weights of 0.02 rely on BatchNorm to keep what passes their convolutions alive.
                parameter.normal_(std=parameter[0].numel() ** -0.5)
    return model


def images(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(params=SMALL)
def name(request):
    return request.param
