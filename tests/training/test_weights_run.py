"""Runs whose blocks keep their weights in bf16: refused where layers could not take them, else trained and resumed."""

from pathlib import Path
from typing import Any

import pytest
import torch

from baoc.errors import BadInputError
from tests.support.classifier import Classifier, fit
from tests.support.reduced_weights import SPECS, run, strategy

pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists:UserWarning")


@pytest.mark.parametrize("precision", ["32-true", "64-true"])
def test_precisions_that_could_not_read_them_are_refused(precision: Any) -> None:
    with pytest.raises(BadInputError, match=rf"specs with bf16 weights \(adamw_int8\+split8.*precision is {precision}"):
        fit(strategy("adamw", "adamw_int8+split8"), precision=precision)


def test_a_run_learns_and_keeps_the_norms_whole() -> None:
    losses: list[float] = []

    class Logged(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            losses.append(float(loss.detach()))
            return loss

    module = fit(strategy(*SPECS), module=Logged(), steps=24, precision="bf16-mixed")
    assert sum(losses[-8:]) < 0.9 * sum(losses[:8])
    types = {name: param.dtype for name, param in module.named_parameters()}
    assert types["net.0.weight"] is torch.bfloat16 and types["net.1.weight"] is torch.float32


def test_a_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path: Path) -> None:
    """The reallocation is before the checkpoint, so the first plan of the resumed run is another one."""
    whole, optimizer = run(tmp_path, steps=16, resume=False)
    again, resumed = run(tmp_path, steps=16, resume=True)
    assert resumed.specs == optimizer.specs
    assert any("+" in spec for spec in resumed.specs.values())
    for (name, a), b in zip(whole.named_parameters(), again.parameters(), strict=True):
        assert a.dtype is b.dtype and torch.equal(a, b), name
    for name, value in optimizer.export_weights().items():
        assert torch.equal(value, resumed.export_weights()[name]), name
