"""When a trial is ended early: beaten in everything at the same step, by the margin, and never before enough others."""

import json
from pathlib import Path

import pytest

from baoc.sweep.early_stopping import find_dominating_trial, values_at_rung

TWO = {"quality": "minimize", "state_bytes": "minimize"}


@pytest.mark.parametrize(
    ("own", "other", "beaten"),
    [
        ({"quality": 1.0, "state_bytes": 10}, {"quality": 0.8, "state_bytes": 10}, True),
        ({"quality": 1.0, "state_bytes": 10}, {"quality": 0.95, "state_bytes": 5}, False),  # within the margin
        ({"quality": 1.0, "state_bytes": 10}, {"quality": 0.1, "state_bytes": 11}, False),  # it is the smaller one
        ({"quality": None, "state_bytes": 10}, {"quality": 5.0, "state_bytes": 10}, True),  # it diverged
        ({"quality": None, "state_bytes": 10}, {"quality": None, "state_bytes": 10}, False),
        ({"quality": 1.0, "state_bytes": None}, {"quality": 0.1, "state_bytes": 1}, False),  # not known yet
    ],
)
def test_beaten_is_worse_in_everything_and_by_the_margin(own: dict, other: dict, beaten: bool):
    found = find_dominating_trial(own, [(7, other)], objectives=TWO, margin=0.1)
    assert found == (7 if beaten else None)


def test_measured_objectives_need_the_margin_and_exact_ones_do_not():
    ways = {"quality": "maximize", "samples_per_s": "maximize"}
    own = {"quality": 0.5, "samples_per_s": 100.0}
    assert find_dominating_trial(own, [(1, {"quality": 0.6, "samples_per_s": 120.0})], objectives=ways, margin=0.1) == 1
    assert (
        find_dominating_trial(own, [(1, {"quality": 0.6, "samples_per_s": 101.0})], objectives=ways, margin=0.1) is None
    )
    assert (
        find_dominating_trial(own, [(1, {"quality": 0.52, "samples_per_s": 120.0})], objectives=ways, margin=0.1)
        is None
    )


def test_values_are_those_of_the_first_validation_at_the_rung(tmp_path: Path):
    (tmp_path / "allocation.json").write_text(json.dumps({"state_bytes": 77}))
    rows = [
        {"step": 9, "train/loss": 2.0, "memory/peak_gib": 1.0},
        {"step": 19, "val/loss": 1.5, "throughput/samples_per_s": 10.0},
        {"step": 39, "val/loss": None, "memory/peak_gib": 2.0},
    ]
    names = ("quality", "state_bytes", "peak_bytes", "samples_per_s")
    at = {
        rung: values_at_rung(rows, rung=rung, folder=tmp_path, names=names, metric="val/loss")
        for rung in (10, 20, 21, 50)
    }
    first = {"quality": 1.5, "state_bytes": 77, "peak_bytes": 2**30, "samples_per_s": 10.0}
    assert at[10] == at[20] == first
    assert at[21] == {"quality": None, "state_bytes": 77, "peak_bytes": 2**31, "samples_per_s": 10.0}
    assert at[50] is None
