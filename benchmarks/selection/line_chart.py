"""Line charts as SVG, in plain text that is the same on every machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#1b6ca8", "#c4572e", "#3d8b40")
WIDTH, HEIGHT, GAP = 420, 260, 40
LEFT, TOP, BOTTOM = 48, 34, 44
LEGEND_ROW = 18
TICKS = 5


@dataclass(frozen=True)
class Line:
    """A line through points, in one of the ``COLOURS``."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int
    dashed: bool = False

    @property
    def style(self) -> str:
        dash = ' stroke-dasharray="5 4"' if self.dashed else ""
        return f'fill="none" stroke="{COLOURS[self.colour]}" stroke-width="2"{dash}'


@dataclass(frozen=True)
class Panel:
    """A chart with a title over it and a name under its horizontal axis. Both axes begin at zero."""

    title: str
    axis: str
    lines: Sequence[Line]


def line_charts(panels: Sequence[Panel]) -> str:
    """Panels side by side, with the legend of the first under them."""
    rows = -(-len(panels[0].lines) // 2)
    width = GAP + len(panels) * (LEFT + WIDTH + GAP)
    height = TOP + HEIGHT + BOTTOM + rows * LEGEND_ROW + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for number, panel in enumerate(panels):
        parts += _panel(panel, LEFT + number * (LEFT + WIDTH + GAP))
    parts += _legend(panels[0].lines, TOP + HEIGHT + BOTTOM + 12)
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel, left: int) -> Iterator[str]:
    most_x = max(x for line in panel.lines for x, _ in line.points)
    most_y = max(y for line in panel.lines for _, y in line.points)
    step_x, step_y = _step(most_x), _step(most_y)
    top_x, top_y = step_x * -(-most_x // step_x), step_y * -(-most_y // step_y)
    yield f'<text x="{left}" y="{TOP - 14}" font-weight="bold">{escape(panel.title)}</text>'
    for tick in range(round(top_y / step_y) + 1):
        y = TOP + HEIGHT * (1 - tick * step_y / top_y)
        yield f'<path d="M{left} {y:.1f}H{left + WIDTH}" stroke="#ddd"/>'
        yield f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{tick * step_y:g}</text>'
    for tick in range(round(top_x / step_x) + 1):
        x = left + WIDTH * tick * step_x / top_x
        yield f'<text x="{x:.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{tick * step_x:g}</text>'
    yield f'<text x="{left + WIDTH / 2}" y="{TOP + HEIGHT + 36}" text-anchor="middle">{escape(panel.axis)}</text>'
    for line in panel.lines:
        points = " ".join(
            f"{left + WIDTH * x / top_x:.1f},{TOP + HEIGHT * (1 - y / top_y):.1f}" for x, y in line.points
        )
        yield f'<polyline points="{points}" {line.style}/>'


def _legend(lines: Sequence[Line], top: int) -> Iterator[str]:
    rows = -(-len(lines) // 2)
    for number, line in enumerate(lines):
        x, y = LEFT + number // rows * 260, top + number % rows * LEGEND_ROW
        yield f'<path d="M{x} {y}h32" {line.style}/>'
        yield f'<text x="{x + 40}" y="{y + 4}">{escape(line.name)}</text>'


def _step(most: float) -> float:
    """The distance of ticks: 1, 2 or 5 times a power of ten, for at most ``TICKS`` of them."""
    power = 10.0 ** (len(f"{most / TICKS:.0f}") - 1 if most >= TICKS else -1)
    return next(step for factor in (1, 2, 5, 10, 20, 50) if (step := factor * power) * TICKS >= most)
