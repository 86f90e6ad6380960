"""Code of the user: `FILE.py:NAME`, `package.module.NAME`, and the entry points that installed packages declare.

Models, data sets and tasks are named so in place of a registry's name. Every fault of such code is told as one
sentence that names its file and line. Free of torch; what the code imports is its own matter.
"""

import hashlib
import importlib
import importlib.util
import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, wraps
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from traceback import walk_tb
from types import ModuleType
from typing import Any

from baoc.errors import BadInputError, BaocError, exception_chain
from baoc.types import RuleInfo

log = logging.getLogger(__name__)

CONFIG_GROUPS = ("model", "dataset", "task")  # of a configuration
NAME_FORMATS = "FILE.py:NAME or package.module.NAME"
_FILE = re.compile(r"(?P<file>.*\.py)(?::(?P<name>[^/]*))?", re.DOTALL)
_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
_ROOM = ("OutOfMemoryError", "MemoryError")  # which are told in words of their own
_used: dict[Path, str] = {}  # files, and folders of packages, that were loaded: what named them


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRule:
    """A rule of another package, as an entry point of `baoc.rules` gives it; see docs/own-code.md.

    Args:
        info: its tags.
        storages: those that it is offered in.
        arithmetic: name of the module that defines `RULES`, imported when an optimizer is built.
    """

    info: RuleInfo
    storages: tuple[str, ...] = ("fp32",)
    arithmetic: str


# -- names ------------------------------------------------------------------------------------------------------------


def names_own_code(name: str) -> bool:
    """Whether a name is a file's or a module's, and none of a registry."""
    return _FILE.fullmatch(name) is not None or _DOTTED.fullmatch(name) is not None


def file_of(name: str) -> Path | None:
    """The file of `FILE.py:NAME`; None for other names."""
    found = _FILE.fullmatch(name)
    return Path(found["file"]) if found else None


def short_name(name: str) -> str:
    """A name for folders and tables: `nets/mine.py:build` is `mine.build`, others stay."""
    found = _FILE.fullmatch(name)
    text = f"{Path(found['file']).stem}.{found['name'] or ''}".rstrip(".") if found else name
    return re.sub(r"[^\w.-]+", "-", text)


@cache
def entry_points_of(group: str) -> Mapping[str, EntryPoint]:
    """Name -> entry point of the group `baoc.models`, `baoc.datasets`, `baoc.tasks`, `baoc.rules` or `baoc.recipes`."""
    return {point.name: point for point in entry_points(group=group)}


def load_entry_points(group: str, *, kind: type | tuple[type, ...]) -> dict[str, Any]:
    """The objects of a group's entry points, by name. One that fails or is no `kind` is left out with a warning, so
    that another package's fault ends no run that does not use it."""
    found: dict[str, Any] = {}
    for name, point in entry_points_of(group).items():
        try:
            value = point.load()
        except Exception as error:  # of any package
            log.warning("%s=%s of %s cannot be loaded (%s) and is left out", group, name, point.value, _said(error))
            continue
        if isinstance(value, kind):
            found[name] = value
        else:
            log.warning("%s=%s of %s is a %s and is left out", group, name, point.value, type(value).__name__)
    return found


# -- loading and calling ----------------------------------------------------------------------------------------------


def load(name: str, *, key: str) -> Callable[..., Any]:
    """The function or class that `name` means; `key` is the setting that has it, for messages.

    Raises BadInputError: no such file or module, one that cannot be imported, no such name in it, nothing callable.
    """
    point = entry_points_of(f"baoc.{key}s").get(name) if key in CONFIG_GROUPS else None
    if point is not None:
        with faults(key, name):
            module = importlib.import_module(point.module)
        _use(module, name)
        found: Any = module
        for part in point.attr.split(".") if point.attr else ():
            found = getattr(found, part, None)
        return _callable(found, module=module, attr=point.attr, key=key, name=name)
    file = _FILE.fullmatch(name)
    if file is not None:
        module, attr = _of_file(Path(file["file"]), key=key, name=name), file["name"]
    else:
        parent, _, attr = name.rpartition(".")
        module = _of_module(parent, key=key, name=name)
    return _callable(getattr(module, attr or "", None), module=module, attr=attr, key=key, name=name)


