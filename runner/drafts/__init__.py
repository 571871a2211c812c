"""Drafts of the tokens to come, which a round checks in one forward: from text that is known, or by a model. A wing.

`drafting.Drafting` is what `runner/assemble.py` gives the engine, and `AnswerDrafter` the drafter of one answer. A
draft is right only if the answering model drew it, so nothing here can change an answer, only its speed.

| read in this order | |
| --- | --- |
| `drafting` | all drafts of an engine, and those of one answer |
| `lookup`, `text` | finds what followed when the text stood like this before, in this request or in earlier answers |
| `policy`, `guard` | how many tokens are worth their rows; whether drafts make anything faster at all |
| `pacing` | a model that drafts, as answers see it; when it drafts, and how many tokens |
| `opening`, `named` | which model drafts, and why another one cannot |
| `own_model` | a draft model with weights, layers and a context of its own |
| `heads`, `assistant`, `dflash` | models that draft from what the answering model has computed |

Owner: the engine thread. `lookup`, `text`, `policy`, `guard` and `drafting` know no model, no MLX and no clock: the
same calls give the same drafts.
"""
