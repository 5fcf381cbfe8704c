"""The Triton kernels of gated_linear_attention on the CPU, under Triton's interpreter.

The interpreter is chosen when triton is imported, so these tests run in a process of their own.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_kernels_under_the_interpreter():
    file = Path(__file__).with_name("gated_interpreted.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", str(file)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=file.parent.parent)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
