"""Other libraries' progress bars, out of the way of ours."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from diffusers.utils import logging as diffusers_logging


@contextlib.contextmanager
def no_bars() -> Iterator[None]:
    """Within it diffusers and, where it is in use, transformers draw no bars for files read and written."""
    libraries = [diffusers_logging]
    if "transformers" in sys.modules:
        from transformers.utils import logging as transformers_logging

        libraries.append(transformers_logging)
    shown = [library for library in libraries if library.is_progress_bar_enabled()]
    for library in shown:
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library in shown:
            library.enable_progress_bar()
