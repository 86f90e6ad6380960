"""Rewords errors for users of `BaocStrategy` and `BaocOptimizer`: keys of conf/ become Python settings."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar, cast

from baoc.errors import BaocError

Method = TypeVar("Method", bound=Callable[..., Any])

IN_PYTHON: Mapping[str, str] = {  # term in planning's messages -> name in SessionSettings or the user's code
    "catalogue.keep_fp32_roles": "settings.planner.keep_fp32_roles",
    "catalogue.specs": "settings.planner.specs",
    "catalogue=host": "'*@streamed' in settings.planner.specs",
    "a smaller micro_batch": "fewer samples per forward",
    "model.checkpointing=true": "checkpointing='auto'",
    "model.checkpointing=false": "checkpointing=False",
    "model.checkpointing=": "checkpointing=",
    "a smaller model.size": "a smaller model",
    "allocator=exact": "settings.planner.allocator='exact'",
}


def in_own_words(method: Method) -> Method:
    """Rewords what a method of BaocStrategy or BaocOptimizer raises, unless its settings came from conf/."""

    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except BaocError as error:
            settings = getattr(self, "settings", None)
            if settings is None or not settings.planner.from_conf:
                error.args = tuple(reworded(arg) if isinstance(arg, str) else arg for arg in error.args)
                if advice := getattr(error, "advice", ()):
                    cast(Any, error).advice = tuple(map(reworded, advice))
            raise

    return cast(Method, run)


def reworded(text: str) -> str:
    """A message with settings of the command line (IN_PYTHON) replaced by the arguments of Python's doors."""
    for ours, theirs in IN_PYTHON.items():
        text = text.replace(ours, theirs)
    return text
