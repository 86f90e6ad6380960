"""Risk against damage: what is summed, what it is measured against, and ranks that brute force agrees with."""

import csv
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from baoc.errors import BadInputError
from baoc.sweep.study import run_study
from baoc.sweep.study_config import read_study
from experiments.analysis.calibrate import fitted_file, main
from experiments.analysis.damage import Damage, damages_below, fit, held_out, ranks
from tests.support.sweep_jobs import job


def allocation(folder: Path, *, drop: float, quantize: float, weights: dict[str, float] | None = None) -> None:
    """Two blocks that share the terms; the row of another spec must not count."""
    weights = weights or {}
    rows = []
    for block in ("a", "b"):
        terms = {"drop_m": drop / 2 * weights.get("drop_m", 1), "quantize_v": quantize / 2}
        rows.append({"block": block, "spec": "sign", **{f"risk/{name}": value for name, value in terms.items()}})
        rows.append({"block": block, "spec": "adamw", "risk/drop_m": 99.0, "risk/quantize_v": 99.0})
    with (folder / "candidates.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    told = {"choices": {"a": "sign", "b": "sign"}, "risk_model": "statistics"}
    (folder / "allocation.json").write_text(json.dumps(told))
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump(settings | {"risk": {"name": "statistics", "weights": weights}}))


def runs(folder: Path) -> None:
    for seed, loss in ((0, 1.0), (1, 2.0)):
        job(folder / f"whole_{seed}", loss=loss, allocator="uniform_adamw", seed=seed)
    for at, (drop, quantize) in enumerate([(0.1, 5.0), (0.2, 4.0), (0.3, 3.0), (0.4, 2.0), (0.5, 1.0), (0.6, 0.5)]):
        job(folder / f"run_{at}", loss=1.0 + drop, allocator="random", state_bytes=100 - at)
        allocation(folder / f"run_{at}", drop=drop, quantize=quantize, weights={"drop_m": 4.0} if at == 2 else None)


def test_damage_is_against_adamw_of_the_same_seed_and_terms_are_those_of_the_choices(tmp_path: Path):
    runs(tmp_path)
    job(tmp_path / "other", loss=2.5, allocator="random", seed=1)
    allocation(tmp_path / "other", drop=1.0, quantize=1.0)
    found = {run.run: run for run in damages_below([tmp_path])}
    assert found["run_1"].damage == pytest.approx(0.2) and found["other"].damage == pytest.approx(0.5)
    assert found["run_2"].terms == pytest.approx({"drop_m": 0.3, "quantize_v": 3.0})  # its weight is taken out again
    assert "whole_0" not in found


def test_weights_decide_how_well_risk_ranks(tmp_path: Path):
    runs(tmp_path)
    told = ranks(damages_below([tmp_path]), weights={"1": {}, "no quantize": {"quantize_v": 0.0}})
    found = {rank.what: rank for rank in told}
    alike = ("total, no quantize", "term drop_m", "fewer state bytes")
    assert [found[what].rho for what in alike] == pytest.approx([1, 1, 1])
    assert [found[what].rho for what in ("total, 1", "term quantize_v")] == pytest.approx([-1, -1])
    assert found["total, 1"].n == 6 and found["total, 1"].p == pytest.approx(2 / 720) and found["total, 1"].known


def noise(seed: int, *, runs: int, lone: bool) -> list[Damage]:
    """Damage that goes with nothing; a term of `lone` is there in one run alone."""
    rng = np.random.default_rng(seed)
    terms = np.eye(1, runs)[0] if lone else rng.normal(size=runs)
    own = {"state_bytes": 1, "risk_model": "statistics"}
    return [Damage(run=str(i), terms={"t": float(t)}, damage=rng.normal(), **own) for i, t in enumerate(terms)]


