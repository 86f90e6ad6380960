"""BAOC gives every block of a network the cheapest optimizer it can safely use, inside a memory and time budget.

What trains is resolved on first use, so importing the decision core stays free of torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from baoc.models.switches import set_compiled
    from baoc.training.advise import Advice, advise
    from baoc.training.fully_sharded import BaocFSDPStrategy
    from baoc.training.lightning import BaocDDPStrategy, BaocStrategy
    from baoc.training.plain_loop import BaocOptimizer

__version__ = "0.1.0"
__all__ = [
    "Advice", "BaocDDPStrategy", "BaocFSDPStrategy", "BaocOptimizer", "BaocStrategy", "__version__", "advise",
    "set_compiled",
]  # fmt: skip

_LAZY = {
    "set_compiled": "baoc.models.switches",
    "Advice": "baoc.training.advise",
    "advise": "baoc.training.advise",
    "BaocOptimizer": "baoc.training.plain_loop",
    "BaocStrategy": "baoc.training.lightning",
    "BaocDDPStrategy": "baoc.training.lightning",
    "BaocFSDPStrategy": "baoc.training.fully_sharded",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'baoc' has no attribute {name!r}; it offers {', '.join(__all__)}")
    return getattr(import_module(_LAZY[name]), name)
