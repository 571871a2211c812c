"""Drafts of the tokens to come, which a round checks in one forward: from known text, or by a model. A wing.

`wing.DraftsWing` gives an engine a `drafting.Drafting`, and that gives each answer its `AnswerDrafter`. A draft is
right only if the answering model drew it, so nothing here can change an answer, only its speed.

| read in this order | |
| --- | --- |
| `drafting` | all drafts of an engine, and those of one answer |
| `rounds` | the rounds of a batch: finds drafts, computes them in one forward, and takes the right ones |
| `lookup`, `text` | finds earlier places like the end of the text, in this request or in earlier answers |
| `draft_policy` | the number of tokens that are worth their rows, by `acceptance` and `costs` |
| `speed_check` | compares drafting and plain decoding by the clock |
| `wing`, `kinds` | the model that drafts |
| `own_model` | a draft model with weights, layers and a context of its own |
| `target`, `hidden_states` | the answering model; models that draft from its hidden states |
| `heads`, `assistant`, `dflash` | these models |

A drafted token passes five objects: the engine's batch, its `BatchRounds`, the `Drafting`, a `DraftModel`
(`OwnDraftModel`, `HeadDrafter`, `AssistantDrafter` or `BlockDrafter`), and its network.

Owner: the engine thread. `lookup`, `text`, `draft_policy` and `speed_check` know no model, no MLX and no clock: the
same calls give the same drafts.
"""
