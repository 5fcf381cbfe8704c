"""The Triton kernels on the CPU, under Triton's interpreter.

The interpreter is chosen when triton is imported, so these tests run in a process of their own.
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
    "name",
    [
        "gated_interpreted.py",
        "test_triton_elementwise.py",
        "test_token_norm.py",
        "test_triton_linear.py",
        "test_stem.py",
    ],
)
def test_kernels_under_the_interpreter(name):
    file = Path(__file__).with_name(name)
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", str(file)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=file.parent.parent)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
