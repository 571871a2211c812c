"""The regular expressions of JSON schemas, which are ECMA-262's, in the dialect of llguidance.

`compiler` hands each format to `schemas.with_translated_patterns` before llguidance reads it. What comes back has
patterns that mean the same, or names the first part of one that is left out. All of it runs in a worker process, whose
limits bound what the bounds here do not.

| read in this order | |
| --- | --- |
| `schemas` | finds the patterns of a schema and puts their translations in place, or refuses them |
| `translator` | one pattern: resolves edges and looks, then spells it for llguidance |
| `parser` | text to nodes; refuses what is no regular expression |
| `nodes`, `charsets` | the parts of a pattern; sets of characters, and ECMA-262's names for them |
| `opposite` | the texts that a negative look allows, by way of a small automaton |
"""
