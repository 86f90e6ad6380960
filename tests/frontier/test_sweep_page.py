"""frontier.html: what it compares, that it needs no network, and the command that makes it again."""

import csv
import json
import re
from html.parser import HTMLParser
from math import log2
from pathlib import Path
from typing import Any

import pytest

from baoc.frontier.build import build_report, write_frontier
from baoc.frontier.comparable_runs import allocator_family
from baoc.frontier.page import MAX_CURVE_POINTS, page_data, race_table
from baoc.frontier.report import main
from baoc.frontier.runs import find_runs
from baoc.sweep.race import print_race
from baoc.tracking.files import write_json
from tests.support.paths import ROOT
from tests.support.sweep_jobs import error, job, three_families


def data_in(page: Path) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_families():
    names = ["exact", "lagrangian", "greedy", "random", "uniform_foam8bit_matched", "least_state"]
    assert [allocator_family(name) for name in names] == ["BAOC"] * 3 + ["random feasible", "uniform", "least_state"]


def test_a_page_compares_families_on_one_reference(tmp_path: Path):
    three_families(tmp_path)
    write_frontier(tmp_path, show=False)
    (workload,) = data_in(tmp_path / "frontier.html")["workloads"]
    points = {point["allocator"]: point for point in workload["points"]}
    assert points["exact"]["quality"] == pytest.approx(0.15) and points["exact"]["seeds"] == 2
    assert points["exact"]["spread"] == pytest.approx(0.0707, abs=1e-4)
    shares = {(row["axis"], row["family"]): row["share"] for row in workload["volumes"]}
    # from (0.5, 100), 1 and l doublings above: exact dominates .35 x 1, uniform .3 x l, together .3 x l + .05 x 1
    uniform = 0.3 * log2(100 / 20)
    assert shares["state_bytes", "BAOC"] == pytest.approx(100 * 0.35 / (uniform + 0.05))
    assert shares["state_bytes", "uniform"] == pytest.approx(100 * uniform / (uniform + 0.05))
    assert shares["state_bytes", "random feasible"] == pytest.approx(100 * 0.2 / (uniform + 0.05))


def test_the_page_needs_no_network_and_no_text_can_end_its_script(tmp_path: Path):
    job(tmp_path / "0", loss=0.1, command="python run.py name='</script><b>'")
    error(tmp_path / "1", exit_code=4, message="</script> out of memory")
    write_frontier(tmp_path, show=False)
    text = (tmp_path / "frontier.html").read_text()
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", text)
    data = data_in(tmp_path / "frontier.html")
    assert data["workloads"][0]["points"][0]["command"].endswith("'</script><b>'")
    assert data["failed"] == [
        {"run": "1", "label": "1", "code": 4, "message": "</script> out of memory", "folder": "1"}
    ]


@pytest.mark.parametrize(
    "text",
    ["<!--<script", "<script>", "</script>", "<!-- <script> -->", "%PLOTLY% %SCRIPT% %DATA%", "a & b > c", "\u2028"],
)
def test_no_text_of_a_run_means_anything_to_a_browser(tmp_path: Path, text: str):
    job(tmp_path / "0", loss=0.1, command=f"python run.py name='{text}'")
    error(tmp_path / "1", exit_code=4, message=text)
    write_frontier(tmp_path, show=False)
    page = (tmp_path / "frontier.html").read_text()
    scripts = ScriptReader()
    scripts.feed(page)
    assert scripts.count == 3 and page.rstrip().endswith("</html>")
    data = json.loads(scripts.data)
    assert data["failed"][0]["message"] == text
    assert data["workloads"][0]["points"][0]["command"].endswith(f"'{text}'")
    assert not set("<>&") & set(scripts.data)


