"""The errors a user can cause. The command line prints them as one paragraph, without a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something the user gave cannot be used. The message names it, says what came and what is allowed."""


class ConfigError(UserError):
    """A configuration that cannot be read: unknown key, wrong type, value out of range."""


class DataError(UserError):
    """Data that cannot be used: nothing there, unreadable image, class that does not match."""


class CheckpointError(UserError):
    """A checkpoint that cannot be written or read."""


class NonFiniteError(UserError):
    """A loss term or the gradient became inf or NaN."""


class DemoError(UserError):
    """The demo ran and its result is not good enough."""


class Interrupted(Exception):
    """Ctrl-C or SIGTERM arrived and was honoured; the command exits with 130."""


def nearest(word: str, allowed: Iterable[str], *, limit: int = 12) -> str:
    """``"; did you mean 'x'?"`` or the list of what is allowed, to be put after an unknown name."""
    allowed = sorted(map(str, allowed))
    close = difflib.get_close_matches(word, allowed, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    shown = ", ".join(allowed[:limit]) + (", …" if len(allowed) > limit else "")
    return f"; allowed: {shown}" if allowed else ""
