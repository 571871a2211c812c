"""The elements of the command line: a flag, and a command."""

import msgspec

ON_OFF = ("on", "off")


class Flag(msgspec.Struct, frozen=True, kw_only=True):
    """One flag. `default` is text, shown and used as if it had been typed; None means that there is none."""

    name: str
    metavar: str = ""
    default: str | None = None
    choices: tuple[str, ...] = ()
    is_switch: bool = False
    """True if the flag alone means `on`."""
    short: str
    """One line for `--help`, with the default in brackets where `default` does not hold it."""
    help: str
    """The full meaning, for the documentation."""
    group: str

    @property
    def variable(self) -> str:
        """The environment variable that counts when the flag is absent."""
        return "MLX_RUNNER_" + self.name.upper().replace("-", "_")


class Command(msgspec.Struct, frozen=True):
    """A first word that makes the program do something other than serve a model."""

    name: str
    words: str
    """What may follow it, for `--help`."""
    short: str


def switch(group: str, name: str, short: str, meaning: str) -> Flag:
    """Returns a flag that is off unless it is given."""
    return Flag(
        group=group,
        name=name,
        metavar="on|off",
        default="off",
        choices=ON_OFF,
        is_switch=True,
        short=short,
        help=meaning,
    )
