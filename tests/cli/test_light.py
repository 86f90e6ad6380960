"""Importing Lightning without what torchmetrics would import for metrics of texts and sounds."""

import subprocess
import sys

import pytest

CODE = """
import sys
from lightning_utilities.core import imports
before = imports.package_available, imports.RequirementCache.__bool__
from baoc.cli.fast_import import import_torchmetrics
import_torchmetrics()
import baoc.training.run, torch, torchmetrics
assert (imports.package_available, imports.RequirementCache.__bool__) == before and imports.package_available("scipy")
metric = torchmetrics.MeanMetric()
metric.update(torch.tensor([1.0, 3.0]))
unused = {"scipy.signal", "transformers", "wandb", "optuna", "diffusers"}
print(sorted(unused & set(sys.modules)), float(metric.compute()))
"""


@pytest.mark.slow
def test_nothing_is_imported_for_metrics_of_others():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", CODE], capture_output=True, text=True, check=False)
    assert done.stdout == "[] 2.0\n", done.stderr
