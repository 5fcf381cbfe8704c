"""Painting: the denoiser, its presets and pipelines, and the original checkpoints it reads."""
