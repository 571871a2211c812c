"""Regular expressions of schemas, and what a real engine says of them.

`corpus.txt` has the patterns, one a line below a heading. `python -m tests.unit.grammar.patterns.record` makes texts
for each and writes node's verdicts into `recorded.jsonl`: `[pattern, flags, [texts that match], [texts that do not]]`.
The flags are those with which the pattern is valid, `u` if there is a choice; null if it is no regular expression.
"""
