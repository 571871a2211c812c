"""Writes docs/imports.svg and the generated parts of documents, each between its two marks:
`python -m scripts.tools.docs.generate`.

A test keeps them equal to what the program does.
"""

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from pathlib import Path

from runner.model.architectures import DECIDERS, ENCODERS, FAMILIES, METAL_ONLY, OLLAMA_ONLY, RENAMED_MODULES
from runner.settings import Settings, flags_of
from runner.vlm import packages
from scripts.tools import ROOT
from scripts.tools.docs.imports import imports_svg
from scripts.tools.docs.speed import cache_table, families_table, known
from scripts.tools.models.architectures import architectures
from scripts.tools.models.packages import TEXTS

DOCS = ROOT / "docs"
_MODELS = "mlx_lm.models"
_OURS = (ROOT / "runner/model/modules", ROOT / "runner/embeddings/modules")
_WIDTH = 120
_NOT_RUNNING = frozenset({"olmo"})
"""Ends the process where the package ai2-olmo is missing, and fails at its first forward where it is not."""


def flag_table() -> str:
    """Returns the flags as a Markdown table, in the order of `--help`."""
    rows = ["| flag | environment | default | meaning |", "| --- | --- | --- | --- |"]
    meanings = _meanings()
    for field, flag in flags_of(Settings).items():
        value = flag.metavar.replace("|", r"\|")
        name = f"`--{flag.name} [{value}]`" if flag.is_switch else f"`--{flag.name} {value}`"
        default = f"`{flag.default}`" if flag.default else ""
        rows.append(f"| {name} | `{flag.variable}` | {default} | {meanings[field]} |")
    return "\n".join(rows) + "\n"


def _meanings() -> dict[str, str]:
    """Returns the docstrings of the fields of `Settings`, as they stand in a cell."""
    (settings,) = ast.parse(inspect.getsource(Settings)).body
    assert isinstance(settings, ast.ClassDef)
    found = {}
    for field, below in pairwise(settings.body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                meaning = text[0].lower() + " ".join(text.split())[1:].removesuffix(".")
                found[name] = re.sub(r"\bdocs/(\w+)\.md", r"[\1](\1.md)", meaning)
    return found


def architecture_table() -> str:
    """Returns the architectures of Ollama's store as a Markdown table, then every other `model_type` in a paragraph."""
    by_module: dict[str, list[str]] = {}
    for name, family in FAMILIES.items():
        by_module.setdefault(family.module, []).append(f"`{name}`")
    ours = {path.stem for folder in _OURS for path in folder.glob("*.py")}
    rows = ["| architecture | mlx-lm module |", "| --- | --- |"]
    for module, names in by_module.items():
        notes = (", of this runner" if module in ours else "") + (", for embeddings" if module in ENCODERS else "")
        rows.append(f"| {', '.join(names)} | `{module}`{notes} |")
    others = sorted({*architectures(), *RENAMED_MODULES} - by_module.keys() - _NOT_RUNNING, key=str.casefold)
    return "\n".join([*rows, "", *_listed("All other architectures of mlx-lm, by their `model_type`:", others)]) + "\n"


def speed_list() -> str:
    """Returns what is known of the speed of each architecture, in a paragraph for each kind of layers."""
    paragraphs = []
    for kind, measured, others in known(sorted({*architectures()} - _NOT_RUNNING, key=str.casefold)):
        introduction = f"**{kind}**: {'; '.join(measured)}. Not measured:" if measured else f"**{kind}**, not measured:"
        paragraphs.append("\n".join(_listed(introduction, others)))
    return "\n\n".join(paragraphs) + "\n"


def remaining_list() -> str:
    """Returns the architectures that are left to Ollama's own runner as a Markdown list."""
    with_it = dict.fromkeys(DECIDERS, "; [with mlx-vlm](vlm.md) it is served here")
    with_it["Qwen4ExpForConditionalGeneration"] = "; [with mlx-vlm](vlm.md) its texts are served here"
    return "".join(f"* `{name}`: {what}{with_it.get(name, '')}\n" for name, what in OLLAMA_ONLY.items())


def split_list() -> str:
    """Returns the modules of mlx-lm that can be split over several ranks as a paragraph. Imports all of them."""
    names = sorted({*architectures()} - _NOT_RUNNING, key=str.casefold)
    modules = {name: importlib.import_module(f"{_MODELS}.{name}") for name in names}
    splitting = [name for name, module in modules.items() if hasattr(module.Model, "shard")]
    return "\n".join(_listed("The modules that can be split:", splitting)) + "\n"


def _listed(introduction: str, names: Iterable[str]) -> list[str]:
    listed = ", ".join(f"`{name}`{' (Apple Silicon only)' if name in METAL_ONLY else ''}" for name in names)
    return textwrap.wrap(f"{introduction} {listed}.", _WIDTH, break_long_words=False, break_on_hyphens=False)


def packages_table() -> str:
    """Returns the packages of mlx-vlm as a Markdown list, then those whose pictures are refused, or that are, with the
    reasons."""
    kinds = (
        ("With pictures:", sorted(packages.SEEING - packages.ALONE)),
        ("With one picture a prompt:", sorted(packages.ALONE)),
        ("Text models that mlx-lm lacks:", [name for name in TEXTS if name in packages.COMPARED]),
    )
    lines = [line for introduction, names in kinds for line in (*_listed(introduction, names), "")]
    lines += [*_reasons("served as text models, without their pictures", packages.BLIND), ""]
    lines += _reasons("not served with mlx-vlm", packages.REFUSED)
    return "\n".join(lines) + "\n"


def _reasons(title: str, why_not: Mapping[str, str]) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for name, why in why_not.items():
        reasons.setdefault(why, []).append(f"`{name}`")
    rows = [f"| {', '.join(names)} | {why} |" for why, names in sorted(reasons.items(), key=lambda row: -len(row[1]))]
    return [f"| {title} | why |", "| --- | --- |", *rows]


Parts = Mapping[str, Callable[[], str]]
"""The maker of each generated part, by the name in its marks."""

DOCUMENTS: Mapping[Path, Parts] = {
    DOCS / "flags.md": {"flags": flag_table},
    DOCS / "vlm.md": {"packages": packages_table},
    DOCS / "performance.md": {"families": families_table, "cache": cache_table},
    DOCS / "models.md": {
        "architectures": architecture_table,
        "speed": speed_list,
        "split": split_list,
        "remaining": remaining_list,
    },
}
"""The documents that have generated parts."""
PICTURE = DOCS / "imports.svg"


def marks(part: str) -> tuple[str, str]:
    """Returns the lines before and after a generated part."""
    return f"<!-- {part}: python -m scripts.tools.docs.generate -->\n", f"<!-- end of {part} -->\n"


def with_parts(text: str, parts: Parts) -> str:
    """Returns a document with today's parts between their marks. Raises ValueError for missing or doubled marks."""
    for part, make in parts.items():
        begin, end = marks(part)
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(end) < text.index(begin):
            raise ValueError(f"the document wants one {begin.strip()} and, after it, one {end.strip()}")
        head, rest = text.split(begin)
        text = head + begin + make() + end + rest.split(end)[1]
    return text


if __name__ == "__main__":
    PICTURE.write_text(imports_svg())
    for path, parts in DOCUMENTS.items():
        path.write_text(with_parts(path.read_text(), parts))