class ScriptReader(HTMLParser):
    """The page's scripts as a browser tells them: how many, and the content of the one with the data."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.data, self._id = 0, "", None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "script":
            self.count, self._id = self.count + 1, dict(attrs).get("id")

    def handle_endtag(self, tag: str) -> None:
        self._id = None

    def handle_data(self, data: str) -> None:
        if self._id == "data":
            self.data += data


def test_figures_are_saved_here_and_sent_nowhere():
    script = (ROOT / "baoc" / "frontier" / "assets" / "page.js").read_text()
    assert "showSendToCloud: false" in script and 'plotlyServerURL: ""' in script and '"toImage"' not in script


def test_diverged_runs_curves_and_choices(tmp_path: Path):
    job(tmp_path / "0", loss=float("nan"))
    rows = [{"step": step, "train/loss": 1.0 / (step + 1)} for step in range(1001)]
    text = "\n".join(json.dumps(row) for row in rows) + '\n{"step": 1001, "train/lo'
    (tmp_path / "0" / "metrics.jsonl").write_text(text)
    (tmp_path / "0" / "allocation.json").write_text(json.dumps({"choices": {"head": "sign"}}))
    (workload,) = page_data(find_runs(tmp_path), title="t", page_folder=tmp_path)["workloads"]
    (point,) = workload["points"]
    assert point["quality"] is None and point["choices"] == {"head": "sign"}
    curve = point["curves"]["train/loss"]
    assert len(curve) <= MAX_CURVE_POINTS + 1 and curve[0] == [0, 1.0] and curve[-1][0] == 1000
    assert all(row["share"] is None for row in workload["volumes"])


def test_the_page_says_what_each_plan_rests_on(tmp_path: Path):
    """Recipe, difference, n, size and horizon of a measured choice; the argument of a prior; nothing where none is."""
    measured = (
        "muon8_lean: 14.9% of the state; 1.2 against adamw8 1.3: -0.1 +- 0.02, n 8, measured at 7.6M, 1,000 steps"
    )
    bases = {
        "measured": {"by": "measured", "text": measured},
        "prior": {"by": "prior", "text": "risk=prior: argued for"},
        "exact": {"by": "exact", "text": "exact: the least risk"},
        "old": None,
    }
    for number, (name, basis) in enumerate(bases.items()):
        job(tmp_path / name, loss=0.1 + number, state_bytes=100 - number, budget=f"state_{10 + number}")
        write_json(tmp_path / name / "allocation.json", {"choices": {"head": "adamw"}, "basis": basis})
    write_frontier(tmp_path, show=False)
    told = {
        "state_10": f"measured: {measured}",
        "state_11": "prior: risk=prior: argued for",
        "state_12": "exact: the least risk",  # an allocator's name stands once
        "state_13": "",
    }
    (workload,) = data_in(tmp_path / "frontier.html")["workloads"]
    assert {point["budget"]: point["basis"] for point in workload["points"]} == told
    assert {row["basis"] for row in csv.DictReader((tmp_path / "frontier.csv").read_text().splitlines())} == set(
        told.values()
    )


def test_several_studies_become_one_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    job(tmp_path / "ours" / "0", loss=0.1)
    job(tmp_path / "theirs" / "0", loss=0.2, allocator="random")
    assert main([str(tmp_path / "ours"), str(tmp_path / "theirs"), "--out", str(tmp_path / "both")]) == 0
    (workload,) = data_in(tmp_path / "both" / "frontier.html")["workloads"]
    assert {point["family"] for point in workload["points"]} == {"BAOC", "random feasible"}
    assert "ours/0" in (tmp_path / "both" / "frontier.csv").read_text()
    assert not (tmp_path / "ours" / "frontier.html").exists()


def test_a_folder_without_runs_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("baoc: error: there is no run in"), "as every command says it"


def test_how_the_front_was_found_and_its_knee(tmp_path: Path):
    job(tmp_path / "2_first", loss=0.50, budget="state_10", state_bytes=10)
    job(tmp_path / "10_then", loss=0.10, budget="state_40", state_bytes=40, allocator="random")
    job(tmp_path / "11_last", loss=0.09, budget="state_50", state_bytes=80)
    write_frontier(tmp_path, show=False)
    (workload,) = data_in(tmp_path / "frontier.html")["workloads"]
    assert workload["runs"] == ["2_first", "10_then", "11_last"]
    lines = {(line["axis"], line["family"]): line for line in workload["histories"]}
    # from (0.5, 80) the first and the last run are on its edges; the second dominates 0.4 x one doubling
    assert lines["state_bytes", "all"] == {
        "axis": "state_bytes",
        "family": "all",
        "runs": [1, 2, 3],
        "share": [0.0, 100.0, 100.0],
    }
    assert lines["state_bytes", "BAOC"]["runs"] == [1, 3] and lines["state_bytes", "BAOC"]["share"] == [0.0, 0.0]
    assert workload["knees"]["state_bytes"] == "budget=state_40 allocator=random"
    told = list(csv.DictReader((tmp_path / "frontier.csv").read_text().splitlines()))
    assert [row["label"] for row in told if "state_bytes" in row["knee_of"]] == ["budget=state_40 allocator=random"]
    history = list(csv.DictReader((tmp_path / "hypervolume.csv").read_text().splitlines()))
    assert {row["measure"] for row in history} == {"quality x doublings"}
    mine = [row for row in history if (row["axis"], row["family"]) == ("state_bytes", "all")]
    assert [(row["run"], row["share"]) for row in mine] == [
        ("2_first", "0.0"),
        ("10_then", "100.0"),
        ("11_last", "100.0"),
    ]


def test_studies_are_compared_with_each_other(tmp_path: Path):
    """Of the same settings, which two studies tried, each has its own point; the same name is told by its parent's."""
    for folder, loss in (("a/study", 0.2), ("b/study", 0.3)):
        write_json(tmp_path / folder / "study.json", {"name": "vision"})
        job(tmp_path / folder / "0", loss=0.5, allocator="uniform_adamw", state_bytes=100, peak_bytes=100)
        job(tmp_path / folder / "1", loss=loss, state_bytes=50, peak_bytes=50)
    assert main([str(tmp_path)]) == 0
    (workload,) = data_in(tmp_path / "frontier.html")["workloads"]
    shares = {row["family"]: round(row["share"], 1) for row in workload["study"]["volumes"]}
    assert shares == {"a/study": 100.0, "b/study": 66.7}
    assert len(workload["points"]) == 2 and len(workload["study"]["points"]) == 4
    assert {(point["short"], point["family"]) for point in workload["study"]["points"]} == {
        (f"{study}: {name}", study) for study in ("a/study", "b/study") for name in ("exact", "adamw")
    }
    assert (
        "a/study is best: val/loss 0.2" in workload["study"]["verdict"]
        and ". b/study: 0.3" in workload["study"]["verdict"]
    )
    rows = list(csv.DictReader((tmp_path / "hypervolume.csv").read_text().splitlines()))
    assert {row["study"] for row in rows} == {"", "a/study", "b/study"}
    assert main([str(tmp_path / "a/study/0"), str(tmp_path / "b/study/1"), "--out", str(tmp_path / "single")]) == 0
    (workload,) = data_in(tmp_path / "single" / "frontier.html")["workloads"]
    assert workload["study"] is None, "runs that were given one by one are no studies"


