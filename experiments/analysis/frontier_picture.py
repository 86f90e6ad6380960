"""The picture of README: what the product chooses, quality against share of the state, from recorded rows, as an SVG.

`python -m experiments.analysis.claims --write` reads experiments/results/product_runs.csv and writes
docs/assets/frontier.svg. The SVG is written by hand, so that it needs no plotting package and the same rows give the
same bytes.
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from xml.sax.saxutils import escape

from baoc.core.statistics import mean_interval

ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT / "experiments" / "results" / "product_runs.csv"
PICTURE = ROOT / "docs" / "assets" / "frontier.svg"

WIDTH, HEIGHT, TOP, PANEL_HEIGHT, PANEL_WIDTH = 976, 400, 70, 250, 240
SHARES = (0.05, 0.25)  # the range of the horizontal axis
BLUE, GREY, ORANGE, INK, FAINT = "#0060a8", "#7a7a7a", "#c2410c", "#222222", "#e4e4e4"
CHOSEN = ("chosen_10", "chosen_15", "chosen_25")
ADAMW = tuple(f"adamw_{rate}" for rate in ("0.25", "0.5", "1", "2", "4"))
UNIFORM = {  # of the recipes that run one spec on all hidden matrices
    "muon8_lean": "8-bit Muon as published, {}",
    "foam8_lean": "8-bit FOAM, {}",
    "adafactor_m8": "Adafactor, {}",
}
Point = tuple[float, float, float]  # share of the state, mean and half of the 95 % interval of the quality


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    task: str
    title: str
    unit: str
    low: float
    high: float
    ticks: tuple[float, ...]
    left: int
    decimals: int
    below: bool = False  # of the best uniform's line stands its name

    def x(self, share: float) -> float:
        low, high = SHARES
        return self.left + PANEL_WIDTH * (share - low) / (high - low)

    def y(self, quality: float) -> float:
        return TOP + PANEL_HEIGHT * (self.high - quality) / (self.high - self.low)


PANELS = (
    Panel(
        task="language", title="Language: Llama nano", unit="bits per byte", low=1.86, high=2.38,
        ticks=(1.9, 2.0, 2.1, 2.2, 2.3), left=66,
        decimals=1,
    ),
    Panel(
        task="vision", title="Vision: ViT tiny, Fashion-MNIST", unit="loss", low=0.415, high=0.52,
        ticks=(0.42, 0.44, 0.46, 0.48, 0.50, 0.52), left=388,
        decimals=2,
    ),
    Panel(
        task="diffusion", title="Diffusion: DiT tiny, digits", unit="MSE", low=0.142, high=0.168,
        ticks=(0.145, 0.15, 0.155, 0.16, 0.165), left=710,
        decimals=3,
        below=True,
    ),
)  # fmt: skip


def read_points() -> dict[str, dict[str, Point]]:
    """Task -> label -> point."""
    held: dict[str, dict[str, list[tuple[float, float]]]] = {}
    with RUNS.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            own = held.setdefault(row["group"], {}).setdefault(row["label"], [])
            own.append((float(row["state_fraction"]), float(row["value"])))
    return {
        task: {label: point(runs) for label, runs in labels.items() if len(runs) > 1} for task, labels in held.items()
    }


def point(runs: Sequence[tuple[float, float]]) -> Point:
    values = [value for _, value in runs]
    told = mean_interval(values, level=0.95)
    return mean(share for share, _ in runs), told.mean, told.half


def picture(points: Mapping[str, Mapping[str, Point]]) -> str:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="Helvetica, Arial, sans-serif" role="img" aria-label="Validation quality against optimizer state '
        'of what the product chooses, beside fp32 AdamW and the best uniform recipe">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for panel in PANELS:
        own = points[panel.task]
        parts += axes(panel)
        adamw = min((own[label] for label in ADAMW), key=lambda one: one[1])
        parts += line(panel, adamw, name="fp32 AdamW at its best of five rates, {}", colour=GREY)
        best = min(UNIFORM, key=lambda label: own[label][1])
        parts += line(panel, own[best], name=UNIFORM[best], colour=ORANGE)
        parts += marked(panel, [own["random_15"]], colour=GREY)
        parts += marked(panel, list(dict.fromkeys(own[label] for label in CHOSEN)), colour=BLUE)
    parts += [
        *dot(70, 20, colour=BLUE),
        text(80, 24, "chosen at state_10, state_15 and state_25", size=13),
        *dot(380, 20, colour=GREY),
        text(390, 24, "a random plan at state_15", size=13),
        text(
            70, HEIGHT - 10,
            "Lower is better; mean, 95 % interval of 8 seeds, two H200s. Rows: experiments/results/product_runs.csv",
            fill=GREY,
        ),
    ]  # fmt: skip
    return "\n".join([*parts, "</svg>", ""])


def axes(panel: Panel) -> list[str]:
    left, right, bottom = panel.left, panel.left + PANEL_WIDTH, TOP + PANEL_HEIGHT
    parts = [text(left, TOP - 14, f"{panel.title}, {panel.unit}", size=13, weight="bold")]
    for tick in panel.ticks:
        y = panel.y(tick)
        parts += [
            f'<path d="M{left} {y:.1f}H{right}" stroke="{FAINT}"/>',
            text(left - 6, y + 4, f"{tick:.{panel.decimals}f}", anchor="end"),
        ]
    for share in (0.05, 0.1, 0.15, 0.2, 0.25):
        x = panel.x(share)
        parts += [
            f'<path d="M{x:.1f} {bottom}v5" stroke="{INK}"/>',
            text(x, bottom + 19, f"{share:.0%}", anchor="middle"),
        ]
    parts.append(f'<path d="M{left} {TOP}V{bottom}H{right}" fill="none" stroke="{INK}"/>')
    return [*parts, text((left + right) / 2, bottom + 38, "state, share of fp32 AdamW's", anchor="middle")]


def line(panel: Panel, at: Point, *, name: str, colour: str) -> list[str]:
    share, quality, _ = at
    y = panel.y(quality)
    dash, below = ("6 4", panel.below) if colour == ORANGE else ("none", False)
    style = f'stroke="{colour}" stroke-width="1.5" stroke-dasharray="{dash}"'
    path = f'<path d="M{panel.left} {y:.1f}h{PANEL_WIDTH}" {style}/>'
    told = name.format(f"{share:.0%} of the state" if share < 1 and "AdamW" not in name else f"{share:.0%}")
    return [path, text(panel.left + PANEL_WIDTH, y + (13 if below else -5), told, anchor="end", size=11, fill=colour)]


def marked(panel: Panel, points: Sequence[Point], *, colour: str) -> list[str]:
    """Points with their intervals, joined."""
    spots = [(panel.x(share), quality, half) for share, quality, half in sorted(points)]
    path = "L".join(f"{x:.1f} {panel.y(quality):.1f}" for x, quality, _ in spots)
    parts = [f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>'] if len(spots) > 1 else []
    for x, quality, half in spots:
        bar = f"M{x:.1f} {panel.y(quality + half):.1f}V{panel.y(quality - half):.1f}"
        parts += [f'<path d="{bar}" stroke="{colour}"/>', *dot(x, panel.y(quality), colour=colour)]
    return parts


def dot(x: float, y: float, *, colour: str) -> list[str]:
    return [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{colour}"/>']


def text(
    x: float, y: float, words: str, *, size: int = 12, anchor: str = "start", weight: str = "normal", fill: str = INK
) -> str:
    style = f'font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" fill="{fill}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'
