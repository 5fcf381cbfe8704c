"""Which mixers the slow tests take."""

TYPICAL = ("gla", "linear", "local", "softmax")
"""One of each kind: a scan with kernels of its own, a sum over all tokens with a convolution, a window that reads the
grid, and softmax. Compilers, exporters, checkpointing, autocast and what diffusers and timm do with whole models are
tried on these only: they depend on the kind and cost seconds each. Every mixer by itself is exported, scripted,
offloaded and run in half precision by tests/test_mixers.py, and trained in every backbone and in the denoiser."""
