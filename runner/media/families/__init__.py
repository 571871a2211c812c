"""The preparation of pictures in each family of models: their size, their rows, and the tokens around them.

| module | models |
| --- | --- |
| `family` | what they have in common |
| `fields` | reading numbers from config.json |
| `patches` | pixels to rows |
| `qwen3_5`, `glimmer`, `gemma4`, `gemma4_unified`, `nemotron_h` | one family each |

None of them imports numpy: they only call methods of the arrays that they are given.
"""
