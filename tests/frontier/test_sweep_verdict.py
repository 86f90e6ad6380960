"""The page's sentence: who is best at equal memory, whether that is distinguishable from chance, and short names."""

import csv
import json
from pathlib import Path

import pytest

from baoc.frontier.build import title_of
from baoc.frontier.page import page_data, short_names, shorten_numbers
from baoc.frontier.pareto import Objective
from baoc.frontier.runs import find_runs
from baoc.frontier.summary import ComparedPoint, best_at_levels, choose_level, summary_sentence
from baoc.types import FrontierPoint
from tests.support.sweep_jobs import job

LOSS, ACCURACY = Objective(name="quality"), Objective(name="quality", higher_is_better=True)
FAMILIES = {"exact": "BAOC", "random": "random feasible"}


def entry(quality: float, state: int, *, allocator: str = "exact", peak: int = 1000, limit: int | None = None, **more):
    told = {"run": "r", "task": "vision", "model": "vit", "label": allocator, "samples_per_s": 1.0}
    point = FrontierPoint(quality=quality, state_bytes=state, peak_bytes=peak, **told, **more)
    return ComparedPoint(
        point=point, family=FAMILIES.get(allocator, "uniform"), allocator=allocator, memory_limit=limit
    )


def test_the_best_of_each_family_within_a_limit_and_of_how_many():
    entries = [entry(0.2, 20), entry(0.1, 25), entry(0.05, 40), entry(0.3, 9, allocator="random")]
    entries += [entry(float("nan"), 5), entry(0.08, 100, allocator="uniform_adamw")]
    half, quarter, tenth = best_at_levels(entries, quality=LOSS, adamw_bytes=100)
    assert [level.name for level in (half, quarter, tenth)] == [f"{n}% of fp32 AdamW's state" for n in (50, 25, 10)]
    told = {name: (own.point.quality, of) for name, (own, of) in quarter.best.items()}
    assert told == {"BAOC": (0.1, 2), "random feasible": (0.3, 1)}
    assert half.best["BAOC"][0].point.quality == 0.05 and "BAOC" not in tenth.best


def test_memory_budgets_are_compared_by_peak_at_their_own_limits():
    entries = [entry(0.2, 1, peak=2**30, limit=2**30), entry(0.1, 1, peak=2**31, limit=2**31)]
    large, small = best_at_levels(entries, quality=LOSS, adamw_bytes=100)
    assert (large.name, small.name) == ("2.00 GiB peak memory", "1.00 GiB peak memory")
    assert large.best["BAOC"][0].point.quality == 0.1 and small.best["BAOC"][0].point.quality == 0.2


def test_the_headline_is_where_most_families_stand():
    entries = [entry(0.1, 8), entry(0.3, 9, allocator="random"), entry(0.08, 25, allocator="uniform_foam")]
    found = best_at_levels(entries, quality=LOSS, adamw_bytes=100)
    chosen = choose_level(found, adamw_bytes=100)
    assert chosen is not None and chosen.limit == 25


@pytest.mark.parametrize(
    "gap, told",
    [
        (0.1, "The difference of 0.1 to random feasible is beyond its 95 % interval (±0.061)."),
        (0.02, "within its 95 % interval (±0.061), so it is not distinguishable from chance."),
    ],
)
def test_a_difference_is_held_against_its_spread(gap: float, told: str):
    more = {"num_seeds": 2, "quality_spread": 0.014142}
    entries = [entry(0.1, 8, **more), entry(0.1 + gap, 9, allocator="random", **more)]
    entries += [entry(0.05, 100, allocator="uniform_adamw", **more)]
    found = best_at_levels(entries, quality=LOSS, adamw_bytes=100)
    text = summary_sentence(entries, found, metric="val/loss", quality=LOSS, adamw_bytes=100)
    assert text.startswith("Within 25% of fp32 AdamW's state, BAOC is best: val/loss 0.1 (sd 0.014, 2 seeds), lower is")
    assert told in text and text.endswith("fp32 AdamW, all of its state: 0.05 (sd 0.014, 2 seeds).")


