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
        found: list[Any] = []
        for written, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if written.tag == "tag:yaml.org,2002:merge":
                continue
            if (key := self.construct_object(written, deep=True)) in found:  # pyright: ignore
                raise yaml.constructor.ConstructorError(
                    problem=f"{key} is written twice: leave one", problem_mark=written.start_mark
                )
            found.append(key)
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver(  # pyright: ignore  # of YAML 1.2; PyYAML asks for a point and a sign
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+"), list("-+0123456789")
)


def read_yaml(text: str) -> Any:
    """Raises yaml.YAMLError."""
    return yaml.load(text, Loader=_Loader)
