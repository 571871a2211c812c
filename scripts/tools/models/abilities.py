"""Writes TRIED of runner/model/architectures.py from trials of every architecture:
`python -m scripts.tools.models.abilities`.

A module whose kernels exist only for Metal is tried where there is Metal; elsewhere it stays as it is in the table.
"""

import re
import textwrap

from runner.commands.check.trial import batch_fault, draft_fault
from runner.model.architectures import TRIED, UNBATCHABLE, UNDRAFTABLE
from scripts.tools import ROOT
from scripts.tools.models.architectures import architectures, build, unserved
from scripts.tools.models.tiny import VOCAB

_FILE = ROOT / "runner/model/architectures.py"
_TABLE = re.compile(r'(?<=TRIED = frozenset\(\n    """\n).*?(?=\n    """)', re.DOTALL)


def main() -> None:
    """Writes the table, and prints every fault, with the reason that the runner gives for it."""
    tried = set(TRIED & {*unserved()})
    for name in [name for name in architectures() if name not in unserved()]:
        tiny, known = build(name), True
        for find, reasons in ((batch_fault, UNBATCHABLE), (draft_fault, UNDRAFTABLE)):
            fault = find(tiny.make_layers, tiny.logits, VOCAB)
            if fault or name in reasons:
                print(f"{name}: {fault or 'no fault is shown'}: {reasons.get(name, 'A REASON IS MISSING')}")
            known &= not fault or name in reasons
        tried |= {name} if known else set()
    modules = textwrap.indent(textwrap.fill(" ".join(sorted(tried)), 116, break_on_hyphens=False), "    ")
    _FILE.write_text(_TABLE.sub(modules, _FILE.read_text()))


if __name__ == "__main__":
    main()
