"""The Triton kernels on the CPU, under Triton's interpreter.

The interpreter is chosen when triton is imported, so these tests run in processes of their own, of about equal length.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.mark.timeout(900)
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(
    "names",
    [
        ["gated_interpreted.py", "test_triton_linear.py", "test_stem.py"],
        ["test_triton_elementwise.py", "test_layer.py", "test_token_norm.py"],
    ],
    ids=" ".join,
)
def test_kernels_under_the_interpreter(names):
    tests = Path(__file__).parent
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *(str(tests / name) for name in names)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tests.parent)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
