"""Maps while a pipeline paints: for each denoising step, what each word of the prompt is asked for, or what a patch
looks at."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from .inputs import Layers, pick_layers, to_picture
from .layers import LayerMap
from .recording import Recorder

_PICTURES = 8


@dataclass
class StepMaps:
    """What ``attention_over_steps`` returns.

    Attributes:
        timesteps: of the steps, as the denoiser was told them.
        rows: the words, or the queries, that there are maps of.
        maps: ``(steps, rows, H, W)`` float32, the mean over heads and layers, for one image. Those of words: the share
            of a patch's weight that is on the word.
        pictures: the image as the denoiser believed it to be at each step.
        image: the image that was painted.
        signed: entries may be negative.
    """

    timesteps: list[float]
    rows: list[str]
    maps: Tensor
    pictures: list[Image.Image]
    image: Image.Image
    signed: bool = False

    def grid(self, path: str | Path | None = None, *, columns: int = _PICTURES) -> Image.Image:
        """Steps beside one another, words below one another, written to ``path`` if there is one."""
        from .storyboard import board

        return board(self, path, columns)

    def gif(self, path: str | Path, *, milliseconds: int = 350) -> Path:
        """An animation, a frame for each step; the last stays longer."""
        from .storyboard import animation

        return animation(self, path, milliseconds)


def attention_over_steps(
    pipeline: Any,
    prompt: Any,
    *,
    words: Sequence[str] | None = None,
    query: tuple[int, int] | Sequence[tuple[int, int]] | None = None,
    layers: Layers = None,
    **options: Any,
) -> StepMaps:
    """Run a pipeline and record, at every denoising step, the attention to the words of the prompt; or, with ``query``
    or for a pipeline without text, the attention of patches to the image.

    With classifier-free guidance it is the conditional half that is shown. Of several images it is the first. The
    picture of a step is the denoiser's estimate of the finished image.

    Args:
        pipeline: a text-to-image or class-conditional pipeline of scanvas or diffusers, with a ``transformer`` or a
            ``unet``.
        prompt: the prompt, or the class; the pipeline's first argument.
        words: words of the prompt that are shown; all by default.
        query: a patch ``(row, column)``, or several, whose attention to the image is shown.
        layers: as for ``attention_maps``, among the layers that attend to what is shown; all by default.
        options: of the pipeline: ``num_inference_steps``, ``guidance_scale``, ``generator``, …

    Returns:
        ``StepMaps``.

    Raises:
        ValueError: a word is not in the prompt, or the model has no such attention.
    """
    model = getattr(pipeline, "transformer", None) or getattr(pipeline, "unet", None)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{type(pipeline).__name__} has neither a transformer nor a unet to look into")
    tokenizer = _tokenizer(pipeline)
    by_word = query is None and tokenizer is not None
    if words is not None and not by_word:
        raise ValueError("words are for a pipeline with a prompt, and not together with query")
    if by_word:
        found = word_tokens(tokenizer, prompt if isinstance(prompt, str) else prompt[0])
        rows = _chosen(found, words)
    else:
        rows = {}
    collected: dict[float, tuple[Tensor, bool]] = {}
    estimates: list[Tensor] = []

    with Recorder(model) as recorder:

        def collect(module: nn.Module, args: tuple, keywords: dict, output: Any) -> None:
            time = keywords.get("timestep", args[1] if len(args) > 1 else None)
            time = float(torch.as_tensor(time).flatten()[0])
            shown = [x for x in recorder.layers if x.grid is not None and (x.text is not None or not by_word)]
            shown = [x for x in shown if by_word or x.kind == "self"]
            if not shown:
                raise ValueError(f"{type(module).__name__} has no attention {'to text' if by_word else 'to the image'}")
            shown = pick_layers(shown, layers)
            if by_word:
                maps = _average([_of_words(layer, list(rows.values())) for layer in shown])
            else:
                places = _places(query, shown[0].grid)
                rows.update({f"patch {r}, {c}": [] for r, c in places})
                maps = _average([_of_queries(layer, places, shown[0].grid) for layer in shown])
            collected[time] = maps, any(layer.signed for layer in shown) and not by_word

        handle = model.register_forward_hook(collect, with_kwargs=True)
        try:
            with _estimates(pipeline.scheduler, estimates.append):
                images = pipeline(prompt, **options).images
        finally:
            handle.remove()
    maps = torch.stack([maps[-len(images)] for maps, _ in collected.values()])
    pictures = [_picture(pipeline, x[:1]) for x in estimates[-len(collected) :]]
    final = images[0] if isinstance(images[0], Image.Image) else pictures[-1]
    signed = any(signed for _, signed in collected.values())
    return StepMaps(list(collected), list(rows), maps, [p or final for p in pictures], final, signed)


def _tokenizer(pipeline: Any) -> Any:
    """The tokenizer whose tokens the denoiser sees: T5's for Flux, whose CLIP gives one vector only."""
    name = "tokenizer_2" if type(pipeline).__name__.startswith("Flux") else "tokenizer"
    return getattr(pipeline, name, None)


