"""Translates the regular expressions of JSON schemas from ECMA-262's dialect into llguidance's.

`compiler` calls `schemas.with_translated_patterns` for each format before llguidance reads it. The new patterns mean
the same; parts without a translation are left out. All of this runs in a worker process, within its limits.

| read in this order | |
| --- | --- |
| `schemas` | replaces the patterns of a schema by translations, or refuses them |
| `translator` | translates one pattern: resolves edges and looks, then writes it for llguidance |
| `parser` | turns the text of a pattern into nodes; refuses text that is not a regular expression |
| `nodes`, `charsets` | the parts of a pattern; sets of characters, and ECMA-262's names of such sets |
| `opposite` | a pattern for the texts that a negative look allows |
"""
