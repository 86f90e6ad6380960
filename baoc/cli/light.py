"""Takes seconds out of the import of Lightning, which a command pays before it says anything.

torchmetrics, which Lightning imports, imports transformers and scipy.signal where they are installed, for metrics of
texts and sounds that nothing here uses. Only the command does this: in a program of the user's they may be wanted.
"""

from contextlib import suppress
from typing import Any

_UNUSED = ("scipy", "transformers", "nltk", "librosa", "pycocotools", "torchvision", "matplotlib", "onnxruntime")


def import_metrics() -> None:
    """Imports torchmetrics as if `_UNUSED` were not installed; as it is where its ways of asking are other ones."""
    with suppress(ImportError, AttributeError):
        from lightning_utilities.core import imports

        asked, cached = imports.package_available, imports.RequirementCache.__bool__

        def available(package_name: str) -> bool:
            return package_name.partition(".")[0] not in _UNUSED and asked(package_name)

        def met(self: Any) -> bool:
            return not str(self.requirement or self.module).startswith(_UNUSED) and cached(self)

        imports.package_available, imports.RequirementCache.__bool__ = available, met
        try:
            import torchmetrics  # noqa: F401
        finally:
            imports.package_available, imports.RequirementCache.__bool__ = asked, cached
