"""Reads what users write in YAML as Hydra reads its files: a key that is written twice is an error, 1e-3 a number."""

import re
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from yaml import SafeLoader as _Parser
else:
    _Parser = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # several times faster, where PyYAML is built with it


class _Loader(_Parser):
    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        found: set[tuple[str, str]] = set()
        for written, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            key = (written.tag, str(written.value))
            if key in found and written.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(
                    problem=f"{written.value} is written twice: leave one", problem_mark=written.start_mark
                )
            found.add(key)
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver(  # pyright: ignore  # of YAML 1.2; PyYAML asks for a point and a sign
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_yaml(text: str) -> Any:
    """Raises yaml.YAMLError."""
    return yaml.load(text, Loader=_Loader)
