"""experiments/claims.csv: every published figure, remade from its raw rows, and rendered as tables.

    python -m experiments.analysis.claims  # seconds -> the figures that their raw rows do not give
    python -m experiments.analysis.claims --write
    # seconds -> README.md, docs/results.md, docs/benchmarks.md, frontier.svg

One row of claims.csv is one figure. `rows` names a file of experiments/results, `where` selects rows of it
(`key=value;key!=value`), and `column` and `statistic` say how the figure follows from them:

    value   the column of the one row selected; `interval_column` holds its interval
    any     the same of several rows, which agree
    mean    the mean, with its 95 % interval, or the standard deviation, as its interval
    paired  the mean of the differences by seed to the rows that `against` selects
    excess  how far the mean is above the mean of the rows that `against` selects, in percent

A figure without `column` is pinned: its raw rows were not kept, so only its command can remake it.
"""

import argparse
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from string import ascii_uppercase

from baoc.core.statistics import mean_interval
from experiments.analysis import allocation_pairs, frontier_picture, peak_predictions, script_table
from experiments.benchmarks.shared import read_rows

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "experiments" / "results"
CLAIMS = ROOT / "experiments" / "claims.csv"
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "results.md"
TABLE = re.compile(r"(<!-- claims: (?P<section>[\w-]+) -->\n).*?(<!-- end of claims -->)", re.DOTALL)
HEADLINES = "headlines"
SCALES = {"%": 100.0, "GiB": 2.0**-30, "MiB": 2.0**-20}

Claim = dict[str, str]


def read_claims() -> list[Claim]:
    return read_rows(CLAIMS)


def complaint(claim: Claim) -> str | None:
    """What is wrong with a figure that should follow from its raw rows; None if it does."""
    value, interval = remade(claim)
    if claim["statistic"] in {"mean", "paired"}:
        count = len(selected(claim["rows"], where=claim["where"]))
        if str(count) != claim["n"]:
            return f"{claim['figure']}: n {claim['n']} is claimed, {claim['rows']} has {count} rows"
    if shown(value, like=claim["value"]) != claim["value"].lstrip("+"):
        return f"{claim['figure']}: {claim['value']} is claimed, {claim['rows']} gives {value:.6g}"
    given = re.search(r"(\d+(?:\.\d+)?)$", claim["interval"])
    if given and interval is not None and shown(interval, like=given.group()) != given.group():
        return f"{claim['figure']}: an interval of {given.group()} is claimed, {claim['rows']} gives {interval:.6g}"
    return None


def shown(value: float, *, like: str) -> str:
    """`value` with as many decimals as `like` has; a zero has no sign."""
    text = f"{value:.{len(like.partition('.')[2])}f}"
    return text.lstrip("-") if float(text) == 0 else text


def remade(claim: Claim) -> tuple[float, float | None]:
    """The figure and its interval, in the claim's unit."""
    rows = selected(claim["rows"], where=claim["where"])
    scale = SCALES.get(claim["unit"], 1.0) if "gib" not in claim["column"] else 1.0
    values = [float(row[claim["column"]]) * scale for row in rows]
    statistic = claim["statistic"]
    if statistic == "value":
        assert len(rows) == 1, f"{claim['figure']}: {claim['where']} selects {len(rows)} rows of {claim['rows']}"
        column = claim["interval_column"]
        return values[0], float(rows[0][column]) * scale if column else None
    if statistic == "any":
        assert len(set(values)) == 1, f"{claim['figure']}: {claim['where']} selects rows that differ"
        return values[0], None
    if statistic == "mean":
        if claim["interval"].startswith("95 %"):
            return mean(values), mean_interval(values, level=0.95).half
        return mean(values), stdev(values)
    rivals = selected(claim["rows"], where=claim["against"])
    if statistic == "excess":
        return 100 * (mean(values) / mean(float(row[claim["column"]]) * scale for row in rivals) - 1), None
    assert statistic == "paired", f"{claim['figure']}: there is no statistic {statistic!r}"
    by_seed = {row["seed"]: float(row[claim["column"]]) * scale for row in rivals}
    differences = [value - by_seed[row["seed"]] for value, row in zip(values, rows, strict=True)]
    told = mean_interval(differences, level=0.95)
    return told.mean, told.half if claim["interval"].startswith("95 %") else told.sd


