"""What a run records and shows: files, metrics, loggers, verified checkpoints, and tables on the terminal.

Names are imported on first use: `files` and `console` need neither torch nor Lightning, so that a plan or a frontier
can be shown without loading them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from baoc.tracking.checkpoints import load_checked, resolve_resume
    from baoc.tracking.loggers import finish_loggers, log_plan, log_reallocations, log_summary, make_loggers
    from baoc.tracking.metrics import read_metrics

__all__ = [
    "finish_loggers",
    "load_checked",
    "log_plan",
    "log_reallocations",
    "log_summary",
    "make_loggers",
    "read_metrics",
    "resolve_resume",
]

_LAZY = {
    "finish_loggers": "baoc.tracking.loggers",
    "load_checked": "baoc.tracking.checkpoints",
    "log_plan": "baoc.tracking.loggers",
    "log_reallocations": "baoc.tracking.loggers",
    "log_summary": "baoc.tracking.loggers",
    "make_loggers": "baoc.tracking.loggers",
    "read_metrics": "baoc.tracking.metrics",
    "resolve_resume": "baoc.tracking.checkpoints",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'baoc.tracking' has no attribute {name!r}; it offers {', '.join(__all__)}")
    return getattr(import_module(_LAZY[name]), name)
