"""The text of every flag: from the command line, else from its environment variable, else its default."""

from collections.abc import Mapping, Sequence

from runner.cli.flag import ON_OFF, Flag
from runner.cli.parser import Parser
from runner.errors import UsageError

_GO_BOOLEANS = {
    **dict.fromkeys(("1", "t", "T", "true", "TRUE", "True"), "on"),
    **dict.fromkeys(("0", "f", "F", "false", "FALSE", "False"), "off"),
}


def flag_values(
    parser: Parser, flags: Sequence[Flag], words: Sequence[str], environ: Mapping[str, str]
) -> dict[str, str]:
    """Returns the text of each flag by the flag's name; a flag without text and without default is left out."""
    given = vars(parser.parse_args(_normalized(words, flags)))
    values = {name: value for name, value in given.items() if value is not None}
    for flag in flags:
        if flag.name not in values:
            from_environment = environ.get(flag.variable, "").strip() or flag.default
            if from_environment is not None:
                values[flag.name] = _checked(flag, from_environment)
    return values


def _normalized(words: Sequence[str], flags: Sequence[Flag]) -> list[str]:
    """Rewrites Go's spellings, which hosts use: `-model` as `--model`, `--verbose` as `--verbose=on`."""
    switches = {f"--{flag.name}" for flag in flags if flag.is_switch}
    result: list[str] = []
    for word in words:
        if word in ON_OFF and result and result[-1] in switches:
            result[-1] += f"={word}"
            continue
        dashed = f"-{word}" if word[:1] == "-" and word[1:2].isalpha() and len(word) > 2 else word
        name, equals, value = dashed.partition("=")
        result.append(f"{name}={_GO_BOOLEANS.get(value, value)}" if equals and name in switches else dashed)
    return [f"{word}=on" if word in switches else word for word in result]


def _checked(flag: Flag, value: str) -> str:
    value = _GO_BOOLEANS.get(value, value) if flag.is_switch else value
    if flag.choices and value not in flag.choices:
        raise UsageError(f"{flag.variable}={value}: choose one of {', '.join(flag.choices)}")
    return value
