"""Races replayed on recorded runs are wrong no more often than their claim allows."""

import pytest

from experiments.analysis.race_replay import Recorded, recorded_races, summary

RECORDED = recorded_races()


@pytest.mark.slow
@pytest.mark.parametrize("recorded", RECORDED, ids=[one.name for one in RECORDED])
def test_replayed_races_keep_the_promise(recorded: Recorded):
    told = summary(recorded, races=150, seed=1)
    assert told["wrong_claims"] <= 0.10 and told["plans_wrongly_taken"] <= 0.10


def test_the_recorded_rows_have_plans_controls_and_rates():
    names = {one.name for one in RECORDED}
    assert {"vision, plan at 25 %", "language, plan at 3 %", "diffusion, recipes"} <= names
    kinds = {(entrant.uniform, entrant.control) for one in RECORDED for entrant in one.entrants}
    assert kinds == {(True, False), (False, False), (False, True)}
    assert max(len(one.seeds) for one in RECORDED) == 14