def test_a_race_stands_at_the_head_of_its_page(tmp_path: Path):
    job(tmp_path / "0", loss=0.1)
    stages = {"25%": {"mean": 1.25, "sd": 0.5, "n": 3}, "fresh": {"mean": None, "sd": None, "n": 2}}
    row = {"name": "muon8_lean", "state_share": 0.149, "rate": 3.0, "left": "", "control": False, "stages": stages}
    other = {**row, "name": "lion8", "rate": None, "left": "it diverged", "stages": {}}
    race = {"choice": "muon8_lean", "told": "a", "verdict": {"reason": "b"}, "claim": "c", "entrants": [other, row]}
    race["higher_is_better"] = False
    build_report([tmp_path / "0"], out=tmp_path, show=False, race=race)
    told = data_in(tmp_path / "frontier.html")["race"]
    assert told["head"] == ["recipe", "state", "rate", "25%", "fresh", ""] and told["lines"] == ["a", "b", "c"]
    assert told["rows"] == [
        ["muon8_lean", "14.9%", "3", "1.25 (0.5)", "diverged", "chosen"],
        ["lion8", "14.9%", "", "", "", "it diverged"],
    ]


@pytest.mark.parametrize(
    ("higher", "order"), [(True, ["high", "low", "diverged"]), (False, ["low", "high", "diverged"])]
)
def test_a_race_s_best_entrant_stands_first_on_page_and_terminal(
    higher: bool, order: list[str], capsys: pytest.CaptureFixture[str]
):
    means = {"diverged": None, "low": 0.25, "high": 0.75}
    common = {"state_share": 0.1, "state_bytes": 1, "rate": 1.0, "left": "", "control": False}
    rows = [
        {**common, "name": name, "stages": {"100%": {"mean": mean, "sd": None, "n": 1}}} for name, mean in means.items()
    ]
    told = {"choice": order[0], "told": "a", "verdict": {"reason": "b"}, "claim": "c", "quality": "q", "seconds": 1}
    race = {**told, "entrants": rows, "higher_is_better": higher}
    assert [row[0] for row in race_table(race)["rows"]] == order
    print_race(race)
    shown = capsys.readouterr().out
    assert sorted(order, key=shown.index) == order


@pytest.mark.parametrize("content", ["{}", "[]", "3", "null", ""])
@pytest.mark.parametrize("name", ["result.json", "error.json", "config.yaml", "allocation.json", "candidates.csv"])
def test_a_damaged_file_of_a_run_is_told_by_name(tmp_path: Path, name: str, content: str, capsys):
    """Read by report and calibrate alike; what is empty may as well hold nothing."""
    job(tmp_path / "0", loss=0.1)
    write_json(tmp_path / "0" / "allocation.json", {"choices": {"head": "sign"}})
    (tmp_path / "0" / name).write_text(content)
    code = main([str(tmp_path)])
    assert code == 0 or (code == 2 and name in capsys.readouterr().err)
    if (name, content) in (("result.json", "{}"), ("result.json", "[]"), ("allocation.json", "[]")):
        assert code == 2
