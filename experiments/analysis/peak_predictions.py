"""Recorded runs whose measured peak is above the predicted one.

    python -m experiments.analysis.peak_predictions

Reads every table of experiments/results that has the columns peak_bytes and peak_bytes_predicted. Writes
experiments/results/peak_predictions.csv: one row per table, and one of all tables together.
"""

import csv
from pathlib import Path
from typing import Any

from baoc.tracking.files import write_csv

RESULTS = Path(__file__).resolve().parents[1] / "results"


def excesses(table: Path) -> list[float]:
    """measured / predicted - 1 of each run of `table` that records both."""
    with table.open(encoding="utf-8", newline="") as lines:
        rows = [(row.get("peak_bytes"), row.get("peak_bytes_predicted")) for row in csv.DictReader(lines)]
    return [float(peak) / float(predicted) - 1 for peak, predicted in rows if peak and predicted]


def summary(found: dict[str, list[float]]) -> list[dict[str, Any]]:
    return [
        {
            "table": name,
            "runs": len(values),
            "above": sum(value > 0 for value in values),
            "largest_excess": round(max(0.0, *values), 4),
            "largest_reserve": round(max(0.0, *(-value for value in values)), 4),
        }
        for name, values in found.items()
    ]


def tables() -> dict[str, list[float]]:
    """The excesses of every table that records both peaks, and of all together."""
    found = {table.name: values for table in sorted(RESULTS.glob("*.csv")) if (values := excesses(table))}
    return {**found, "all": [value for values in found.values() for value in values]}


def main() -> None:
    rows = summary(tables())
    write_csv(RESULTS / "peak_predictions.csv", rows)
    for row in rows:
        print(*row.values(), sep="\t")


if __name__ == "__main__":
    main()
