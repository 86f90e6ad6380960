"""Points of a frontier for tests of dominance and hypervolume."""

from baoc.types import FrontierPoint


def point(label: str, quality: float, state: int, *, speed: float = 1.0, run: str = "r", task: str = "vision"):
    return FrontierPoint(
        run=run,
        task=task,
        model="vit",
        label=label,
        quality=quality,
        peak_bytes=10 * state,
        state_bytes=state,
        samples_per_s=speed,
    )
