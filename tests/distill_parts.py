"""Teachers and short recipes that tests of distillation share."""

import pytest
import timm
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

import scanvas
from scanvas.train import distill, distill_config
from scanvas.train.denoise_config import NoiseConfig
from scanvas.train.process import create_scheduler

QUICK = ["data.workers=0", "train.batch_size=8", "train.cpu=true", "run.tensorboard=false", "run.plot=false"]
QUICK += ["run.log_every=1", "train.epochs=1", "optim.weight_decay=0"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Images in class folders, and teachers: a pipeline with a learned variance and a classifier."""
    from conftest import _write_images

    root = tmp_path_factory.mktemp("distill")
    _write_images(root / "images", {"train": 16, "val": 4}, side=8)
    torch.manual_seed(0)
    denoiser = scanvas.create_denoiser(
        "dit_s_2", sample_size=8, patch_size=2, in_channels=3, out_channels=6, num_classes=3, num_layers=2,
        num_attention_heads=4, attention_head_dim=8, mlp_hidden=32,
    )  # fmt: skip
    shake(denoiser)
    scheduler = create_scheduler(NoiseConfig(), "epsilon", True)
    pipeline = scanvas.LinearDiTClassPipeline(
        transformer=denoiser, scheduler=scheduler, vae=None, id2label=dict(enumerate(("apple", "boat", "cup")))
    )
    pipeline.save_pretrained(root / "painter")
    flow = scanvas.create_denoiser(
        "dit_s_2", sample_size=8, in_channels=3, out_channels=None, num_classes=3, num_layers=1, num_attention_heads=2,
        attention_head_dim=8, mlp_hidden=32, prediction_type="flow_prediction",
    )  # fmt: skip
    scanvas.LinearDiTClassPipeline(
        transformer=flow, scheduler=FlowMatchEulerDiscreteScheduler(), vae=None
    ).save_pretrained(root / "flow")
    vit = {"img_size": 8, "patch_size": 2, "depth": 2, "embed_dim": 16, "num_heads": 4, "num_classes": 3}
    model = timm.create_model("vit_tiny_patch16_224", **vit)
    shake(model)
    timm.models.save_for_hf(model, root / "classifier", model_args=vit, safe_serialization=True)
    return root


def shake(model):
    """Weights that are nowhere zero, and attention that is not flat."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
            if "qkv" in name or "to_q" in name or "to_k" in name:
                parameter.mul_(3)


def painting(home, out, *more):
    return [f"teacher.checkpoint={home / 'painter'}", f"data.root={home / 'images'}", "data.size=8", "grid.images=0",
            f"run.out={out}", *QUICK, *more]  # fmt: skip


def classifying(home, out, *more):
    return ["task=classify", f"teacher.checkpoint={home / 'classifier'}", f"data.root={home / 'images'}",
            f"run.out={out}", *QUICK, *more]  # fmt: skip


def run(overrides):
    return distill.train_distill(distill_config.load_distill(None, overrides))


STAGES = (
    "stages=[{kind: attention, epochs: 1}, {kind: block, steps: 4, train: all}, "
    "{kind: end_to_end, lr: 1e-3, terms: {mse: 1, vlb: 1, prediction: 0.5, variance: 0.05, attention: 0.5}}]"
)
PLAIN = ["augment.scale=[1,1]", "augment.ratio=[1,1]", "augment.hflip=0"]