def test_one_seed_tells_nothing_from_chance_and_higher_may_be_better():
    entries = [entry(0.9, 8), entry(0.8, 7), entry(0.95, 9, allocator="random")]
    found = best_at_levels(entries, quality=ACCURACY, adamw_bytes=100)
    text = summary_sentence(entries, found, metric="val/acc", quality=ACCURACY, adamw_bytes=100)
    assert text == (
        "Within 25% of fp32 AdamW's state, random feasible is best: val/acc 0.95 (1 seed), higher is better. BAOC: 0.9 "
        "(1 seed), the best of 2 points. With one seed the difference of 0.05 to BAOC is not "
        "distinguishable from chance."
    )
    assert "No run has a finite val/acc" in summary_sentence(
        [], (), metric="val/acc", quality=ACCURACY, adamw_bytes=100
    )


def test_short_names_leave_out_what_is_plain_and_stay_different():
    labels = [
        "budget=unlimited risk=statistics allocator=uniform_adamw optim.lr=null",
        "budget=state_10 risk=prior allocator=exact optim.lr=0.003 reallocation.mode=once",
        "budget=state_10 risk=statistics allocator=random",
        "budget=state_10 risk=prior allocator=random",
        "runs/7",
        "optim.betas=[0.9,0.999] allocator=exact optim.lr=0.0008523657303064135 dataset.path=my data/v1.20240501/set",
    ]
    told = short_names(labels)
    assert told[labels[5]] == "exact betas [0.9,0.999] lr 0.0008524 path my data/v1.20240501/set"
    assert told[labels[0]] == "adamw" and told[labels[1]] == "exact state_10 prior lr 0.003"
    assert (told[labels[2]], told[labels[3]]) == (labels[2], labels[3]), "alike without their risk"
    assert told["runs/7"] == "runs/7"
    betas = [f"optim.betas=[0.9,{beta}]" for beta in (0.99999, 0.99998)]  # neither is 1
    assert [shorten_numbers(label) for label in betas] == betas
    assert shorten_numbers("optim.betas=[0.9,0.9999800000000001]") == betas[1]
    lrs = ["optim.lr=0.00123441", "optim.lr=0.00123442", "optim.lr=0.0567891"]
    assert list(short_names(lrs, shorten=shorten_numbers).values()) == [*lrs[:2], "optim.lr=0.05679"]


def test_the_page_tells_what_its_points_are_and_how_much_state_each_block_keeps(tmp_path: Path):
    for seed in (0, 1):
        job(tmp_path / str(seed), loss=0.1, seed=seed)
    (tmp_path / "0" / "allocation.json").write_text(json.dumps({"choices": {"head": "foam", "body": "sign"}}))
    with (tmp_path / "0" / "candidates.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerows([["block", "spec", "state_bytes"], ["head", "adamw", 80], ["head", "foam", 20]])
        rows.writerows([["body", "sign", 0]])
    (workload,) = page_data(find_runs(tmp_path), title="t", page_folder=tmp_path)["workloads"]
    (point,) = workload["points"]
    assert (
        workload["about"].startswith("2 finished runs of 200,000 parameters,")
        and "2 seeds: 1 point," in workload["about"]
    )
    assert workload["verdict"].startswith("Within ")
    result = json.loads((tmp_path / "1" / "result.json").read_text())
    (tmp_path / "1" / "result.json").write_text(json.dumps(result | {"num_steps": 7 * result["num_steps"]}))
    verdict = page_data(find_runs(tmp_path), title="t", page_folder=tmp_path)["workloads"][0]["verdict"]
    assert verdict.startswith(
        f"Unlike runs: they trained for {result['num_steps']} to {7 * result['num_steps']} steps;"
    )
    assert point["kept"] == {"head": 25.0}, "of the body AdamW's bytes are not known"
    assert point["state_share"] == pytest.approx(100 * 100 / 2**22)
    assert workload["levels"][0]["best"]["BAOC"] == {
        "quality": pytest.approx(0.1),
        "interval": 0.0,
        "seeds": 2,
        "name": point["short"],
        "of": 1,
    }


def test_many_folders_have_a_short_title(tmp_path: Path):
    names = [Path(name) for name in "abcdef"]
    assert title_of(names[:1]) == "Frontier of a" and title_of(names[:4]) == "Frontier of a, b, c, d"
    assert title_of(names) == "Frontier of a, b, c and 3 more"
