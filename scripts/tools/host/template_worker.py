"""Renders chat templates, one after the other, for `rendering`: a template comes with a model, from a stranger.

Standard input has one job a time, a JSON object behind its length; standard output gets the answer in the same form.
A template that does not end is ended by an alarm, and this process with it; what one may take of memory has a bound.
"""

import contextlib
import json
import resource
import signal
import struct
import sys
from datetime import datetime
from functools import lru_cache

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_LENGTH = struct.Struct(">Q")


class _GenerationBlock(Extension):
    """`{% generation %}`, with which templates mark what a model has said: nothing but its inside."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> str:
    raise TemplateError(message)


def _json(value: object, indent: int | None = None, **_: object) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


@lru_cache(8)
def _compile(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _json
    environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
    return environment.from_string(source)


def _answer(source: str, values: dict[str, object], most_characters: int) -> dict[str, str]:
    """Either `text` or `error`."""
    try:
        text = _compile(source).render(values)
        if len(text) > most_characters:
            return {"error": f"the chat template makes a prompt of more than {most_characters} characters"}
    except TemplateError as error:
        return {"error": str(error)}
    except MemoryError:
        return {"error": "the chat template takes too much memory"}
    except Exception as error:  # a template computes with what it is given
        return {"error": f"{type(error).__name__}: {error}"}
    return {"text": text}


def main(limit_s: str, limit_bytes: str, most_characters: str) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # whoever has started the host may ignore it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the host, whose end is the end of the input
    with contextlib.suppress(OSError, ValueError):  # not every system has this limit
        resource.setrlimit(resource.RLIMIT_AS, (int(limit_bytes), int(limit_bytes)))
    while head := sys.stdin.buffer.read(_LENGTH.size):
        source, values = json.loads(sys.stdin.buffer.read(*_LENGTH.unpack(head)))
        signal.alarm(int(limit_s))
        answer = json.dumps(_answer(source, values, int(most_characters))).encode()
        signal.alarm(0)
        sys.stdout.buffer.write(_LENGTH.pack(len(answer)) + answer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
