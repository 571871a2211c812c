"""Writes the table of flags into README.md: `python -m scripts.readme`. A test keeps the two equal."""

from pathlib import Path

from runner.flags import FLAGS

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- flags: python -m scripts.readme -->\n", "<!-- end of flags -->\n"


def flag_table() -> str:
    """The flags as a Markdown table, in the order of `--help`."""
    rows = ["| flag | environment | default | meaning |", "| --- | --- | --- | --- |"]
    for flag in FLAGS:
        value = flag.metavar.replace("|", r"\|")
        name = f"`--{flag.name} {value}`" if value else f"`--{flag.name}`"
        variable = "" if flag.is_switch else f"`{flag.variable}`"
        default = f"`{flag.default}`" if flag.default else ""
        rows.append(f"| {name} | {variable} | {default} | {flag.help} |")
    return "\n".join(rows) + "\n"


def with_table(text: str) -> str:
    """The README with today's table between its two marks."""
    head, rest = text.split(BEGIN)
    return head + BEGIN + flag_table() + END + rest.split(END)[1]


if __name__ == "__main__":
    README.write_text(with_table(README.read_text()))
