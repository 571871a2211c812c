"""Assistants of Gemma 4: small models that draft from what their target has computed. They have no keys and values of
their own: they look at those of the target.

| module | what it is |
| --- | --- |
| `opening` | opens an assistant by its headers, without MLX |
| `context` | the keys and values of the target that an assistant looks at |
| `module` | the network |
| `load` | checks that an assistant fits its target, and loads it |
| `drafter` | drafts the tokens of one answer after the other |

All but `opening` runs on the engine thread, which owns MLX.
"""
