"""The wing that drafts: known text or a model proposes the next tokens, and a round checks them in one forward.

`wing.DraftsWing` gives an engine a `drafting.Drafting`, which gives each answer an `AnswerDrafter`. A draft is right
only if the answering model draws the same token. So drafts can change the speed of an answer, but not its text.

| read in this order | |
| --- | --- |
| `drafting` | `Drafting`, which all answers of an engine share, and the `AnswerDrafter` of one answer |
| `rounds` | the rounds of a batch: finds drafts, computes them in one forward, and takes the right ones |
| `lookup`, `text` | finds the end of a text at earlier places: in the same request or in earlier answers |
| `draft_policy`, `acceptance`, `costs` | chooses the lengths of drafts, by their past success and their cost |
| `speed_check` | compares drafting and plain decoding by the clock |
| `wing`, `kinds` | finds and loads the model that drafts |
| `own_model` | a draft model with weights, layers and a context of its own |
| `target`, `hidden_states` | the answering model; the base classes of drafters that read its hidden states |
| `heads`, `assistant`, `dflash` | the three kinds of such drafters |

When a model drafts, five objects call each other in this order: the engine's batch, its `BatchRounds`, the `Drafting`,
a `DraftModel` (`OwnDraftModel`, `HeadDrafter`, `AssistantDrafter` or `BlockDrafter`), and the network of that model.

Owner: the engine thread. `lookup`, `text`, `draft_policy` and `speed_check` use no model, no MLX and no clock. So the
same calls always give the same drafts."""
