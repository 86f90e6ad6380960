"""The picture of frontiers in README: quality against optimizer state, from recorded rows, as an SVG.

    python -m experiments.analysis.frontier_picture

Reads experiments/results/fronts_h200_points.csv and writes docs/assets/frontier.svg. The SVG is written by hand, so
that it needs no plotting package and the same rows give the same bytes.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[2]
POINTS = ROOT / "experiments" / "results" / "fronts_h200_points.csv"
PICTURE = ROOT / "docs" / "assets" / "frontier.svg"

WIDTH, HEIGHT = 960, 450
TOP, PANEL_HEIGHT, PANEL_WIDTH = 92, 270, 370
LEFTS = (78, 558)
SHARES = (0.007, 1.5)  # the range of the horizontal axis
BLUE, GREY, ORANGE, INK, FAINT = "#0060a8", "#7a7a7a", "#c2410c", "#222222", "#e4e4e4"
# Where a uniform spec's name stands beside its point: (dx, dy, anchor).
NAMES = {
    "uniform_adafactor_matched": ("Adafactor", {"llama": (11, 4, "start"), "dit": (-11, 4, "end")}),
    "uniform_foam8bit_matched": ("8-bit FOAM", {"llama": (10, 16, "start"), "dit": (-12, 4, "end")}),
    "uniform_adamw8bit": ("8-bit AdamW", {"llama": (-5, 24, "start"), "dit": (-5, 28, "start")}),
    "uniform_adamw": ("fp32 AdamW", {"llama": (0, -20, "middle"), "dit": (0, -26, "middle")}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    model: str
    title: str
    unit: str
    low: float
    high: float
    ticks: tuple[float, ...]
    decimals: int
    left: int

    def x(self, share: float) -> float:
        low, high = SHARES
        return self.left + PANEL_WIDTH * log(share / low) / log(high / low)

    def y(self, quality: float) -> float:
        return TOP + PANEL_HEIGHT * (self.high - quality) / (self.high - self.low)


PANELS = (
    Panel(
        model="llama",
        title="Language: Llama nano, bytes of Python, 600 steps",
        unit="validation bits per byte",
        low=2.05,
        high=2.65,
        ticks=(2.1, 2.2, 2.3, 2.4, 2.5, 2.6),
        decimals=1,
        left=LEFTS[0],
    ),
    Panel(
        model="dit",
        title="Diffusion: DiT tiny, digits, 800 steps",
        unit="validation MSE",
        low=0.150,
        high=0.186,
        ticks=(0.15, 0.16, 0.17, 0.18),
        decimals=2,
        left=LEFTS[1],
    ),
)


def read_points() -> list[dict[str, str]]:
    with POINTS.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def picture(rows: Sequence[dict[str, str]]) -> str:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="Helvetica, Arial, sans-serif" role="img" '
        'aria-label="Validation quality against optimizer state for planned, random and uniform allocations">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        *legend(),
    ]
    for panel in PANELS:
        parts += axes(panel)
        own = [row for row in rows if row["model"] == panel.model]
        parts += line_of(panel, [row for row in own if row["family"] == "random feasible"], colour=GREY, dash="5 4")
        parts += line_of(panel, [row for row in own if row["allocator"] == "exact" and row["family"] == "BAOC"])
        parts += uniforms(panel, [row for row in own if row["allocator"] in NAMES])
    return "\n".join([*parts, "</svg>", ""])


def legend() -> list[str]:
    entries = (
        (70, BLUE, "planned by BAOC (3, 10, 25 % of the state)"),
        (400, GREY, "random allocation of equal bytes"),
        (670, ORANGE, "one spec for every block"),
    )
    parts = []
    for x, colour, words in entries:
        shape = marker(x, 24, colour=colour) if colour != ORANGE else square(x, 24)
        parts += [shape, text(x + 12, 28, words, size=13)]
    return parts


def axes(panel: Panel) -> list[str]:
    left, right, bottom = panel.left, panel.left + PANEL_WIDTH, TOP + PANEL_HEIGHT
    parts = [text(left, TOP - 22, panel.title, size=14, weight="bold")]
    for tick in panel.ticks:
        y = panel.y(tick)
        parts.append(f'<path d="M{left} {y:.1f}H{right}" stroke="{FAINT}"/>')
        parts.append(text(left - 8, y + 4, f"{tick:.{panel.decimals}f}", anchor="end"))
    for share in (0.01, 0.03, 0.1, 0.25, 1.0):
        x = panel.x(share)
        parts.append(f'<path d="M{x:.1f} {bottom}v6" stroke="{INK}"/>')
        parts.append(text(x, bottom + 21, f"{share:.0%}".replace("%", " %"), anchor="middle"))
    parts.append(f'<path d="M{left} {TOP}V{bottom}H{right}" fill="none" stroke="{INK}"/>')
    parts.append(
        text((left + right) / 2, bottom + 46, "optimizer state, % of fp32 AdamW's (log scale)", anchor="middle")
    )
    y = TOP + PANEL_HEIGHT / 2
    label = f"{panel.unit} (lower is better)"
    parts.append(text(left - 52, y, label, anchor="middle", extra=f' transform="rotate(-90 {left - 52} {y})"'))
    if panel is PANELS[0]:
        note = "Mean and standard deviation of 3 seeds, one learning rate per task, one H200. Rows: "
        parts.append(
            text(left - 60, HEIGHT - 12, note + "experiments/results/fronts_h200_points.csv", size=12, fill=GREY)
        )
    return parts


def line_of(panel: Panel, rows: Sequence[dict[str, str]], *, colour: str = BLUE, dash: str = "none") -> list[str]:
    rows = sorted(rows, key=lambda row: float(row["state_fraction"]))
    spots = [(panel.x(float(row["state_fraction"])), panel.y(float(row["quality"]))) for row in rows]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in spots)
    parts = [f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>']
    for row, (x, y) in zip(rows, spots, strict=True):
        parts += [spread(panel, row, colour=colour), marker(x, y, colour=colour)]
    return parts


def uniforms(panel: Panel, rows: Sequence[dict[str, str]]) -> list[str]:
    parts = []
    for row in rows:
        x, y = panel.x(float(row["state_fraction"])), panel.y(float(row["quality"]))
        name, places = NAMES[row["allocator"]]
        dx, dy, anchor = places[panel.model]
        parts += [spread(panel, row, colour=ORANGE), square(x, y)]
        parts.append(text(x + dx, y + dy, name, anchor=anchor, fill=ORANGE))
    return parts


def spread(panel: Panel, row: dict[str, str], *, colour: str) -> str:
    """A bar of one standard deviation each way."""
    x, quality, sd = panel.x(float(row["state_fraction"])), float(row["quality"]), float(row["quality_sd"])
    return (
        f'<path d="M{x:.1f} {panel.y(quality + sd):.1f}V{panel.y(quality - sd):.1f}" stroke="{colour}" opacity=".55"/>'
    )


def marker(x: float, y: float, *, colour: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}"/>'


def square(x: float, y: float) -> str:
    return f'<rect x="{x - 5:.1f}" y="{y - 5:.1f}" width="10" height="10" fill="{ORANGE}"/>'


def text(
    x: float,
    y: float,
    words: str,
    *,
    size: int = 12,
    anchor: str = "start",
    weight: str = "normal",
    fill: str = INK,
    extra: str = "",
) -> str:
    style = f'font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" fill="{fill}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}{extra}>{escape(words)}</text>'


def main() -> None:
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    PICTURE.write_text(picture(read_points()), encoding="utf-8")
    print(PICTURE.relative_to(ROOT))


if __name__ == "__main__":
    main()
