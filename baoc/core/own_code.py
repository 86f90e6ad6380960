"""The user's own code: `FILE.py:NAME`, `package.module.NAME`, and entry points that installed packages declare.

A model, data set or task may be named so in place of a registry's name. An error in such code becomes a BadInputError
of one sentence with file and line.
"""

import hashlib
import importlib
import importlib.util
import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, wraps
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from traceback import walk_tb
from types import ModuleType
from typing import Any, TypeVar

from baoc.errors import BadInputError, BaocError, exception_chain, unknown_name
from baoc.types import RuleInfo

log = logging.getLogger(__name__)

CONFIG_GROUPS = ("model", "dataset", "task")  # of a configuration
NAME_FORMATS = "FILE.py:NAME or package.module.NAME"
_FILE = re.compile(r"(?P<file>.*\.py)(?::(?P<name>[^/]*))?", re.DOTALL)
_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
_OUT_OF_MEMORY = ("OutOfMemoryError", "MemoryError")  # not faults of the user's code
_used: dict[Path, str] = {}  # loaded file -> the name by which it was asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRule:
    """A rule of another package, as an entry point of `baoc.rules` gives it; see docs/own-code.md.

    Args:
        info: its tags.
        storages: storages that it is offered in.
        arithmetic: name of the module that defines `RULES`; it is imported when an optimizer is built.
    """

    info: RuleInfo
    storages: tuple[str, ...] = ("fp32",)
    arithmetic: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Base of the entries of MODELS, TASKS and DATASETS.

    Args:
        module: where its class or builder is; it is imported when it is used.
        options: name -> default.
        option_types: types of options whose default does not show them; a default of None means text or null.
        is_own: the user's code; its options are its arguments, and are checked when it is called.
    """

    name: str
    description: str
    module: str = ""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    option_types: Mapping[str, Any] = field(default_factory=dict[str, Any])
    is_own: bool = False


EntryT = TypeVar("EntryT", bound=Entry)


# -- names ------------------------------------------------------------------------------------------------------------


def names_own_code(name: str) -> bool:
    """Whether a name has the form of a file's or a module's."""
    return _FILE.fullmatch(name) is not None or _DOTTED.fullmatch(name) is not None


def is_own_code(name: str, *, group: str) -> bool:
    """Whether a name of a group of CONFIG_GROUPS is not of its registry but of the user's code."""
    return names_own_code(name) or name in entry_points_of(f"baoc.{group}s")


def find_entry(name: str, *, group: str, registry: Mapping[str, EntryT], own: Callable[..., EntryT]) -> EntryT:
    """The entry of a name, or one that `own` makes for the user's own code. Raises BadInputError for any other name."""
    if name in registry:
        return registry[name]
    if is_own_code(name, group=group):
        return own(name=name, description="your own code", is_own=True)
    raise unknown_name(name, what=group, allowed=[*registry, *entry_points_of(f"baoc.{group}s"), NAME_FORMATS])


def file_of(name: str) -> Path | None:
    """The file of `FILE.py:NAME`; None for other names."""
    match = _FILE.fullmatch(name)
    return Path(match["file"]) if match else None


def short_name(name: str) -> str:
    """A name for folders and tables: `nets/mine.py:build` is `mine.build`, others stay."""
    match = _FILE.fullmatch(name)
    text = f"{Path(match['file']).stem}.{match['name'] or ''}".rstrip(".") if match else name
    return re.sub(r"[^\w.-]+", "-", text)


@cache
def entry_points_of(group: str) -> Mapping[str, EntryPoint]:
    """Name -> entry point of the group `baoc.models`, `baoc.datasets`, `baoc.tasks`, `baoc.rules` or `baoc.recipes`."""
    return {point.name: point for point in entry_points(group=group)}


def load_entry_points(group: str, *, kind: type | tuple[type, ...]) -> dict[str, Any]:
    """Name -> object, of a group's entry points. One that fails to load or is no `kind` is left out with a warning, so
    that runs that do not use it go on."""
    objects: dict[str, Any] = {}
    for name, point in entry_points_of(group).items():
        try:
            value = point.load()
        except Exception as error:  # of any package
            log.warning(
                "%s=%s of %s cannot be loaded (%s) and is left out", group, name, point.value, _described(error)
            )
            continue
        if isinstance(value, kind):
            objects[name] = value
        else:
            log.warning("%s=%s of %s is a %s and is left out", group, name, point.value, type(value).__name__)
    return objects


