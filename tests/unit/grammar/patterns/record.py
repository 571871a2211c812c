"""Asks node which texts the patterns of the corpus match, and writes its verdicts down.

It is run by hand, when the corpus has changed. The texts are made from the pattern and changed at random; node alone
says whether they match.
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from random import Random

from runner.grammar.patterns.charsets import Spans
from runner.grammar.patterns.nodes import Alt, Back, Chars, Look, Node, Repeat, Seq
from runner.grammar.patterns.parser import Pattern, PatternError, parse_pattern

HERE = Path(__file__).parent
NODE = """
const halves = /\\\\u[dD][89a-fA-F]/, pairs = /\\\\u[dD][89abAB][0-9a-fA-F]{2}\\\\u[dD][c-fC-F][0-9a-fA-F]{2}/g;
function made(text) {
  for (const flags of halves.test(text.replace(pairs, "")) ? [""] : ["u", ""]) {
    try { return new RegExp(text, flags); } catch {}
  }
}
const rows = JSON.parse(require("fs").readFileSync(0, "utf8"));
console.log(JSON.stringify(rows.map(([text, samples]) => {
  const regex = made(text);
  return regex ? [regex.flags, samples.map((sample) => regex.test(sample))] : [null, []];
})));
"""
"""Halves of surrogate pairs are for patterns without the flag `u`."""
TEXTS = (
    *("", "a", "b", "A", "Z", "0", "9", "-", "_", " ", "\t", "\n", "\r", "\v", "\f", "\0", "\b", "\x7f"),
    *("\u2028", "\u2029", "\u00a0", "\ufeff", "\u1680", "\u017f", "\u212a", "\U0001f600", "\U0001f432"),
    *("é", "ß", "٣", "Ω", "日", "\\", '"', "/", "^", "!", "[", "]", "[]", "&", "~", ":", "1", "\x01", "\x03", "k", "q"),
    *("ab", "aa", "abc", "foo", "foobar", "foo bar", "a\nb", "a b", "a-b", "x", "{x}", "x{1}", "x{,3}", "00", "12"),
    *("0000", "aaa", "a,b", "c1", "\\c1", "p{Foo}", "uuu", "p", "pL", "z", "x-"),
    *("a@b.cc", "a b c!", "the cat.", "$12.50", "école", "2024-02-29", "--", "a--b", "1.2.3.4", "://", "<a>"),
)
MOST_MATCHING, MOST_OTHERS, MOST_CHARACTERS = 7, 9, 72
FIRST_ASTRAL = "\U00010000"


class Maker:
    """Makes texts that a pattern may match."""

    def __init__(self, pattern: Pattern, random: Random) -> None:
        self._pattern = pattern
        self._random = random
        self._last: dict[Node, str] = {}

    def text(self, node: Node) -> str:
        """Returns a text for this part."""
        made = self._made(node)
        self._last[node] = made
        return made

    def _made(self, node: Node) -> str:
        random = self._random
        match node:
            case Chars(spans, properties):
                if properties or not spans:
                    return random.choice("aZ5_éλΩ日ひ٣\U0001f600 -")
                return self._char(spans)
            case Seq(items):
                return "".join(map(self.text, items))
            case Alt(options):
                return self.text(random.choice(options))
            case Repeat(item, least, most):
                times = min(least, 80) + random.choice((0, 0, 1, 2, 3))
                return "".join(self.text(item) for _ in range(times if most is None else min(times, most)))
            case Look(item):
                return self.text(item) if random.random() < 0.2 else ""
            case Back(group):
                return self._last.get(self._pattern.groups.get(group, node), "")
        return ""

    def _char(self, spans: Spans) -> str:
        low, high = self._random.choice(spans)
        if self._random.random() < 0.7:
            low, high = min(max(low, 32), high), max(min(high, 126), low)
        code = self._random.choice((low, high, self._random.randint(low, high)))
        return chr(code) if not 0xD800 <= code < 0xE000 else "a"


def texts(pattern: str) -> Iterator[str]:
    """Yields texts that this pattern may match, those a little changed, and some of all kinds."""
    random = Random(pattern)
    yield from TEXTS
    try:
        read = parse_pattern(pattern)
    except PatternError:
        return
    maker = Maker(read, random)
    for _ in range(60):
        text = maker.text(read.node)
        yield text
        yield random.choice(TEXTS) + text + random.choice(TEXTS)
        for _ in range(3):
            at = random.randint(0, len(text))
            yield text[:at] + random.choice(TEXTS) + text[at + random.randint(0, 1) :]
        yield text.swapcase()
        yield text + text[-1:]


def main() -> None:
    """Writes `recorded.jsonl` anew."""
    patterns = [line for line in (HERE / "corpus.txt").read_text().split("\n") if line and not line.startswith("# ")]
    asked = [(each, [text for text in dict.fromkeys(texts(each)) if len(text) <= MOST_CHARACTERS]) for each in patterns]
    answers = json.loads(subprocess.check_output(["node", "-e", NODE], input=json.dumps(asked).encode()))
    lines = []
    for (pattern, samples), (flags, verdicts) in zip(asked, answers, strict=True):
        # Characters are code points for us, also where the pattern is valid without the flag `u` alone.
        by_units = flags == "" and "\\ud" not in pattern.lower()
        rows = [*zip(samples, verdicts, strict=True)] if verdicts else []
        rows = [row for row in rows if not by_units or max(row[0], default="") < FIRST_ASTRAL]
        random = Random(pattern)
        random.shuffle(rows)
        matching = [text for text, matches in rows if matches][:MOST_MATCHING]
        others = [text for text, matches in rows if not matches][:MOST_OTHERS]
        lines.append(json.dumps([pattern, flags, matching, others], ensure_ascii=True, separators=(",", ":")))
    (HERE / "recorded.jsonl").write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
