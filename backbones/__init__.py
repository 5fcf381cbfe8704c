"""Vision backbones. Importing this package registers them with timm."""

from . import vig, vig_h

__all__ = ["vig", "vig_h"]
