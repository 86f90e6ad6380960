"""How many files a step is read in: those of baoc/ that one `step()` enters once nothing changes any more."""

import pytest
import torch

from baoc.kernels.cpp import library
from tests.support.optimizing import trained
from tests.support.step_files import MOST, entered

SHAPES = {"a": (40, 30), "b": (24, 36)}
# A rule that sees matrices is read in `rules/matrix.py` too, and host-placed blocks pass through a ring.
HOSTED = {"backends/hosted.py", "kernels/streams.py", "offload/streaming.py"}


def files_of_a_step(spec: str, *, backend: str) -> set[str]:
    params, optimizer, gradients = trained(SHAPES, spec, backend=backend, steps=3)
    gradients.give(params)
    with entered() as found:
        optimizer.step()
    assert {choice.backend for choice in optimizer.registry.choices.values()} == {backend}
    return found


@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize(
    "spec", ["adamw", "adamw_int8", "adamw_int4", "lion_bf16", "adamw_int8+split8", "foam_l2_int8"]
)
def test_a_step_is_read_in_six_files(spec: str, backend: str) -> None:
    library()  # which the finite check then uses
    found = files_of_a_step(spec, backend=backend)
    assert {"optimizer.py", "nonfinite.py", f"backends/{backend}.py"} <= found
    assert len(found) <= MOST, sorted(found)


def test_blocks_in_host_memory_add_the_files_of_their_way() -> None:
    params, optimizer, gradients = trained(SHAPES, "adamw_int8@streamed", backend="eager", steps=3)
    gradients.give(params)
    with entered() as found:
        optimizer.step()
    assert "backends/hosted.py" in found and len(found - HOSTED) <= MOST, sorted(found)


@pytest.mark.slow
def test_no_rule_of_the_catalogue_needs_more_than_one_file_above() -> None:
    """With 8-bit states and split weights, which are the longest way."""
    torch.manual_seed(0)
    for spec in ("adamw_shared_in_int8", "adafactor_momentum_int8", "foam_l2_int8", "muon_int8"):
        assert len(files_of_a_step(f"{spec}+split8", backend="eager")) <= MOST + 1, spec
