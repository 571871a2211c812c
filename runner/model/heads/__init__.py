"""Heads that draft: small models in the packages of larger ones, which tell from the hidden states of their target what
comes after the next token (multi-token prediction).

| module | what it is |
| --- | --- |
| `target` | what a head shares with its target, and the target's hidden states |
| `head` | a head with all that it needs to draft |
| `qwen3_5`, `nemotron_h` | the modules of two families |
| `load` | finds the tensors of a head, and loads it |
| `drafter` | drafts the tokens of one answer after the other |

Everything runs on the engine thread, which owns MLX.
"""