def selected(table: str, *, where: str) -> list[dict[str, str]]:
    wanted = dict(condition.split("=", 1) for condition in where.split(";"))
    return [
        row
        for row in read_rows(RESULTS / table)
        if all((row[key.removesuffix("!")] == value) != key.endswith("!") for key, value in wanted.items())
    ]


def rendered(page: str, claims: Sequence[Claim]) -> str:
    """`page` with the table between each pair of marks made anew."""

    def table(found: re.Match[str]) -> str:
        section = found["section"]
        if section == HEADLINES:
            return found[1] + headlines([claim for claim in claims if claim["headline"]]) + found[3]
        own = [claim for claim in claims if claim["section"] == section]
        assert own, f"claims.csv has no section {section!r}"
        return found[1] + full(own) + found[3]

    return TABLE.sub(table, page)


def full(claims: Sequence[Claim]) -> str:
    """The figures, each with a letter, and below them what the letters stand for."""
    sources = list(dict.fromkeys(source(claim) for claim in claims))
    names = {line: ascii_uppercase[index] for index, line in enumerate(sources)}
    lines = ["| figure | value | interval | n | source |", "|---|---|---|---|---|"]
    for claim in claims:
        interval = claim["interval"] or "-"
        lines.append(f"| {claim['figure']} | {quantity(claim)} | {interval} | {claim['n']} | {names[source(claim)]} |")
    lines += ["", "| source | device, versions | commit | command | raw rows |", "|---|---|---|---|---|"]
    lines += [f"| {names[line]} | {line} |" for line in sources]
    return "\n".join(lines) + "\n"


def source(claim: Claim) -> str:
    """Where a figure comes from, as cells of a table."""
    rows = f"`{claim['rows']}`" if claim["rows"] else "not kept"
    return f"{claim['device']}, {claim['versions']} | {claim['commit']} | `{claim['command']}` | {rows}"


def headlines(claims: Iterable[Claim]) -> str:
    lines = ["| figure | value | interval | n | device, versions | commit | command |", "|---|" + "---|" * 6]
    for claim in claims:
        link = f"[{claim['section']}](docs/results.md#{claim['section']})"
        lines.append(
            f"| {claim['figure']} | {quantity(claim)} | {claim['interval'] or '-'} | {claim['n']} | "
            f"{claim['device']}, {claim['versions']} | {claim['commit']} | {link} |"
        )
    return "\n".join(lines) + "\n"


def quantity(claim: Claim) -> str:
    return f"{claim['value']} {claim['unit']}".strip()


def stale() -> list[str]:
    """What is wrong with tables that follow from those of raw rows."""
    raw = (RESULTS / name for name in allocation_pairs.TABLES)
    tables: dict[str, Iterable[Mapping[str, object]]] = {
        "allocation_pairs.csv": allocation_pairs.pairs(allocation_pairs.baselines(raw)),
        "peak_predictions.csv": peak_predictions.summary(peak_predictions.tables()),
        "peak_excesses.csv": peak_predictions.above(),
        "peak_campaign_ends.csv": peak_predictions.ends(),
    }
    return [
        f"{name} is older than the tables that it is made of"
        for name, rows in tables.items()
        if read_rows(RESULTS / name) != [{key: str(value) for key, value in row.items()} for row in rows]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="render README's picture and all tables")
    claims = read_claims()
    if parser.parse_args().write:
        for page in (README, PAGE):
            page.write_text(rendered(page.read_text(encoding="utf-8"), claims), encoding="utf-8")
        scripts = script_table.PAGE
        scripts.write_text(script_table.rendered(scripts.read_text(encoding="utf-8")), encoding="utf-8")
        frontier_picture.PICTURE.write_text(frontier_picture.picture(frontier_picture.read_points()), encoding="utf-8")
    complaints = stale() + [found for claim in claims if claim["column"] and (found := complaint(claim))]
    if complaints:
        sys.exit("\n".join(complaints))
    print(f"{sum(bool(claim['column']) for claim in claims)} figures follow from their rows")


if __name__ == "__main__":
    main()