def call(name: str, *, key: str, options: Mapping[str, Any], offered: Mapping[str, Any] | None = None) -> Any:
    """Calls the code with the user's `options`, and those of `offered` that its signature names.

    `_args_` of the options are positional, as Hydra's instantiate takes them. Raises BadInputError where arguments are
    missing or unknown, and where the code raises.
    """
    made = load(name, key=key)
    given = dict(options)
    args = tuple(given.pop("_args_", ()))
    signature = _signature(made)
    if signature is not None:
        named = {p.name for p in signature.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        bound = len(args)
        free = [n for n in list(signature.parameters)[bound:] if n in named]
        given = {**{k: v for k, v in (offered or {}).items() if k in free}, **given}
        _check_arguments(signature, args, given, key=key, name=name)
    with faults(key, name):
        return made(*args, **given)


class faults:
    """Inside, what the code of a name raises becomes a BadInputError that names its file and line.

    Errors of this project and exhausted memory pass as they are.
    """

    def __init__(self, key: str, name: str, *, doing: str = ""):
        self._told = f"{key}={name}{doing}"

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is None or not isinstance(error, Exception) or isinstance(error, BaocError):
            return
        if type(error).__name__ in _ROOM:
            return
        raise BadInputError(f"{self._told} raised {_said(error)}") from error


def with_faults(made: Callable[..., Any], *, key: str) -> Callable[..., Any]:
    """`made`, a callable that was given as the argument `key`: what it raises becomes a BadInputError, see `faults`."""
    try:
        file = inspect.getsourcefile(inspect.unwrap(made))
    except TypeError:  # of C, or an object
        file = None
    name = getattr(made, "__qualname__", type(made).__name__)
    if file is not None and not _installed(Path(file).resolve()):
        _used[Path(file).resolve()] = f"{file}:{name}"

    @wraps(made)
    def call_it(*args: Any, **kwargs: Any) -> Any:
        with faults(key, name):
            return made(*args, **kwargs)

    return call_it


def user_location(error: BaseException) -> str | None:
    """`FILE:LINE` of the innermost frame that is the user's; None where none is."""
    place = None
    for link in exception_chain(error):
        for frame, line in walk_tb(link.__traceback__):
            if _owner(frame.f_code.co_filename) is not None:
                place = f"{_relative(frame.f_code.co_filename)}:{line}"
        if place is not None:
            return place
    return None


def used_names() -> tuple[str, ...]:
    """Names of the user's code that this process has loaded."""
    return tuple(dict.fromkeys(_used.values()))


def forget_used() -> None:
    """Forgets what was used: another command of this process begins."""
    _used.clear()


def class_lacking_attribute(error: BaseException) -> str | None:
    """The user's class whose object lacks the attribute that `error` is about."""
    for link in exception_chain(error):
        held = getattr(link, "obj", None) if isinstance(link, AttributeError) else None
        source = getattr(sys.modules.get(type(held).__module__), "__file__", None) if held is not None else None
        if source is not None and _owner(source) is not None:
            return type(held).__name__
    return None


def source_sha256(name: str, *, key: str) -> str:
    """SHA-256 of the code's file; empty where it has none. Files that it imports are not part of it."""
    path = file_of(name)
    if path is None:
        source = inspect.getsourcefile(inspect.unwrap(load(name, key=key)))
        path = Path(source) if source else None
    return "" if path is None or not path.is_file() else hashlib.sha256(path.read_bytes()).hexdigest()


# -- parts ------------------------------------------------------------------------------------------------------------


def _of_file(file: Path, *, key: str, name: str) -> ModuleType:
    path = file.expanduser().resolve()
    if not path.is_file():
        raise BadInputError(f"{key}={name}: there is no file {file}; the path is relative to {Path.cwd()}")
    _used[path] = name
    state = hashlib.sha256(os.fsencode(path) + path.read_bytes()).hexdigest()[:12]  # an edited file is another module
    module_name = f"_own_{path.stem}_{state}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # where pickles and dataclasses look their classes up
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # files beside it, behind whatever is installed
    try:
        with faults(key, name, doing=" cannot be imported: it"):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


def _of_module(parent: str, *, key: str, name: str) -> Any:
    """The module, or class within one, that holds the last part of a dotted name."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # packages of the folder in which the command was given
    top = parent.partition(".")[0]
    if top not in sys.modules and importlib.util.find_spec(top) is None:
        raise BadInputError(f"{key}={name}: there is no package {top!r}: install it, or write {NAME_FORMATS}")
    module_name, held = parent, list[str]()
    while True:
        with faults(key, name, doing=" cannot be imported: it"):
            try:
                module = importlib.import_module(module_name)
                break
            except ModuleNotFoundError as error:
                missing = error.name or ""
                if not (module_name == missing or module_name.startswith(f"{missing}.")) or "." not in module_name:
                    raise
        module_name, _, last = module_name.rpartition(".")
        held.insert(0, last)
    _use(module, name)
    found: Any = module
    for part in held:  # a class of it
        found = getattr(found, part, None)
        if found is None:
            raise BadInputError(f"{key}={name}: {module_name} has no {part!r}{_has(module)}")
    return found


def _use(module: ModuleType, name: str) -> None:
    if file := getattr(module, "__file__", None):
        _used[Path(file).resolve()] = name


def _callable(found: Any, *, module: ModuleType, attr: str | None, key: str, name: str) -> Callable[..., Any]:
    where = _relative(getattr(module, "__file__", None) or module.__name__)
    if not attr:
        raise BadInputError(f"{key}={name} names no function: write {key}={name.removesuffix(':')}:NAME{_has(module)}")
    if found is None:
        raise BadInputError(f"{key}={name}: {where} defines no {attr!r}{_has(module)}")
    if not callable(found):
        raise BadInputError(f"{key}={name} is a {type(found).__name__}, and must be a function or a class")
    return found


def _has(module: ModuleType) -> str:
    held: dict[str, Any] = vars(module)
    own = [
        name
        for name, value in held.items()
        if not name.startswith("_") and callable(value) and getattr(value, "__module__", None) == module.__name__
    ]
    return f"; it has: {', '.join(own[:8])}" if own else "; it defines no function or class"


def _signature(made: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(made)
    except (TypeError, ValueError):  # of C
        return None


def _check_arguments(
    signature: inspect.Signature, args: tuple[Any, ...], given: Mapping[str, Any], *, key: str, name: str
) -> None:
    from difflib import get_close_matches

    parameters = signature.parameters
    takes = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for word in given:
            if word not in takes:
                near = get_close_matches(word, takes, n=1)
                hint = f" (did you mean {key}.{near[0]}?)" if near else ""
                raise BadInputError(f"{name} has no argument {word!r}{hint}; it takes: {', '.join(takes) or 'none'}")
    free = list(parameters.values())[len(args) :]
    missing = [
        p.name
        for p in free
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        and p.default is p.empty
        and p.name not in given
    ]
    if missing:
        raise BadInputError(f"{key}={name} needs {', '.join(f'{key}.{word}=VALUE' for word in missing)}")
    try:
        signature.bind(*args, **given)
    except TypeError as error:
        raise BadInputError(f"{key}={name} cannot be called: {error}") from error


def _said(error: BaseException) -> str:
    """Kind, place and first line of an error."""
    text = next((line for line in str(error).splitlines() if line.strip()), "")
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__} ({_relative(error.filename)}:{error.lineno}): {error.msg}"
    place = user_location(error)
    return f"{type(error).__name__}{f' ({place})' if place else ''}{f': {text}' if text else ''}"


def _owner(filename: str) -> str | None:
    """The name whose file or folder a frame's file is in: files beside FILE.py are the user's as well."""
    if filename.startswith("<"):
        return None
    path = Path(filename).resolve()
    for held, name in _used.items():
        if path == held or (file_of(name) is not None and held.parent in path.parents and not _installed(path)):
            return name
    return None


def _installed(path: Path) -> bool:
    """Whether a file is of an environment, or of this package, which may lie below the user's folder."""
    package = Path(__file__).resolve().parents[1]
    return package in path.parents or not {"site-packages", "dist-packages"}.isdisjoint(path.parts)


def _relative(filename: str) -> str:
    try:
        return str(Path(filename).resolve().relative_to(Path.cwd()))
    except ValueError:
        return filename
