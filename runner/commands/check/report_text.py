"""The report of `mlx-runner check` as text."""

import json
import textwrap
from collections.abc import Iterable, Iterator

import msgspec

from runner.commands.check.examination import Amount
from runner.commands.check.inspection import BlasFacts, ContextLimit, Inspection, LayerKind, Token, TokenizerFacts
from runner.logs import printable
from runner.sizes import counted, sized

_WIDTH = 100
_LABEL = 14
_SHOWN = 30
"""The most problems that are listed. A wrong size in config.json causes a problem for every tensor."""


def as_json(found: Inspection) -> str:
    """Returns the report as a JSON object. It is ASCII, so that no name in it can send commands to a terminal."""
    return f"{json.dumps(msgspec.to_builtins(found), indent=2)}\n"


def as_text(found: Inspection) -> str:
    """Returns the report as lines of label and value. Only facts are wrapped: each problem is one line."""
    problems = found.problems[:_SHOWN]
    if len(found.problems) > len(problems):
        problems.append(f"and {len(found.problems) - len(problems)} more, which --json lists")
    verdict = "would load" if found.loads else f"would not load: {counted(len(found.problems), 'problem')}"
    lines = [
        *(line for label, value in _facts(found) for line in _wrapped(label, value)),
        _line("verdict", verdict),
        *(_line("warning", text) for text in found.warnings),
        *(_line("PROBLEM", text) for text in problems),
    ]
    return "".join(f"{printable(line)}\n" for line in lines)


def _facts(found: Inspection) -> Iterator[tuple[str, str]]:
    yield "model", found.model
    if found.path:
        yield found.source or "path", found.path
    if found.children:
        yield "list of", f"{', '.join(found.children)}; the first for mlx is taken"
    if found.architecture:
        runs = f"run by {found.module}" if found.module else "which nothing here runs"
        yield "architecture", f"{found.architecture}, {runs}"
    if stated := [f"{field} {_value(value)}" for field, value in found.defaults.items() if value is not False]:
        yield "defaults", f"{', '.join(stated)}: missing from config.json"
    if found.layers is not None and found.caches is not None:
        yield "layers", f"{found.layers}: {_kinds(found.caches)}"
    if found.parameters is not None:
        yield "parameters", _short(found.parameters)
    if found.weights is not None:
        yield "weights", _amounts(found.weights)
    if found.read_bytes is not None and found.files is not None:
        yield "reads", f"{sized(found.read_bytes)} from {counted(found.files, 'file')}"
    if found.skipped:
        yield "skips", _amounts(found.skipped)
    if found.computes is not None:
        where = {"cpu": "the CPU", "gpu": "the GPU"}[found.device]
        yield "computes", f"in {found.computes.dtype} on {where} ({found.computes.why})"
        yield "BLAS", _blas(found.blas)
        yield "kernels", found.kernels
    if found.context:
        yield "context", _context(found.context)
    if found.tokenizer:
        yield from _tokenizer(found.tokenizer)
    wings = {
        "pictures": found.pictures,
        "sound": found.sound,
        "embeddings": found.embeddings,
        "drafts": found.drafts,
        "format": found.format,
        "ranks": found.ranks,
        "tried here": found.trial,
        "disk cache": found.disk,
    }
    yield from ((label, facts.text) for label, facts in wings.items() if facts)


def _value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _tokenizer(facts: TokenizerFacts) -> Iterator[tuple[str, str]]:
    rows = "" if facts.scored is None else f" (the model scores {facts.scored})"
    added = f"{facts.added} added, {facts.special} of them special"
    yield "tokenizer", f"{facts.kind} of {facts.file}: {facts.vocabulary} tokens{rows}, {added}"
    yield "BOS", _token(facts.bos) + (", added before each prompt" if facts.add_bos else "") if facts.bos else "none"
    yield "EOS", ", ".join(map(_token, facts.eos)) or "none"


def _blas(blas: BlasFacts) -> str:
    if not blas.matters:
        return f"{blas.name}: has no effect here"
    return f"{blas.name} (slow: {blas.advice})" if blas.advice else blas.name


def _context(context: ContextLimit) -> str:
    source = {"model": "the model's own", "--context": "by --context", "default": "a default"}[context.source]
    return f"{context.tokens} tokens ({source})"


def _kinds(kinds: Iterable[LayerKind]) -> str:
    return ", ".join(f"{kind.count} {kind.name} ({kind.cache})" for kind in kinds)


def _token(token: Token) -> str:
    return f"{token.id} {json.dumps(token.text, ensure_ascii=False)}"


def _short(number: int) -> str:
    """Formats a number of parameters: `8.03 B`."""
    for power, unit in ((12, "T"), (9, "B"), (6, "M"), (3, "K")):
        if number >= 10**power:
            return f"{number / 10**power:.2f} {unit}"
    return str(number)


def _line(label: str, text: str) -> str:
    return f"{label:<{_LABEL}}{text}"


def _wrapped(label: str, text: str) -> list[str]:
    first, other = _line(label, ""), " " * _LABEL
    wrapper = textwrap.TextWrapper(_WIDTH, first, other, break_long_words=False, break_on_hyphens=False)
    return wrapper.wrap(text) or [label]


def _amounts(amounts: Iterable[Amount]) -> str:
    """Formats amounts: `f32 21 tensors 436.5 KB, int4 g64 1 tensor 2.1 KB`."""
    return ", ".join(f"{item.name} {counted(item.tensors, 'tensor')} {sized(item.bytes)}" for item in amounts)
