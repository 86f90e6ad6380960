"""Shortens the import of Lightning by seconds, which a command pays before its first output.

Lightning imports torchmetrics, which imports transformers and scipy.signal if they are installed, for text and audio
metrics that no task here uses. Only the command does this; a user's own program may want them.
"""

from contextlib import suppress
from typing import Any

_UNUSED = ("scipy", "transformers", "nltk", "librosa", "pycocotools", "torchvision", "matplotlib", "onnxruntime")


def import_torchmetrics() -> None:
    """Imports torchmetrics as if `_UNUSED` were not installed.

    Does nothing if lightning_utilities has other internals than those that are replaced here.
    """
    with suppress(ImportError, AttributeError):
        from lightning_utilities.core import imports

        package_available, requirement_met = imports.package_available, imports.RequirementCache.__bool__

        def is_available(package_name: str) -> bool:
            return package_name.partition(".")[0] not in _UNUSED and package_available(package_name)

        def is_met(self: Any) -> bool:
            return not str(self.requirement or self.module).startswith(_UNUSED) and requirement_met(self)

        imports.package_available, imports.RequirementCache.__bool__ = is_available, is_met
        try:
            import torchmetrics  # noqa: F401
        finally:
            imports.package_available, imports.RequirementCache.__bool__ = package_available, requirement_met
