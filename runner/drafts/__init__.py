"""Drafts of the tokens to come, which a round checks in one forward: from text that is known, or by a model. A wing.

`wing.DraftsWing` gives an engine a `drafting.Drafting`, and that gives each answer its `AnswerDrafter`. A draft is
right only if the answering model drew it, so nothing here can change an answer, only its speed.

| read in this order | |
| --- | --- |
| `drafting` | all drafts of an engine, and those of one answer |
| `rounds` | the rounds of a batch: finds drafts, computes them in one forward, and takes those that are right |
| `lookup`, `text` | finds what followed when the text stood like this before, in this request or in earlier answers |
| `policy`, `speed_check` | how many tokens are worth their rows; whether drafts make anything faster at all |
| `wing`, `kinds` | which model drafts, and why another one cannot |
| `own_model` | a draft model with weights, layers and a context of its own |
| `target` | what models share that draft from what the answering model, their *target*, has computed |
| `heads`, `assistant`, `dflash` | these models |

A drafted token passes five objects: the engine's batch, its `BatchRounds`, the `Drafting`, a `DraftModel`
(`OwnDraftModel`, `HeadDrafter`, `AssistantDrafter` or `BlockDrafter`), and the network of that.

The shortest matches, in the own text and in those of others, are in `lookup`, the costs of rows in `policy`.

Owner: the engine thread. `lookup`, `text`, `policy` and `speed_check` know no model, no MLX and no clock: the same
calls give the same drafts.
"""