@pytest.mark.parametrize("lone", [False, True])
def test_noise_is_known_in_one_table_of_twenty(lone: bool):
    """Resampling runs told 31 of 60 tables of a term that one run of nine has."""
    told = [ranks(noise(seed, runs=9, lone=lone), weights={})[0].known for seed in range(200)]
    assert sum(told) <= (0 if lone else 20), "5 % of 200 are 10; 20 come by chance in one of 1,000 tries"
    assert lone or sum(told) >= 2


def test_what_does_not_vary_is_not_ranked():
    runs = [replace(run, terms={"t": 1.0}) for run in noise(0, runs=9, lone=False)]
    assert ranks(runs, weights={"1": {}}) == []
    same = [replace(run, damage=0.5) for run in noise(0, runs=9, lone=False)]
    assert [(math.isnan(rank.rho), rank.known) for rank in ranks(same, weights={})] == [(True, False)]


def test_runs_of_several_lengths_are_refused(tmp_path: Path):
    runs(tmp_path)
    file = tmp_path / "run_0" / "result.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_steps": 20}))
    with pytest.raises(BadInputError, match=r"runs of one length, and these have \d+, \d+ steps: give folders of one"):
        damages_below([tmp_path])


def test_what_cannot_be_ranked_is_said(tmp_path: Path, capsys):
    job(tmp_path / "one", loss=1.0, allocator="random")
    with pytest.raises(BadInputError, match="no run is allocator=uniform_adamw"):
        damages_below([tmp_path])
    job(tmp_path / "whole", loss=1.0, allocator="uniform_adamw")
    assert main([str(tmp_path)]) == 2
    assert "0 runs have an allocation of their own and a quality: ranking needs at least 5" in capsys.readouterr().err


# Quality is best at drop_m = 4: a trial of a risk_weights study, without training.
STUB = """
import json, os, sys, yaml
words = dict(word.split("=", 1) for word in sys.argv[1:])
folder, weight = words["hydra.run.dir"], float(words.get("risk.weights.drop_m", 1.0))
quality = {"value": abs(weight - 4) + 0.1 * int(words["seed"]), "higher_is_better": False, "name": "val/loss"}
same = {"state_bytes": 1, "peak_bytes": 1, "samples_per_s": 1.0, "schema": 1, "task": "vision", "model": "vit"}
rest = {"allocator": "exact", "risk": "statistics", "seed": int(words["seed"]), "num_steps": 1}
rest |= {"state_bytes_adamw": 1, "risk_total": 0.0, "command": "python run.py"}
budget = {"budget": {"name": "state_10", "limit": 1}}
json.dump(same | rest | budget | {"quality": quality}, open(folder + "/result.json", "w"))
"""


@pytest.mark.slow
def test_the_winner_of_a_study_is_written_with_its_evidence(tmp_path: Path, monkeypatch, capsys):
    given = {
        "name": "weights",
        "objectives": {"quality": "minimize"},
        "space": {"risk.weights.drop_m": {"choices": [0.5, 2.0, 8.0]}},
        "repeats": [["seed=0"], ["seed=1"], ["seed=2"]],
        "baselines": [[]],
        "sampler": "grid",
    }
    study = run_study(read_study(given), folder=tmp_path / "study", code=STUB)
    assert [trial.values for trial in study.trials] == [[pytest.approx(v + 0.1)] for v in (3.0, 3.5, 2.0, 4.0)]
    from baoc.config import assets

    own = tmp_path / "conf"
    (own / "risk").mkdir(parents=True)
    (own / "risk" / "statistics.yaml").write_text((assets.conf() / "risk" / "statistics.yaml").read_text())
    monkeypatch.setattr(assets, "conf", lambda: own)
    assert main([str(tmp_path / "study"), "--write", "calibrated"]) == 0
    text = (own / "risk" / "calibrated.yaml").read_text()
    assert (
        "trial 2 has quality 2.1" in text
        and "paired difference -1 +- " in text
        and "(n 3), 95 %:\n# lower than with weights of 1." in text
    )
    written = yaml.safe_load(text)
    assert written["name"] == "statistics" and written["weights"]["drop_m"] == 2.0 and written["weights"]["drop_v"] == 1
    assert "risk was not ranked: no run is allocator=uniform_adamw" in capsys.readouterr().out


