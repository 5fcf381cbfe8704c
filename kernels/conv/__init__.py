"""Depthwise convolution of image tokens: see ``depthwise_conv2d``."""

from .api import IMPLEMENTATIONS, depthwise_conv2d

__all__ = ["IMPLEMENTATIONS", "depthwise_conv2d"]
