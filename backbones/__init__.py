"""Vision backbones. Importing this package registers them with timm."""

from . import linear_deit, mlla, pyramid_models, vig, vig_h

__all__ = ["linear_deit", "mlla", "pyramid_models", "vig", "vig_h"]
