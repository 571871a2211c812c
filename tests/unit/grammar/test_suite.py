"""The schemas of JSON-Schema-Test-Suite: each is enforced, or in part, or refused for a stated reason.

suite/schemas.jsonl has those of all drafts in the source distribution of jsonschema 4.26 (json/tests; its license lies
beside it), each once, the newest draft first: without `$schema`, `$comment`, `title` and `description`, and with other
documents in one place for all drafts.
"""

import json
import re
from pathlib import Path
from random import Random
from time import monotonic

import pytest

from runner.errors import RequestError
from runner.grammar.messages import COMPILE_S
from tests.lib.local_grammar import LocalGrammar
from tests.unit.grammar.judge import fault
from tests.unit.grammar.walks import Impatient, compiler_of, format_of, spelled, walk, words_tokenizer

SCHEMAS = (Path(__file__).parent / "suite" / "schemas.jsonl").read_text().splitlines()
KEYWORDS = (
    *("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", r"unevaluated\w+"),
    *("contains", "minContains", "maxContains", "uniqueItems", "propertyNames", r"\$(dynamic|recursive)(Ref|Anchor)"),
)
LEFT_OUT: tuple[str, ...] = (
    rf"Unimplemented keys: \[(\"({'|'.join(KEYWORDS)})\"(, )?)+\]",
    r"Unknown format: ",
    r"oneOf constraints are not supported",
    r"Value for 'multipleOf' has too many digits",
    r"patternProperty regexes .* are not disjoint",
)
"""What is left out of a schema, as docs/structured-output.md has it."""
REFUSED: tuple[str, ...] = (
    r"Format: Resource '[^']+' is not present in a registry",  # another document, or an `id` of draft 4 to 7
    r"Format: Anchor '\w+' does not exist",  # of draft 4 to 7
    r"Format: Unsatisfiable schema: ",
)
NOT_JUDGED = re.compile(r'"items":\[|\\p\{|\\c[cC]')
"""Constructs that the judge does not know: lists in `items` (drafts until 2019), classes of Unicode, `\\cC`."""
MOST_TOKENS = 400


def test_each_schema_is_enforced_or_a_known_reason_is_given() -> None:
    compiler, counts = compiler_of(words_tokenizer()), dict.fromkeys(("whole", "in part", "not at all"), 0)
    for line in SCHEMAS:
        began_s = monotonic()
        try:
            grammar = LocalGrammar(compiler, format_of(json.loads(line)))
        except RequestError as error:
            enforced, why, reasons = "not at all", str(error), REFUSED
        else:
            enforced, why, reasons = ("in part" if grammar.left_out else "whole"), grammar.left_out, LEFT_OUT
        assert monotonic() - began_s < COMPILE_S, line
        assert not why or any(re.match(reason, why) for reason in reasons), (why, line)
        counts[enforced] += 1
    assert counts == {"whole": 276, "in part": 234, "not at all": 54}


@pytest.mark.full
def test_answers_satisfy_what_is_enforced_whole() -> None:
    tokenizer = words_tokenizer()
    compiler = compiler_of(tokenizer)
    for line in SCHEMAS:
        schema, random = json.loads(line), Random(line)
        try:
            grammar = LocalGrammar(compiler, format_of(schema))
        except RequestError:
            continue
        if grammar.left_out or NOT_JUDGED.search(line):
            continue
        found = walk(grammar.own_guide(), tokenizer, random, Impatient(tokenizer, random), most=MOST_TOKENS)
        for count in found.complete:
            assert fault(schema, spelled(found.tokens[:count], tokenizer)) == "", line
