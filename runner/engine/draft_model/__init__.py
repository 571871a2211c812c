"""Models that draft: what they are to an answer, and one with weights, layers and a context of its own.

| module | what it is |
| --- | --- |
| `interface` | a model that drafts, as answers see it |
| `pacing` | when a model drafts, and how many tokens: as many as pay |
| `reader` | the layers of a draft model, which follow one text after the other |
| `own_model` | a draft model with weights of its own |
| `watching` | a model that drafts from what the answering model computes |
| `assistant_model` | an assistant, which drafts from what the answering model has computed |
| `head_model` | the head of the answering model, which drafts from what that one has computed |
| `dflash_model` | a DFlash draft, which drafts a block of tokens from what the answering model has computed |
| `opening` | which model drafts, and why another one cannot |
| `named` | a draft model that is named, or lies beside the model |
| `vocabulary` | whether two models mean the same by each token |
"""
