"""The plot of ``scanvas bench mixers``: accuracy against throughput, a label at every point."""

from __future__ import annotations

from pathlib import Path

_KINDS = {  # of a point: what the legend calls it, and how it is marked
    "softmax": ("softmax attention", {"color": "C3", "marker": "s"}),
    "scan": ("scans along the tokens", {"color": "C1", "marker": "^"}),
    "other": ("others", {"color": "C0", "marker": "o"}),
}
_TICKS = "12357"  # first digits that are written at the axis of throughput


def draw(points: dict[str, tuple[float, float, float, str]], throughput: str, place: Path) -> None:
    """``points``: name → throughput, accuracy in percent, its standard deviation (0 of one seed), and kind.
    Labels stand where they cover neither points nor one another."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.4), layout="constrained", dpi=150)
    canvas = FigureCanvasAgg(figure)
    axis = figure.add_subplot()
    for kind, (title, style) in _KINDS.items():
        ours = [point[:3] for point in points.values() if point[3] == kind]
        if ours:
            x, y, wide = zip(*ours)
            axis.errorbar(x, y, wide, **style, markersize=5.5, elinewidth=1, linestyle="none", label=title)
    axis.set(xscale="log", xlabel=throughput, ylabel="accuracy (%)")
    for ticks in (axis.xaxis.set_major_formatter, axis.xaxis.set_minor_formatter):
        ticks(lambda x, _: _written(x) if f"{x:.0e}"[0] in _TICKS else "")
    axis.tick_params(which="both", labelsize=9)
    axis.margins(0.1)
    axis.grid(alpha=0.25, which="both", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    legend = axis.legend(fontsize=9, framealpha=0.9)
    figure.draw_without_rendering()
    renderer, unit = canvas.get_renderer(), figure.dpi / 72
    at = {name: axis.transData.transform(point[:2]) for name, point in points.items()}
    boxes = [(x - 5 * unit, y - 5 * unit, x + 5 * unit, y + 5 * unit) for x, y in at.values()]
    boxes.append(tuple(legend.get_window_extent(renderer).extents))

    def near(name: str) -> int:
        x, y = at[name]
        return sum(abs(x - u) < 70 * unit and abs(y - v) < 30 * unit for u, v in at.values())

    for name in sorted(points, key=near, reverse=True):  # where points crowd is the least room
        x, y = at[name]
        line = {"arrowstyle": "-", "lw": 0.5, "color": "0.5", "shrinkA": 0, "shrinkB": 3}
        label = axis.annotate(
            name, points[name][:2], (x, y), textcoords="figure pixels", fontsize=9, va="center", arrowprops=line
        )
        extent = label.get_window_extent(renderer)
        width, height = extent.width, 11 * unit
        for distance, (right, up) in _around():
            left = x + distance * unit * right - (width if right < 0 else width / 2 if right == 0 else 0)
            low = y + distance * unit * up - height / 2
            box = (left, low, left + width, low + height)
            if not any(_cover(box, other) for other in boxes) and _inside(box, axis.bbox.extents):
                break
        boxes.append(box)
        label.set_position((left, low + height / 2))
        if distance < 12:
            label.arrow_patch.set_visible(False)
    figure.savefig(place)


def _written(x: float) -> str:
    return f"{x / 1e6:g} M" if x >= 1e6 else f"{x:,.0f}"


def _around():
    """Distances in points, and directions, near ones first."""
    directions = [(1, 0), (-1, 0), (0, 1.3), (0, -1.3), (0.8, 0.9), (-0.8, 0.9), (0.8, -0.9), (-0.8, -0.9)]
    return [(distance, way) for distance in (8, 14, 20, 28, 38, 50, 64) for way in directions]


def _cover(a: tuple, b: tuple) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _inside(box: tuple, frame: tuple) -> bool:
    return frame[0] <= box[0] and frame[1] <= box[1] and box[2] <= frame[2] and box[3] <= frame[3]