def word_tokens(tokenizer: Any, prompt: str) -> dict[str, list[int]]:
    """Words of a prompt → numbers of their tokens. A word that occurs again gets a number, as ``cat (2)``.

    Raises:
        ValueError: the tokenizer can not tell which characters a token covers (it is no fast one).
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"{type(tokenizer).__name__} can not tell tokens' places in the prompt; load the fast tokenizer"
        )
    offsets = tokenizer(prompt, return_offsets_mapping=True)["offset_mapping"]
    found: dict[str, list[int]] = {}
    for match in re.finditer(r"\w+(?:['’-]\w+)*", prompt):
        start, stop = match.span()
        tokens = [i for i, (a, b) in enumerate(offsets) if a < stop and b > start]
        count = 1 + sum(word.split(" (")[0] == match[0] for word in found)
        if tokens:
            found[match[0] if count == 1 else f"{match[0]} ({count})"] = tokens
    return found


def _chosen(found: dict[str, list[int]], words: Sequence[str] | None) -> dict[str, list[int]]:
    if not found:
        raise ValueError("prompt has no words")
    missing = [word for word in words or () if word not in found]
    if missing:
        raise ValueError(f"words: {', '.join(missing)} not in the prompt, which has {', '.join(found)}")
    return found if words is None else {word: found[word] for word in words}


def _places(query: Any, grid: tuple[int, int]) -> list[tuple[int, int]]:
    if query is None:
        return [(grid[0] // 2, grid[1] // 2)]
    places = [tuple(query)] if isinstance(query[0], int) else [tuple(q) for q in query]
    for row, column in places:
        if not (0 <= row < grid[0] and 0 <= column < grid[1]):
            raise ValueError(f"query must be within {grid[0]}×{grid[1]} patches, got {(row, column)}")
    return places


def _of_words(layer: LayerMap, groups: list[list[int]]) -> Tensor:
    """``(B, words, H, W)``, mean over heads."""
    maps = layer.word_maps().float().mean(1).cpu()
    inside = [[token for token in group if token < maps.shape[1]] for group in groups]
    return torch.stack([maps[:, group].sum(1) for group in inside], dim=1)


def _of_queries(layer: LayerMap, places: list[tuple[int, int]], grid: tuple[int, int]) -> Tensor:
    scaled = [tuple(int((at + 0.5) * n / m) for at, m, n in zip(place, grid, layer.grid)) for place in places]
    return torch.stack([layer.map(place).float().mean(1).cpu() for place in scaled], dim=1)


def _average(maps: list[Tensor]) -> Tensor:
    """Mean over layers, on the finest of their grids."""
    size = max((m.shape[-2:] for m in maps), key=lambda s: s[0] * s[1])
    return sum(F.interpolate(m, size=size, mode="nearest") for m in maps) / len(maps)


@contextmanager
def _estimates(scheduler: Any, note: Callable[[Tensor], None]):
    """While this lasts, ``note`` is given the scheduler's estimate of the finished image at each step."""
    step = scheduler.step

    def noting(output: Tensor, timestep: Any, sample: Tensor, *args: Any, **keywords: Any):
        result = step(output, timestep, sample, *args, **keywords)
        note(_estimate(scheduler, output, sample, result).detach())
        return result

    scheduler.step = noting
    try:
        yield
    finally:
        del scheduler.step


def _estimate(scheduler: Any, output: Tensor, sample: Tensor, result: Any) -> Tensor:
    known = getattr(result, "pred_original_sample", None)
    if known is None and isinstance(result, tuple) and len(result) > 1 and isinstance(result[1], Tensor):
        known = result[1]
    if known is not None:
        return known
    converted = getattr(scheduler, "model_outputs", None)  # multistep solvers keep it, where they predict the image
    if converted and converted[-1] is not None and "++" in str(scheduler.config.get("algorithm_type", "")):
        return converted[-1]
    sigmas, index = getattr(scheduler, "sigmas", None), getattr(scheduler, "step_index", None)
    if "FlowMatch" in type(scheduler).__name__ and sigmas is not None and index:
        return sample - sigmas[index - 1].to(sample) * output.to(sample.dtype)
    return result[0]


@torch.no_grad()
def _picture(pipeline: Any, latents: Tensor) -> Image.Image | None:
    """Latents as an image, ``None`` where the pipeline packs them in a way of its own."""
    if latents.ndim != 4:
        return None
    if hasattr(pipeline, "_decode"):
        return pipeline._decode(latents.float(), "pil")[0]
    vae = getattr(pipeline, "vae", None)
    with suppress(RuntimeError, ValueError, AttributeError):
        scaled = latents / vae.config.scaling_factor + (vae.config.get("shift_factor") or 0.0)
        return pipeline.image_processor.postprocess(vae.decode(scaled.to(vae.dtype), return_dict=False)[0].float())[0]
    return to_picture(latents[0])
