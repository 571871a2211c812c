"""Writes runner/model/abilities.py from trials of every architecture: `python -m scripts.tools.models.abilities`.

A module whose kernels exist only for Metal is tried where there is Metal; elsewhere it stays as it is in the table.
"""

import textwrap

from runner.commands.check.trial import batch_fault, draft_fault
from runner.model import abilities
from runner.model.families import UNBATCHABLE, UNDRAFTABLE
from scripts.tools import ROOT
from scripts.tools.models.architectures import architectures, build, unserved
from scripts.tools.models.tiny import VOCAB

_LIST = '''
{name} = frozenset(
{modules}
    """.split()  # noqa: SIM905  a name a line would fill pages
)
"""The modules whose answers may {what}."""
'''


def main() -> None:
    """Writes the table, and prints every fault, with the reason that the runner gives for it."""
    batched, drafted = (set(known & {*unserved()}) for known in (abilities.BATCHED, abilities.DRAFTED))
    for name in [name for name in architectures() if name not in unserved()]:
        tiny = build(name)
        for find, reasons, able in ((batch_fault, UNBATCHABLE, batched), (draft_fault, UNDRAFTABLE, drafted)):
            fault = find(tiny.make_layers, tiny.logits, VOCAB)
            if fault or name in reasons:
                print(f"{name}: {fault or 'no fault is shown'}: {reasons.get(name, 'A REASON IS MISSING')}")
            else:
                able.add(name)
    text = f'"""{abilities.__doc__}"""\n'
    for title, what, able in (("BATCHED", "share a forward", batched), ("DRAFTED", "be drafted", drafted)):
        modules = textwrap.fill(" ".join(sorted(able)), 116, break_on_hyphens=False)
        text += _LIST.format(name=title, modules=textwrap.indent(f'"""\n{modules}', "    "), what=what)
    (ROOT / "runner/model/abilities.py").write_text(text)


if __name__ == "__main__":
    main()
