"""timm's own model tests on our small models.

They are in timm's source distribution only. Set TIMM_SDIST to the archive (``pip download --no-binary :all: --no-deps
timm==…``) or to an unpacked copy, or lay the archive into ``~/.cache/timm-sdist/``. ``test_backbones*.py`` covers the
same points without it. The plugin which points the tests at our models is ../shared/tools/timm_accept.py.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import timm

PLUGIN = Path(__file__).parents[2] / "shared" / "tools"


def unpack(folder):
    """timm's ``tests`` of the installed version, copied beside no timm source."""
    name = f"timm-{timm.__version__}"
    given = os.environ.get("TIMM_SDIST")
    source = Path(given) if given else Path.home() / ".cache" / "timm-sdist" / f"{name}.tar.gz"
    if not source.exists():
        pytest.skip(f"no source distribution of timm at {source}; set TIMM_SDIST to {name}.tar.gz or its folder")
    if source.is_dir():
        shutil.copytree(source / "tests", folder / "tests")
    else:
        with tarfile.open(source) as archive:
            members = [m for m in archive.getmembers() if re.match(rf"{name}/tests/[\w.]+$", m.name)]
            archive.extractall(folder, members, filter="data")
        (folder / name / "tests").rename(folder / "tests")


@pytest.mark.timeout(600)
def test_small_models(tmp_path):
    if not (PLUGIN / "timm_accept.py").exists():
        pytest.skip(f"no timm_accept.py in {PLUGIN}")
    unpack(tmp_path)
    env = {
        **os.environ,
        "PYTHONPATH": str(PLUGIN),
        "TIMM_ACCEPT_IMPORT": "scanvas",
        "TIMM_ACCEPT_FILTER": "test_vig*,test_mlla,test_agent_deit,test_ravlt,test_mavit,test_nalaformer",
        "TIMM_ACCEPT_EXTRA": "1",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "timm_accept",
        "-q",
        "-W",
        "ignore",
        "--tb=short",
        "tests/test_models.py",
    ]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    passed = int(re.search(r"(\d+) passed", done.stdout)[1])
    assert passed >= 20
    assert "failed" not in done.stdout
