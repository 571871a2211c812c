"""Parses the words of a tool before its packages are installed: `python -S -B -m scripts.tools.usage MODULE WORD ...`.

The tools build their parsers beside the code that does the work. Here MODULE runs as far as its parser, and everything
that it imports from packages is a stand-in. So each tool has one help text, and none has to put off its imports.
Exit status: that of the parser after `--help` or an error, else `RIGHT`.
"""

import argparse
import inspect
import runpy
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn

RIGHT = 100


class _StandIn(type):
    """The class of a class that has every attribute."""

    def __getattr__(cls, name: str) -> "type[_Absent]":
        if name.startswith("__") and name != "__struct_config__":  # which msgspec gives to structs
            raise AttributeError(name)
        return _Absent


class _Absent(metaclass=_StandIn):
    """Stands in for whatever a package has: called, subscripted, iterated over, or derived from.

    Instances of derived classes have the fields that they are given.
    """

    def __init__(self, *values: object, **named: object) -> None:
        fields = [name for each in reversed(type(self).__mro__) for name in inspect.get_annotations(each)]
        self.__dict__.update(zip(fields, values, strict=False), **named)

    def __init_subclass__(cls, **options: object) -> None:
        """Takes any options."""

    def __class_getitem__(cls, key: object) -> "type[_Absent]":
        return _Absent

    def __getattr__(self, name: str) -> "type[_Absent]":
        return _StandIn.__getattr__(_Absent, name)

    def __iter__(self) -> Iterator[object]:
        return iter(())


class _Absence(MetaPathFinder, Loader):
    """Finds a stand-in for every module; the last of the finders."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec:
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name, (_Absent,), {})  # type: ignore[return-value]

    def exec_module(self, module: ModuleType) -> None:
        """Leaves the module empty."""


def main() -> None:
    parse = argparse.ArgumentParser.parse_args

    def parse_and_exit(parser: argparse.ArgumentParser, words: Sequence[str] | None = None) -> NoReturn:
        parse(parser, words)
        sys.exit(RIGHT)

    argparse.ArgumentParser.parse_args = parse_and_exit  # type: ignore[assignment, method-assign]
    sys.meta_path.append(_Absence())
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
