"""Checks of arguments, which name the argument, what came and what is allowed."""

from collections.abc import Iterable


def check_one_of(name: str, value: str, allowed: Iterable[str]) -> None:
    """Raise ValueError unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")


def check_multiple(name: str, size: int, multiple: int, meaning: str) -> None:
    """Raise ValueError unless ``size`` is a positive multiple; the message names the nearest ones."""
    if size < multiple or size % multiple:
        below = size // multiple * multiple
        near = [str(s) for s in (below, below + multiple) if s > 0]
        raise ValueError(
            f"{name} must be divisible by {meaning} = {multiple}, got {size}; the nearest "
            f"{'sizes are' if len(near) > 1 else 'size is'} {' and '.join(near)}"
        )


def to_size(size: int | tuple[int, int]) -> tuple[int, int]:
    """``(height, width)`` of an int or a pair."""
    height, width = (size, size) if isinstance(size, int) else size
    return int(height), int(width)
