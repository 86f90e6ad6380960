"""Reads users' YAML as Hydra reads its files: a key that is written twice is an error, and 1e-3 is a number."""

import re
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from yaml import SafeLoader as _Parser
else:
    _Parser = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # several times faster, if PyYAML is built with it


class _Loader(_Parser):
    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[tuple[str, str]] = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            key = (key_node.tag, str(key_node.value))
            if key in seen and key_node.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(
                    problem=f"{key_node.value} is written twice: leave one", problem_mark=key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver(  # pyright: ignore  # YAML 1.2's floats: PyYAML's need a point and a sign
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_yaml(text: str) -> Any:
    """The content of a YAML document. Raises yaml.YAMLError."""
    return yaml.load(text, Loader=_Loader)