def test_weights_of_nothing_are_refused(tmp_path: Path, capsys):
    given = {"name": "s", "objectives": {"quality": "minimize"}, "space": {"x": {"choices": [1]}}, "sampler": "grid"}
    run_study(read_study(given | {"fixed": ["seed=0"]}), folder=tmp_path, code=STUB)
    assert main([str(tmp_path), "--write", "w"]) == 2
    assert "no finished trial that searched risk.weights" in capsys.readouterr().err


def made(*, seeds: int, budgets: int, truth: dict[str, float], noise: float) -> list[Damage]:
    """Runs whose damage is a weighted sum of their terms, a constant per budget, and noise."""
    rng = np.random.default_rng(3)
    found = []
    for seed in range(seeds):
        for budget in range(budgets):
            for at in range(4):
                terms = dict(zip(truth, rng.uniform(0, 1, len(truth)), strict=True))
                damage = sum(truth[name] * value for name, value in terms.items()) - 5.0 * budget + noise * rng.normal()
                name = f"{seed}_{budget}_{at}"
                own = Damage(run=name, terms=terms, damage=damage, state_bytes=budget, risk_model="statistics")
                found.append(replace(own, budget=f"state_{budget}", seed=seed))
    return found


def test_fitted_weights_are_those_that_made_the_damage():
    truth = {"drop_m": 3.0, "fold_m": 0.0, "drop_v": 1.0, "share_v": -0.2}
    weights = fit(made(seeds=5, budgets=3, truth=truth, noise=0.01), ridge=1e-6)
    assert weights["drop_m"] / weights["drop_v"] == pytest.approx(3, rel=0.2)
    assert weights["fold_m"] == weights["share_v"] == 0.05, "no term is free, and none is below nothing"
    assert fit([]) == {} and fit(made(seeds=1, budgets=1, truth={"drop_m": -1.0}, noise=0)) == {}


def test_equal_budgets_and_held_out_seeds_tell_whether_weights_are_any_good():
    truth = {"drop_m": 3.0, "fold_m": 0.0}
    runs = made(seeds=5, budgets=3, truth=truth, noise=0.3)
    told = {rank.what: rank for rank in ranks(runs, weights={"1": {}})}
    assert told["total, 1, at equal budgets"].rho > 0.4 > abs(told["total, 1"].rho), "budgets hide what risk tells"
    found = held_out(runs)
    assert found is not None and found.rho > told["total, 1, at equal budgets"].rho and found.n == 60
    text = fitted_file(runs)
    written = yaml.safe_load(text)
    assert written["name"] == "statistics" and written["weights"]["fold_m"] == 0.05 * 1.0
    assert written["weights"]["drop_v"] == 1.0 and "on seeds that were held out" in text
    assert held_out([run for run in runs if run.seed == 0]) is None


def test_weights_that_are_no_better_are_not_written():
    with pytest.raises(BadInputError, match="that is no better, so nothing was written"):
        fitted_file(made(seeds=5, budgets=3, truth={"drop_m": 1.0, "fold_m": 1.0}, noise=0.5))
    with pytest.raises(BadInputError, match="several runs at each budget, of at least two seeds"):
        fitted_file(made(seeds=1, budgets=2, truth={"drop_m": 1.0, "fold_m": 0.5}, noise=0.1))
    mixed = made(seeds=2, budgets=2, truth={"drop_m": 1.0}, noise=0.1)
    with pytest.raises(BadInputError, match="of one risk model, and these have prior, statistics"):
        fitted_file([replace(mixed[0], risk_model="prior"), *mixed[1:]])
