"""The regular expressions of JSON schemas, which are ECMA-262's, in the dialect of llguidance.

`compiler` hands each format to `schemas.with_translated_patterns` before llguidance reads it. The result has patterns
that mean the same, and the first part that had to be left out. All of this runs in a worker process, within its limits.

| read in this order | |
| --- | --- |
| `schemas` | finds the patterns of a schema and puts their translations in place, or refuses them |
| `translator` | one pattern: resolves edges and looks, then spells it for llguidance |
| `parser` | text to nodes; refuses text that is not a regular expression |
| `nodes`, `charsets` | the parts of a pattern; sets of characters, and ECMA-262's names for them |
| `opposite` | the texts that a negative look allows, by way of a small automaton |
"""
