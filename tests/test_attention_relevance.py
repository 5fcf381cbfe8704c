"""Which patches a decision rests on, by the definition and by taking them away."""

import pytest
import timm
import torch
from maps_parts import PIXELS, vig
from sklearn.datasets import load_digits
from torch import nn

import scanvas
from scanvas.train.maps import deletion_insertion, explain, relevance
from scanvas.train.maps.attribution import METHODS


@pytest.mark.parametrize(("mixer", "cfg"), [("gla", {}), ("softmax", {"class_token": True, "global_pool": "token"})])
def test_relevance_beats_chance_by_deletion_and_insertion(mixer, cfg):
    """A classifier of handwritten digits, trained here: taking away the patches that relevance ranks first hurts more
    than taking away random ones, and putting them in first helps more."""
    data = load_digits()
    x = torch.tensor(data.images / 8 - 1, dtype=torch.float32)[:, None].repeat_interleave(2, 2).repeat_interleave(2, 3)
    y = torch.tensor(data.target)
    torch.manual_seed(0)
    size = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "mlp_hidden": 64, "in_chans": 1}
    model = timm.create_model("test_vig", mixer=mixer, num_classes=10, **size, **cfg)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, 80)
    for _ in range(80):
        chosen = torch.randint(0, 1500, (64,))
        nn.functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
        optimizer.step(), optimizer.zero_grad(), schedule.step()
    model.eval()
    images, classes = x[1500:1516], y[1500:1516]
    importance = {m: relevance(model, images, classes, method=m, first_layer=0) for m in METHODS}
    importance["random"] = torch.rand(16, 4, 4)
    importance["opposite"] = -importance["gradient"]
    gap = dict.fromkeys(importance, 0.0)
    for i in range(16):
        for name, value in importance.items():
            found = deletion_insertion(model, images[i : i + 1], value[i], int(classes[i]), steps=8, baseline=-1.0)
            gap[name] += (found["insertion_area"] - found["deletion_area"]).item() / 16
    assert min(gap[method] for method in METHODS) > gap["random"] + 0.08, gap
    assert gap["opposite"] < gap["random"], gap
    told = [explain(model, images[i : i + 1], int(classes[i]), baseline=-1.0) for i in range(8)]
    assert sum(x.gain for x in told) / 8 > 0.08
    assert sum(x.beaten for x in told) > 24 / 2
    torch.testing.assert_close(told[3].relevance, importance["gradient"][3])
    torch.testing.assert_close(told[3].rollout, importance["rollout"][3])
    likely = model(images[3:4]).softmax(-1)[0]
    assert (told[3].predicted, told[3].probability) == (int(likely.argmax()), pytest.approx(likely[classes[3]].item()))


def test_relevance_refuses_what_it_would_be_wrong_about():
    """A layer without a map, or one that looks through windows, can not be left out of the product."""
    swin = timm.create_model("swin_tiny_patch4_window7_224", img_size=56, depths=(1, 1), embed_dim=12, num_heads=(1, 2))
    for model, size, message in (
        (vig("t5"), (24, 40), "relevance needs the map of self-attention.*TTTAttention has no attention map"),
        (swin, (56, 56), "windows or pooling"),
        (timm.create_model("test_convnext"), (64, 64), "relevance needs .*; it has no attention"),
    ):
        with pytest.raises(ValueError, match=message):
            relevance(model, torch.randn(1, 3, *size))
    model = vig()
    model.pretrained_cfg = {**model.pretrained_cfg, "label_names": ["a", "b", "c", "d", "e"]}
    assert explain(model, PIXELS, "d").target == explain(model, PIXELS, 3).target == 3
    for target, message in ((5, "a class from 0 to 4, got 5"), ("x", "no class named 'x'; it knows a, b, c, d, e")):
        with pytest.raises(ValueError, match=message):
            explain(model, PIXELS, target)
    with pytest.raises(ValueError, match="image must be one image"):
        explain(model, PIXELS.repeat(2, 1, 1, 1))


def test_relevance_by_hand():
    """Two layers, in full matrices."""
    model, x = vig("softmax", class_token=True, global_pool="token"), PIXELS
    model.requires_grad_(False)
    got = relevance(model, x, 3, method="token_gradient", first_layer=0)
    layers = scanvas.attention_maps(model, x)
    row = torch.eye(61)[:1]
    tokens = model._embed(x)[0]
    gradients = []
    for block in model.blocks:  # of the logit with respect to the residual behind each mixer
        middle = (tokens + block.mixer(block.norm1(tokens), (6, 10), 1)).detach().requires_grad_()
        rest = middle + block.mlp(block.norm2(middle))
        tokens = rest.detach()
        for later in model.blocks[len(gradients) + 1 :]:
            rest = later(rest, (6, 10), 1)
        logit = model.forward_head(model.norm(rest))[0, 3]
        gradients.append(torch.autograd.grad(logit, middle)[0][0])
    for layer, gradient in zip(reversed(layers.layers), reversed(gradients)):
        s = gradient.amax(-1).clamp(min=0)
        s = (s - s.min()) / (s.max() - s.min())
        a = layer.rows()[0].mean(0) * s
        a = (a - a.min()) / (a.max() - a.min()) + torch.eye(61)
        row = row @ (a / a.sum(-1, keepdim=True))
    expected = row[:, 1:] / row[:, 1:].sum()
    torch.testing.assert_close(got.flatten(1), expected, atol=1e-6, rtol=1e-4)
    hierarchical = timm.create_model("test_vig_h", num_classes=3)
    for method in METHODS:
        assert relevance(hierarchical, torch.randn(1, 3, 64, 96), method=method, first_layer=0).shape[1:] == (16, 24)


@pytest.mark.parametrize("name", ["gla", "softmax", "vit", "linearised"])
def test_gradient_relevance_is_that_of_the_map_itself(name):
    """One layer: map × its gradient, where the gradient is got by autograd through the full matrix."""
    if name in ("gla", "softmax"):
        model = vig(name, depth=1)
        block = model.blocks[0]
    else:
        torch.manual_seed(0)
        model = timm.create_model("vit_tiny_patch16_224", img_size=(24, 40), patch_size=4, depth=1, num_classes=5)
        if name == "linearised":
            model, _ = scanvas.linearize(model, "gla")
    model.requires_grad_(False)
    got = relevance(model, PIXELS, 3)
    layer = scanvas.attention_maps(model, PIXELS)[0]
    matrix, values = layer.rows().requires_grad_(), layer.values()
    attended = (matrix @ values).transpose(1, 2)
    if name in ("gla", "softmax"):
        tokens, grid = model._embed(PIXELS)
        x = tokens + block.mixer.project(block.norm1(tokens), attended, grid)
        x = x + block.mlp(block.norm2(x))
    else:
        tokens = model.norm_pre(model._pos_embed(model.patch_embed(PIXELS)))
        block = model.blocks[0]
        x = tokens + block.attn.proj(attended.flatten(2))
        x = x + block.mlp(block.norm2(x))
    logit = model.forward_head(model.norm(x))[0, 3]
    (slope,) = torch.autograd.grad(logit, matrix)
    weight = (matrix.detach() * slope).clamp(min=0).mean(1)[0]
    row = weight[0] if layer.prefix else weight.mean(0)
    expected = row[layer.prefix :] / row[layer.prefix :].sum()
    torch.testing.assert_close(got.flatten(), expected, atol=1e-6, rtol=1e-3)
