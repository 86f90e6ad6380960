"""Who is stepped natively and why not."""

import logging

import pytest
import torch

from baoc.core.catalogue import NATIVE, SPECS
from baoc.optim import backends
from baoc.optim.backends.native import native_refusal
from tests.support.native_cases import Pair
from tests.support.optimizing import Gradients, build, make_params, run_steps


def test_what_it_cannot_step_is_eager_and_said(caplog: pytest.LogCaptureFixture):
    params = {
        "turned": torch.nn.Parameter(torch.randn(4, 5).t()),
        "double": torch.nn.Parameter(torch.randn(3, dtype=torch.float64)),
        "plain": torch.nn.Parameter(torch.randn(3)),
    }
    with caplog.at_level(logging.WARNING, logger="baoc"):
        optimizer = build(params, "adamw", backend="native")
        run_steps(optimizer, params, gradients=Gradients(params), steps=1)
    chosen = {name: choice.backend for name, choice in optimizer.registry.choices.items()}
    assert chosen == {"turned": "eager", "double": "eager", "plain": "native"}
    assert "turned (native: turned: not contiguous float32 or bfloat16 on the CPU)" in caplog.text


def test_rules_without_a_native_step_are_named():
    refused = {name: native_refusal(spec) for name, spec in NATIVE.items() if native_refusal(spec)}
    without = {"adafactor", "adafactor_momentum", "muon", "column_norm", "column_norm_momentum"}
    assert {SPECS[name].rule for name in refused} == without
    assert refused["muon"] == "there is no native step for rule muon"


def test_auto_is_native_for_large_networks_only(monkeypatch: pytest.MonkeyPatch):
    def chosen(spec: str) -> str:
        return build(make_params({"a": (20, 50)}), spec).registry.choices["a"].backend

    assert chosen("adamw_int8") == "eager"
    monkeypatch.setattr(backends, "MIN_NATIVE_ELEMENTS", 1000)
    assert chosen("adamw_int8") == "native"
    assert chosen("adamw+split8") == "native"
    assert chosen("adamw") == "eager", "it is torch's step bit for bit"
    assert chosen("muon") == "eager"


def test_measurements_stand_for_what_auto_will_do(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(backends, "MIN_NATIVE_ELEMENTS", 1000)
    cpu = torch.device("cpu")
    names = {n: backends.proxy_backend(SPECS[n], device=cpu, numel=1000) for n in ("adamw", "adamw_int8", "muon")}
    assert names == {"adamw": "auto", "adamw_int8": "native", "muon": "auto"}
    assert backends.proxy_backend(SPECS["adamw_int8"], device=cpu, numel=999) == "auto"
    assert backends.proxy_backend(SPECS["adamw_int8"], device=torch.device("cuda"), numel=10**9) == "auto"


def test_large_gradients_whose_norm_is_above_the_limit_are_no_reason_to_leave_anything_out():
    pair = Pair("adamw_int8", {"a": (40, 30)})
    for step in range(2):
        pair.level()
        pair.give()
        for params in pair.params:
            grad = params["a"].grad
            assert grad is not None
            grad *= 3e13 / grad.abs().max()
            if step:
                grad[3, 4] = torch.nan
                params["a"].grad = grad.t().contiguous().t()
        pair.step()
        pair.check()
    assert pair.native.num_nonfinite == pair.eager.num_nonfinite == 1
