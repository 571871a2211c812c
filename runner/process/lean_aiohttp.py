"""Imports aiohttp's server without modules that it imports and a runner does not use: half of the time of the import.

`aiohttp/__init__.py` imports the client, and the client reads all certificates of the system. The server imports code
for forms, files, WebSockets and proxies.
"""

import builtins
import importlib.util
import re
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

_NAME = "aiohttp"
_VERSION = re.compile(r'^__version__ = "(3\.14\..+)"$', re.MULTILINE)
"""The versions whose imports are known. Other versions are imported whole."""
_UNUSED = (
    *("attr", "email.message", "email.parser", "email.policy", "email.utils", "tempfile", "urllib.request"),
    *(".http_websocket", ".multipart", ".web_fileresponse", ".web_ws"),
)


def import_server() -> None:
    """Imports `aiohttp.web`, with stand-ins in place of modules that aiohttp imports. All other code that
    imports such a module gets the module itself. Does nothing if aiohttp is already imported."""
    spec = None if _NAME in sys.modules else importlib.util.find_spec(_NAME)
    if spec is None or spec.origin is None:
        return
    with open(spec.origin, encoding="utf-8") as file:  # noqa: PTH123 - importing pathlib would take longer
        version = _VERSION.search(file.read())
    if version is None:
        return
    package = sys.modules[_NAME] = importlib.util.module_from_spec(spec)  # its `__init__` never runs
    vars(package)["__version__"] = version[1]
    original = builtins.__import__

    def lean(name: str, into: Mapping[str, object] | None = None, *rest: Any) -> ModuleType:
        if into is not None and into.get("__package__") == _NAME:
            if name == "ssl":
                raise ImportError("aiohttp then does without it")
            if (full := f".{name}" if any(rest[2:]) else name) in _UNUSED:
                return _StandIn(full)
        return original(name, into, *rest)

    builtins.__import__ = lean  # type: ignore[assignment]
    try:
        import_module("aiohttp.web")
    finally:
        builtins.__import__ = original
    # Needed for refusals that aiohttp makes, and it needs the modules of `email`.
    sys.modules["aiohttp.helpers"].parse_content_type = lambda raw: _helpers().parse_content_type(raw)  # type: ignore[attr-defined]


@cache
def _helpers() -> Any:
    """Returns another `aiohttp.helpers`, without stand-ins."""
    spec = importlib.util.find_spec("aiohttp.helpers")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _StandIn(ModuleType):
    """Takes the place of a module. Each of its attributes is a class; to make an object of it is to call the function
    or class in whose place it is."""

    def __getattr__(self, name: str) -> object:
        if self.__name__ == "attr":
            return _simple_class

        def call(_: type, *values: object, **named: object) -> object:
            return getattr(import_module(self.__name__, _NAME), name)(*values, **named)

        return type(name, (), {"__new__": call})


def _simple_class(**_: object) -> Callable[[type], type]:
    """Stands for `attr.s`: the class gets a method `__init__`, with its annotated fields as parameters."""

    def decorate(cls: type) -> type:
        def __init__(self: object, *values: object, **named: object) -> None:  # noqa: N807
            vars(self).update(zip(cls.__annotations__, values, strict=False), **named)

        cls.__init__ = __init__  # type: ignore[misc]
        return cls

    return decorate
