"""Matching by displacement: rules without momentum go as far as AdamW, and moves between the kinds are sound."""

import pytest
import torch

from baoc.errors import BadInputError
from baoc.optim import matching
from baoc.optim.rules import RULES
from tests.support.matched import LR, copies, moved_rms
from tests.support.optimizing import Gradients, build, make_params, run_steps


def first_rms(spec: str, **settings: object) -> float:
    params = make_params({"w": (16, 32)})
    optimizer = build(params, {"w": spec}, lr=LR, weight_decay=0.0, **settings)
    before = copies(params)
    run_steps(optimizer, params, gradients=Gradients(params), steps=1)
    return moved_rms(params, before)


def test_only_rules_that_average_nothing_have_a_target_of_their_own():
    averaging = {name for name, rule in RULES.items() if matching.has_momentum(rule.info)}
    assert {"adamw", "lion", "muon", "adafactor_momentum"} <= averaging
    assert not {"rmsprop", "sign", "adafactor", "column_norm"} & averaging
    assert first_rms("sign", rms_matching="displacement") == pytest.approx(1.0, rel=1e-3)
    assert first_rms("lion", rms_matching="displacement") == pytest.approx(0.2, rel=1e-3)
    assert first_rms("sign", rms_matching="rms") == first_rms("sign") == pytest.approx(0.2, rel=1e-3)


def test_moves_take_no_target_from_a_rule_that_averages_nothing():
    params = make_params({"w": (16, 32)})
    optimizer = build(params, {"w": "sign"}, lr=LR, weight_decay=0.0, rms_matching="displacement")
    run_steps(optimizer, params, gradients=Gradients(params), steps=2)

    def target() -> float:
        match = optimizer.registry.live["w"].match
        assert match is not None
        return float(match[0])

    assert target() == 1.0
    for spec, expected in (("lion", 0.2), ("rmsprop", 1.0), ("signum", 0.2)):
        optimizer.migrate({"w": spec})
        run_steps(optimizer, params, gradients=Gradients(params), steps=1)
        assert target() == pytest.approx(expected), spec
    saved = optimizer.state_dict()
    other = build(make_params({"w": (16, 32)}), {"w": "sign"}, lr=LR, rms_matching="displacement")
    other.load_state_dict(saved)
    assert other.registry.live["w"].match is not None and other.registry.live["w"].match[0] == 1.0


def test_without_noise_a_rule_without_momentum_goes_as_far_as_adamw():
    """A constant gradient: both end where the learning rate takes them, which a fifth of the step would not."""
    ends = {}
    for spec, way in (("adamw", "rms"), ("rmsprop", "displacement"), ("rmsprop", "rms")):
        params = make_params({"w": (4, 8)})
        start = params["w"].detach().clone()
        optimizer = build(params, {"w": spec}, lr=LR, weight_decay=0.0, rms_matching=way)
        for _ in range(20):
            params["w"].grad = torch.full((4, 8), 0.5)
            optimizer.step()
        ends[spec, way] = float((start - params["w"].detach()).mean()) / LR
    assert ends["adamw", "rms"] == pytest.approx(20, rel=1e-3)
    assert ends["rmsprop", "displacement"] == pytest.approx(20, rel=1e-3)
    assert ends["rmsprop", "rms"] == pytest.approx(4, rel=1e-3)


def test_another_way_is_refused():
    with pytest.raises(BadInputError, match=r"no way of matching updates .speed.; choose from: rms, displacement"):
        build(make_params({"w": (4, 8)}), "sign", rms_matching="speed")
