"""LoRA weights for the denoiser of a pipeline."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diffusers.loaders.lora_base import LORA_WEIGHT_NAME_SAFE, LoraBaseMixin, _fetch_state_dict
from diffusers.utils import USE_PEFT_BACKEND
from torch import Tensor, nn

_FETCH = ("weight_name", "local_files_only", "cache_dir", "force_download", "proxies", "token", "revision", "subfolder")


class DenoiserLoraMixin(LoraBaseMixin):
    """``load_lora_weights``, ``save_lora_weights``, ``fuse_lora`` and what ``LoraBaseMixin`` adds (``set_adapters``,
    ``unload_lora_weights``, …), with the interface of diffusers' pipelines."""

    _lora_loadable_modules = ["transformer"]  # noqa: RUF012 - diffusers declares a list
    transformer_name = "transformer"

    @classmethod
    def lora_state_dict(cls, source: str | Path | dict[str, Tensor], **kwargs: Any) -> tuple[dict[str, Tensor], dict]:
        """Tensors and metadata of a LoRA file, directory, hub repository, or dict.

        Raises:
            TypeError: unknown keyword.
            ValueError: the file holds something else.
        """
        unknown = kwargs.keys() - set(_FETCH)
        if unknown:
            raise TypeError(f"unknown keyword {', '.join(sorted(unknown))}; allowed: {', '.join(_FETCH)}")
        if not isinstance(source, dict) and (Path(source) / LORA_WEIGHT_NAME_SAFE).is_file():
            kwargs = {"weight_name": LORA_WEIGHT_NAME_SAFE, **kwargs}  # offline, diffusers does not look for it
        state_dict, metadata = _fetch_state_dict(
            str(source) if isinstance(source, Path) else source,
            use_safetensors=True,
            allow_pickle=False,
            user_agent={"file_type": "attn_procs_weights", "framework": "pytorch"},
            **{name: kwargs.get(name) for name in _FETCH},
        )
        wrong = [key for key in state_dict if "lora" not in key]
        if wrong or not state_dict:
            raise ValueError(f"not LoRA weights: {', '.join(wrong[:3]) if wrong else 'there is no tensor'}")
        return state_dict, metadata

    def load_lora_weights(
        self,
        pretrained_model_name_or_path_or_dict: str | Path | dict[str, Tensor],
        adapter_name: str | None = None,
        hotswap: bool = False,
        **kwargs: Any,
    ) -> None:
        """Load LoRA weights into the denoiser.

        Args:
            pretrained_model_name_or_path_or_dict: what ``save_lora_weights`` wrote, or a dict of tensors.
            adapter_name: to tell adapters apart; ``"default_0"``, … otherwise.
            hotswap: replace the weights of the adapter of that name.
            kwargs: ``weight_name``, ``subfolder`` and the keywords of a download.

        Raises:
            ImportError: peft is not installed.
        """
        if not USE_PEFT_BACKEND:
            raise ImportError("LoRA needs peft: pip install 'scanvas[lora]'")
        state_dict, metadata = self.lora_state_dict(pretrained_model_name_or_path_or_dict, **kwargs)
        self.transformer.load_lora_adapter(
            state_dict, adapter_name=adapter_name, metadata=metadata, hotswap=hotswap, _pipeline=self
        )

    @classmethod
    def save_lora_weights(
        cls,
        save_directory: str | Path,
        transformer_lora_layers: dict[str, nn.Module | Tensor],
        weight_name: str | None = None,
        is_main_process: bool = True,
        transformer_lora_adapter_metadata: dict | None = None,
    ) -> None:
        """Write the denoiser's LoRA layers, ``peft.get_peft_model_state_dict(pipe.transformer)``, as safetensors.

        ``transformer_lora_adapter_metadata`` is the adapter's configuration as a dict, kept in the file.
        """
        if not transformer_lora_layers:
            raise ValueError("transformer_lora_layers is empty: there is nothing to save")
        cls._save_lora_weights(
            save_directory=save_directory,
            lora_layers={cls.transformer_name: transformer_lora_layers},
            lora_metadata={cls.transformer_name: transformer_lora_adapter_metadata},
            is_main_process=is_main_process,
            weight_name=weight_name,
            save_function=None,
            safe_serialization=True,
        )

    def fuse_lora(self, components: Sequence[str] = ("transformer",), **kwargs: Any) -> None:
        """Add the LoRA weights to the denoiser's own; see ``LoraBaseMixin.fuse_lora``."""
        super().fuse_lora(components=list(components), **kwargs)

    def unfuse_lora(self, components: Sequence[str] = ("transformer",), **kwargs: Any) -> None:
        """Undo ``fuse_lora``."""
        super().unfuse_lora(components=list(components), **kwargs)
