"""GPUs that can be planned for without being present: memory, and approximate rates from data sheets."""

from dataclasses import dataclass

from baoc.planning.transfer import STORED_RATES, slower_link
from baoc.types import LinkRates
from baoc.units import GIB, MIB

UTILISATION = 0.4  # share of the peak arithmetic rate that training is assumed to reach; a guess, as models differ
BANDWIDTH_SHARE = 0.8  # share of the memory bandwidth that a fused optimizer step is assumed to reach


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One GPU model.

    Args:
        flops: dense bf16 FLOP/s, by the data sheet.
        bandwidth: bytes/s of its memory, by the data sheet.
        context_bytes: CUDA context with loaded kernels; measured on an H100 (0.70 GiB) and an H200, assumed elsewhere.
        link: rates to the host, measured on an H100; PCIe 4 is assumed to carry half.
        workspace_bytes: cuBLAS workspaces of forward and backward; measured on an H200, torch's defaults elsewhere.
    """

    name: str
    description: str
    memory_bytes: int
    flops: float
    bandwidth: float
    context_bytes: int = int(0.70 * GIB)
    link: LinkRates = STORED_RATES
    workspace_bytes: int = 64 * MIB

    def step_seconds(self, *, flops: float, moved_bytes: float) -> float:
        """Estimated seconds of `flops` of arithmetic and of an optimizer step that moves `moved_bytes`."""
        return flops / (UTILISATION * self.flops) + moved_bytes / (BANDWIDTH_SHARE * self.bandwidth)


_PCIE_4 = slower_link(STORED_RATES, factor=2)
_WORKSPACES_BEFORE_HOPPER = 17 * MIB
CARDS: dict[str, Card] = {
    card.name: card
    for card in (
        Card(name="h100", description="H100 SXM, 80 GB", memory_bytes=79 * GIB, flops=989e12, bandwidth=3.35e12),
        Card(
            name="h200",
            description="H200 SXM, 141 GB",
            memory_bytes=139 * GIB,
            flops=989e12,
            bandwidth=4.8e12,
            context_bytes=758 * MIB,  # measured after a forward and backward
        ),
        Card(
            name="a100",
            description="A100 SXM, 80 GB",
            memory_bytes=79 * GIB,
            flops=312e12,
            bandwidth=2.0e12,
            link=_PCIE_4,
            workspace_bytes=_WORKSPACES_BEFORE_HOPPER,
        ),
        Card(
            name="rtx4090",
            description="RTX 4090, 24 GB",
            memory_bytes=23 * GIB,
            flops=165e12,
            bandwidth=1.0e12,
            link=_PCIE_4,
            workspace_bytes=_WORKSPACES_BEFORE_HOPPER,
        ),
    )
}
