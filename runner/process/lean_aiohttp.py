"""Makes it possible to import aiohttp's server without aiohttp's client.

`aiohttp/__init__.py` imports the client, and the client reads all certificates of the system. That takes a fifth of a
runner's start, though a runner never uses the client.
"""

import importlib.util
import os
import re
import sys

_NAME = "aiohttp"
_VERSION = re.compile(r'^__version__ = "(.+)"$', re.MULTILINE)


def leave_out_client() -> None:
    """Registers aiohttp without running its `__init__`. After this, `from aiohttp import web` imports only the server.

    The first use of any other name of the package runs the `__init__`. This function does nothing if aiohttp is already
    imported, or if no version is found in its `__init__`.
    """
    spec = None if _NAME in sys.modules else importlib.util.find_spec(_NAME)
    if spec is None or spec.loader is None or spec.origin is None:
        return
    with open(spec.origin, encoding="utf-8") as file:  # noqa: PTH123 - importing pathlib would take longer
        version = _VERSION.search(file.read())
    if version is None:  # the server's modules need the version
        return
    package, loader = importlib.util.module_from_spec(spec), spec.loader
    parts = {entry.partition(".")[0] for entry in os.listdir(os.path.dirname(spec.origin))}  # noqa: PTH120, PTH208

    def look_up(name: str) -> object:
        if name in parts or name.startswith("__"):  # not imported yet, or looked up in every package
            raise AttributeError(f"module {_NAME!r} has no attribute {name!r}")
        del package.__dict__["__getattr__"]
        loader.exec_module(package)
        return getattr(package, name)

    package.__dict__.update(__version__=version[1], __getattr__=look_up)
    sys.modules[_NAME] = package
