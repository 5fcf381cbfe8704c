"""Denoisers, pipelines and conversions for diffusers."""