# -- loading and calling ----------------------------------------------------------------------------------------------


def load(name: str, *, key: str) -> Callable[..., Any]:
    """Imports the function or class `name`; `key` is the setting that has it. Raises BadInputError if there is no such
    file, module or name in it, if it cannot be imported or not be called."""
    point = entry_points_of(f"baoc.{key}s").get(name) if key in CONFIG_GROUPS else None
    if point is not None:
        with faults(key, name):
            module = importlib.import_module(point.module)
        _use(module, name)
        value: Any = module
        for part in point.attr.split(".") if point.attr else ():
            value = getattr(value, part, None)
        return _callable(value, module=module, attr=point.attr, key=key, name=name)
    file = _FILE.fullmatch(name)
    if file is not None:
        module, attr = _of_file(Path(file["file"]), key=key, name=name), file["name"]
    else:
        parent, _, attr = name.rpartition(".")
        module = _of_module(parent, key=key, name=name)
    return _callable(getattr(module, attr or "", None), module=module, attr=attr, key=key, name=name)


def call(name: str, *, key: str, options: Mapping[str, Any], offered: Mapping[str, Any] | None = None) -> Any:
    """Calls the code with the user's `options`, and with those of `offered` that its signature names.

    `_args_` of the options are positional, as for Hydra's instantiate. Raises BadInputError if arguments are missing or
    unknown, and if the code raises.
    """
    function = load(name, key=key)
    kwargs = dict(options)
    args = tuple(kwargs.pop("_args_", ()))
    signature = _signature(function)
    if signature is not None:
        free = list(signature.parameters.values())[len(args) :]
        keywords = {p.name for p in free if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        kwargs = {**{k: v for k, v in (offered or {}).items() if k in keywords}, **kwargs}
        _check_arguments(signature, args, kwargs, key=key, name=name)
    with faults(key, name):
        return function(*args, **kwargs)


@contextmanager
def faults(key: str, name: str, *, doing: str = "") -> Generator[None]:
    """Turns exceptions of the user's code into BadInputErrors with file and line. BaocErrors and exhausted memory are
    raised unchanged."""
    try:
        yield
    except Exception as error:
        if isinstance(error, BaocError) or type(error).__name__ in _OUT_OF_MEMORY:
            raise
        raise BadInputError(f"{key}={name}{doing} raised {_described(error)}") from error


def with_faults(function: Callable[..., Any], *, key: str) -> Callable[..., Any]:
    """Wraps a callable, the argument `key` of a call, so that its exceptions become BadInputErrors (`faults`)."""
    try:
        file = inspect.getsourcefile(inspect.unwrap(function))
    except TypeError:  # a function of C, or an object
        file = None
    name = getattr(function, "__qualname__", type(function).__name__)
    if file is not None and not _installed(Path(file).resolve()):
        _used[Path(file).resolve()] = f"{file}:{name}"

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with faults(key, name):
            return function(*args, **kwargs)

    return wrapper


def user_location(error: BaseException) -> str | None:
    """`FILE:LINE` of the innermost frame in the user's code; None if there is none."""
    location = None
    for cause in exception_chain(error):
        for frame, line in walk_tb(cause.__traceback__):
            if _owner(frame.f_code.co_filename) is not None:
                location = f"{_relative(frame.f_code.co_filename)}:{line}"
        if location is not None:
            return location
    return None


def used_names() -> tuple[str, ...]:
    """Names by which this process has loaded the user's code."""
    return tuple(dict.fromkeys(_used.values()))


def forget_used() -> None:
    _used.clear()


def class_lacking_attribute(error: BaseException) -> str | None:
    """The name of the user's class whose object lacks the attribute of an AttributeError; None if there is none."""
    for cause in exception_chain(error):
        instance = getattr(cause, "obj", None) if isinstance(cause, AttributeError) else None
        module = sys.modules.get(type(instance).__module__) if instance is not None else None
        source = getattr(module, "__file__", None)
        if source is not None and _owner(source) is not None:
            return type(instance).__name__
    return None


def source_sha256(name: str, *, key: str) -> str:
    """SHA-256 of the code's file, without files that it imports; empty if it has no file."""
    path = file_of(name)
    if path is None:
        source = inspect.getsourcefile(inspect.unwrap(load(name, key=key)))
        path = Path(source) if source else None
    return "" if path is None or not path.is_file() else hashlib.sha256(path.read_bytes()).hexdigest()


# -- helpers ----------------------------------------------------------------------------------------------------------


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
    sys.modules[module_name] = module  # pickle and dataclasses look classes up there
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # for files beside it; installed packages come first
    try:
        with faults(key, name, doing=" cannot be imported: it"):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


def _of_module(parent: str, *, key: str, name: str) -> Any:
    """The module or class that contains the last part of a dotted name."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # for packages in the working directory
    top = parent.partition(".")[0]
    if top not in sys.modules and importlib.util.find_spec(top) is None:
        raise BadInputError(f"{key}={name}: there is no package {top!r}: install it, or write {NAME_FORMATS}")
    module_name, attributes = parent, list[str]()
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
        attributes.insert(0, last)
    _use(module, name)
    value: Any = module
    for attribute in attributes:
        value = getattr(value, attribute, None)
        if value is None:
            raise BadInputError(f"{key}={name}: {module_name} has no {attribute!r}{_has(module)}")
    return value


def _use(module: ModuleType, name: str) -> None:
    if file := getattr(module, "__file__", None):
        _used[Path(file).resolve()] = name


def _callable(value: Any, *, module: ModuleType, attr: str | None, key: str, name: str) -> Callable[..., Any]:
    where = _relative(getattr(module, "__file__", None) or module.__name__)
    if not attr:
        raise BadInputError(f"{key}={name} names no function: write {key}={name.removesuffix(':')}:NAME{_has(module)}")
    if value is None:
        raise BadInputError(f"{key}={name}: {where} defines no {attr!r}{_has(module)}")
    if not callable(value):
        raise BadInputError(f"{key}={name} is a {type(value).__name__}, and must be a function or a class")
    return value


def _has(module: ModuleType) -> str:
    """A clause with the functions and classes that the module defines."""
    attributes: dict[str, Any] = vars(module)
    own = [
        name
        for name, value in attributes.items()
        if not name.startswith("_") and callable(value) and getattr(value, "__module__", None) == module.__name__
    ]
    return f"; it has: {', '.join(own[:8])}" if own else "; it defines no function or class"


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # a function of C
        return None


def _check_arguments(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, key: str, name: str
) -> None:
    """Raises BadInputError for unknown and missing arguments."""
    from difflib import get_close_matches

    parameters = signature.parameters
    takes = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for word in kwargs:
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
        and p.name not in kwargs
    ]
    if missing:
        raise BadInputError(f"{key}={name} needs {', '.join(f'{key}.{word}=VALUE' for word in missing)}")
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise BadInputError(f"{key}={name} cannot be called: {error}") from error


def _described(error: BaseException) -> str:
    """Class, location and first line of an error."""
    text = next((line for line in str(error).splitlines() if line.strip()), "")
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__} ({_relative(error.filename)}:{error.lineno}): {error.msg}"
    location = user_location(error)
    return f"{type(error).__name__}{f' ({location})' if location else ''}{f': {text}' if text else ''}"


def _owner(filename: str) -> str | None:
    """The name by which the user's file was loaded; files beside FILE.py belong to it, too. None for other files."""
    if filename.startswith("<"):
        return None
    path = Path(filename).resolve()
    for used, name in _used.items():
        if path == used or (file_of(name) is not None and used.parent in path.parents and not _installed(path)):
            return name
    return None


def _installed(path: Path) -> bool:
    """Whether a file belongs to this package or an environment, either of which may lie below the user's folder."""
    package = Path(__file__).resolve().parents[1]
    return package in path.parents or not {"site-packages", "dist-packages"}.isdisjoint(path.parts)


def _relative(filename: str) -> str:
    try:
        return str(Path(filename).resolve().relative_to(Path.cwd()))
    except ValueError:
        return filename
