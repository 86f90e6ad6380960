"""`pip install baoc` without extras: both front doors work without what only run.py, studies and pages need."""

from collections.abc import Callable
from subprocess import CompletedProcess

import pytest

EXTRAS = (
    "wandb", "optuna", "plotly", "pydantic", "transformers", "hydra", "omegaconf", "diffusers", "datasets", "peft",
    "sklearn",
)  # fmt: skip
CODE = f"""
import importlib.machinery, importlib.metadata, sys

ABSENT = {set(EXTRAS)!r}
distribution, spec = importlib.metadata.Distribution.from_name, importlib.machinery.PathFinder.find_spec


def from_name(name):
    if name.replace("-", "_") in ABSENT:
        raise importlib.metadata.PackageNotFoundError(name)
    return distribution(name)


def find_spec(name, *given, **named):
    return None if name.partition(".")[0] in ABSENT else spec(name, *given, **named)


importlib.metadata.Distribution.from_name = from_name
importlib.machinery.PathFinder.find_spec = staticmethod(find_spec)

import baoc

assert "torch" not in sys.modules
import lightning as L
import torch
from torch import nn
from baoc import BaocOptimizer, BaocStrategy

model = nn.Linear(8, 8)
optimizer = BaocOptimizer(model, budget="state_25")
model(torch.randn(2, 8)).sum().backward()
optimizer.step()


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 1)

    def training_step(self, batch):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
strategy = BaocStrategy("8gb")
L.Trainer(strategy=strategy, max_steps=2, accelerator="cpu", **quiet).fit(Module(), torch.randn(8, 8))
assert optimizer.budget_met and strategy.budget_met
try:
    import baoc.integrations.hf
except ModuleNotFoundError as error:
    assert str(error) == (
        "Hugging Face's Trainer needs transformers, which is not installed: pip install 'baoc[hf]'"
    )
else:
    raise AssertionError("transformers is absent")
import runpy
runpy.run_path("run.py", run_name="__main__")
"""


@pytest.mark.slow
def test_both_doors_work_without_the_extras_and_the_command_says_what_it_lacks(
    run_python: Callable[..., CompletedProcess[str]],
):
    done = run_python(CODE)
    assert "plan for budget state_25" in done.stdout and "BaocStrategy: 2 steps" in done.stdout, done.stderr
    assert done.returncode == 2
    assert "the command needs hydra, which is not installed: pip install 'baoc[all]'" in done.stderr
