"""Asks every package of mlx-vlm the questions of this folder, and writes `runner/vlm/packages.py`.

    python -m tests.vlm.record [PACKAGE ...]

in the environment of `scripts/test --vlm`. With names, only those are asked, and the others stay as they are.
"""

import sys
import tempfile
import textwrap
from collections.abc import Iterable
from pathlib import Path

from runner.errors import ModelError
from runner.model.trials import first_line
from runner.vlm import packages
from runner.vlm.pictures import PLACEHOLDERS
from scripts.tools import ROOT
from scripts.tools.models.packages import SEEING, TEXTS
from scripts.tools.models.tiny import VOCAB
from tests.vlm.pictures import answers_about_one_as_mlx_vlm_does, answers_as_mlx_vlm_does
from tests.vlm.texts import ABILITIES, QUESTIONS, Package

_LIST = '''
{name} = frozenset(
{names}
    """.split()  # noqa: SIM905  a name a line would fill pages
)
"""{what}."""
'''
_WHAT = {
    "COMPARED": "The packages whose texts were compared with mlx-vlm's own computation, and are equal",
    "BATCHED": "The packages whose answers may share a forward",
    "DRAFTED": "The packages whose answers may be drafted",
    "ALONE": "Those of SEEING that take one picture a prompt",
    "SEEING": "The packages whose pictures were compared with mlx-vlm's own computation, and give equal answers",
}
NOT_YET = "it was not compared with it yet"
_ITS_PICTURE_FIRST = "mlx-vlm puts the picture before the whole prompt"
_NO_PROCESSOR = "mlx-vlm has no processor for it"
_OTHER_PLACES = "mlx-vlm puts picture features at other places than the processor states"
_TWO_PARTS = "it has an encoder besides its decoder"
FOUND = {
    "d1_omni": "it decides with its own output head, and no host asks for that yet",
    "falcon_ocr": "tokens of a picture attend to each other",
    "florence2": _TWO_PARTS,
    "gemma3n": "mlx-vlm scales the embeddings of answers, but not those of prompts",
    "got": "its processor wraps each prompt in a conversation of its own",
    "granite_vision": _OTHER_PLACES,
    "llama4": "mlx-vlm makes fewer parts of a picture than the prompt has places for",
    "llava_next": _OTHER_PLACES,
    "llmjpvl": _NO_PROCESSOR,
    "minicpmv4_7": "its pictures have positions on a common canvas",
    "molmo": _ITS_PICTURE_FIRST,
    "molmo_point": "its answers point into pictures that mlx-vlm keeps on the model",
    "moondream2": _ITS_PICTURE_FIRST,
    "moondream3": _ITS_PICTURE_FIRST,
    "nemotron_parse": _TWO_PARTS,
    "phi3_v": "mlx-vlm drops the first token after a picture",
    "phi4_siglip": "its processor needs torchvision",
    "phi4mm": "mlx-vlm changes the weights for a picture and does not restore them",
    "plamo2vl": "its tokenizer is Python code that comes with the model",
    "youtu_vl": _NO_PROCESSOR,
}
"""Package -> why it fails, or was not asked, as its code says. One that passes all questions is served all the same."""


def main(names: list[str]) -> None:
    found: dict[str, set[str]] = {title: set(getattr(packages, title)) for title in _WHAT}
    refused, blind = dict(packages.REFUSED), dict(packages.BLIND)
    known = (*TEXTS, *SEEING)
    for name in names or known:
        for chosen in found.values():
            chosen.discard(name)
        refused.pop(name, None)
        blind.pop(name, None)
        with tempfile.TemporaryDirectory() as folder:
            package = Package(name, Path(folder))
            if why := fault(package):
                refused[name] = FOUND.get(name, why)
            else:
                found["COMPARED"].add(name)
                able = (title for title, find in ABILITIES.items() if not find(*package.forward, VOCAB))
                for title in able:
                    found[title].add(name)
                if name in SEEING:
                    why, alone = blindness(name)
                    found["ALONE"] |= {name} if alone else set()
                    blind |= {name: FOUND.get(name, why)} if why else {}
                    found["SEEING"] |= set() if why else {name}
        _say(f"{name}: {refused.get(name) or blind.get(name) or 'compared'}")
    (ROOT / "runner/vlm/packages.py").write_text(_text(found, refused, blind))


def fault(package: Package) -> str:
    """Returns the first question that a package does not answer, and why it matters; empty if it answers all."""
    try:
        package.module  # noqa: B018  is made here
    except ModelError as error:
        return str(error) if str(error).startswith("mlx-vlm's module cannot") else NOT_YET
    except ValueError:  # it would not be tiny
        return NOT_YET
    for question, why in QUESTIONS.items():
        try:
            question(package)
        except Exception as error:
            _say(first_line(error))
            return why
    return ""


def blindness(name: str) -> tuple[str, bool]:
    """Returns why the pictures of a package are not served, empty if they are; and True if one a prompt is."""
    if name not in PLACEHOLDERS:
        return NOT_YET, False
    try:
        answers_as_mlx_vlm_does(name)
    except Exception as error:  # packages of many authors raise anything
        _say(first_line(error))
    else:
        return "", False
    try:
        answers_about_one_as_mlx_vlm_does(name)
    except Exception as error:
        _say(first_line(error))
        return "its answers about pictures are not mlx-vlm's own", False
    return "", True


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _text(found: dict[str, set[str]], refused: dict[str, str], blind: dict[str, str]) -> str:
    text = f'"""{packages.__doc__}"""\n'
    for title, what in _WHAT.items():
        text += _LIST.format(name=title, names=_wrapped(found[title]), what=what)
    for title, reasons, what in (
        ("BLIND", blind, "Package that is served -> what keeps its pictures from being served"),
        ("REFUSED", refused, "Package -> what keeps it from being served"),
    ):
        rows = "".join(f'    "{name}": "{reasons[name]}",\n' for name in sorted(reasons))
        text += f'\n{title}: dict[str, str] = {{\n{rows}}}\n"""{what}."""\n'
    return text


def _wrapped(names: Iterable[str]) -> str:
    lines = textwrap.fill(" ".join(sorted(names)), 116, break_on_hyphens=False)
    return textwrap.indent(f'"""\n{lines}', "    ")


if __name__ == "__main__":
    main(sys.argv[1:])
