"""Drafts of the tokens to come, from text that is known already. Knows no model, no MLX, and no engine.

| module | what it is |
| --- | --- |
| `draft` | what is proposed: tokens, where they are from, how much of the text before them was the same |
| `chain` | the places behind all runs of as many tokens, newest first |
| `text` | a text that grows, and the places in it where its like occurred before |
| `lookup` | the drafter of one request: its own text first, then the ring |
| `ring` | the answers of earlier requests, the oldest forgotten first |
| `acceptance` | how often drafts like this one were right |
| `cost` | how long a round of as many rows takes |
| `policy` | how many tokens of a draft are worth their rows |
| `guard` | whether drafts make anything faster at all, by the clock alone |

The engine thread owns all of it. Nothing here reads a clock or draws a number: the same calls give the same drafts.
"""
