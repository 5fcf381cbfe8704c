"""Features of images by a timm model, for the distances between sets of images."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from torch import Tensor

from .errors import UserError, nearest
from .latents import fingerprint
from .models import input_config, load_classifier


class Extractor:
    """A classifier's last features before its head.

    Args:
        name: a directory that ``scanvas train classify`` or timm's ``save_for_hf`` wrote, or the name of a timm model,
            whose pretrained weights must be in the cache or within reach.
        device: where to run.

    Attributes:
        described: name, architecture and SHA-256 of the weights, for the results.

    Raises:
        UserError: there is no such directory or model, or its weights cannot be had.
    """

    def __init__(self, name: str, device: torch.device):
        if Path(name).is_dir():
            model = load_classifier(name)
        elif timm.is_model(name.split(".")[0]):
            try:
                model = timm.create_model(name, pretrained=True).eval()
            except Exception as error:  # the hub's, the file system's, timm's own
                raise UserError(
                    f"--features {name!r}: its pretrained weights cannot be had, give the directory of a local "
                    f"checkpoint ({' '.join(str(error).split())[:200]})"
                ) from error
        else:
            raise UserError(
                f"--features {name!r} is neither a directory nor a timm model{nearest(name, timm.list_models())}"
            )
        config = input_config(model)
        self.model, self.device, self.size = model.to(device), device, config["input_size"]
        self.mean, self.std = (torch.tensor(config[k], device=device).view(1, -1, 1, 1) for k in ("mean", "std"))
        architecture = model.pretrained_cfg.get("architecture", type(model).__name__)
        self.described = f"{name} ({architecture}, weights {fingerprint(model)[:12]})"

    @torch.inference_mode()
    def __call__(self, batches: Iterable[Tensor]) -> Tensor:
        """uint8 images ``(B, 1 or 3, H, W)`` → features ``(N, D)`` float32. They are brought to the model's input size
        as a whole, bicubic with antialiasing, without a crop."""
        found = []
        for pixels in batches:
            x = pixels.to(self.device).float().expand(-1, self.size[0], -1, -1)
            if tuple(x.shape[2:]) != tuple(self.size[1:]):
                x = F.interpolate(x, self.size[1:], mode="bicubic", antialias=True, align_corners=False).clamp(0, 255)
            features = self.model.forward_features((x / 255 - self.mean) / self.std)
            found.append(self.model.forward_head(features, pre_logits=True).float())
        return torch.cat(found)
