"""The front door: what ``import scanvas`` needs, how long it takes, what it offers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import scanvas

ROOT = Path(__file__).parents[1]
BLOCK = """
import sys, socket
class Hide:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, *args):
        return None if name.split(".")[0] in BLOCKED else self.finder.find_spec(name, *args)
    def __getattr__(self, name):
        return getattr(self.finder, name)
sys.meta_path[:] = map(Hide, sys.meta_path)
def refuse(*args, **kwargs):
    raise OSError("a test found the network being used")
socket.socket.connect = socket.getaddrinfo = socket.create_connection = refuse
"""


def run(code, *flags, cwd=ROOT, **env):
    """Run in a fresh process which sees no GPU."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **env}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, *flags, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done


def test_without_triton_transformers_or_network():
    code = (
        f"BLOCKED = {{'triton', 'transformers', 'peft', 'sklearn', 'matplotlib', 'tensorboard', 'onnx'}}\n{BLOCK}"
        + """
import timm, torch, scanvas
model = timm.create_model("test_vig", img_size=32).eval()
print(tuple(model(torch.zeros(1, 3, 32, 48)).shape), scanvas.list_mixers())
from scanvas.kernels.gated import gated_linear_attention
x = torch.zeros(1, 4, 1, 2)
try:
    gated_linear_attention(x, x, x, x, impl="triton")
except RuntimeError as error:
    print(error)
"""
    )
    out = run(code).stdout
    assert "(1, 1000)" in out
    assert "gla" in out
    assert "impl='triton' is not available here: the package 'triton' is not installed" in out


def test_the_import_alone():
    """Nothing heavy comes along, timm knows the models only then; and the root on the path hides no other package:
    transformers and diffusers look for a module ``kernels``, which a folder without __init__.py is not to them."""
    code = """
import sys, torch, timm
from importlib.util import find_spec
spec = find_spec("kernels")
print(spec is None or spec.origin is None or "site-packages" in spec.origin)
assert not timm.is_model("vig_tiny_patch16_224")
before = set(sys.modules)
import scanvas
heavy = {"diffusers", "transformers", "triton", "accelerate", "matplotlib", "sklearn", "datasets"}
print(sorted(heavy & (set(sys.modules) - before)))
print(*timm.list_models(["*vig_*", "*vig"], module="vig"), *timm.list_models(module="vig_h"))
import scanvas.kernels.gated
"""
    hidden, heavy, names = run(code, PYTHONPATH=str(ROOT)).stdout.strip().splitlines()
    assert hidden == "True"
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert heavy == "[]"
    expected = "test_vig vig_base_patch16_224 vig_small_patch16_224 vig_tiny_patch16_224"
    expected += " test_vig_h vig_h_base_224 vig_h_small_224 vig_h_tiny_224"
    assert names.split() == expected.split()


def test_public_names():
    assert {"__version__", "list_mixers", "create_mixer"} <= set(scanvas.__all__)
    assert set(scanvas.__all__) <= set(dir(scanvas))
    assert scanvas.list_mixers() == sorted(scanvas.list_mixers())
    assert {"gla", "linear", "softmax"} <= set(scanvas.list_mixers())
    assert scanvas.create_mixer("softmax", 8, 2).num_heads == 2
    for name in scanvas.__all__:
        assert getattr(scanvas, name) is not None
    with pytest.raises(AttributeError, match=r"module 'scanvas' has no attribute 'nope'; it offers .*create_mixer"):
        _ = scanvas.nope
