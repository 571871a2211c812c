"""Turns an opened model into an mlx-lm module with its weights.

Everything runs on the engine thread, which owns MLX. Each model is assembled twice by the same functions: first on
placeholders, which finds every fault before a byte of weights is read, then on the real arrays.

Read in this order: `loading` (the steps, bounded in memory), `assembly` (placeholders or arrays -> module),
`model_args` (arguments of mlx-lm's classes), `mended` (fields that these do not read), `experts` and `packed` (tensors
in the form that mlx-lm's `sanitize` knows), `other_packings` (FP8, AWQ), `quantized_layers` (layers that compute with
packed weights), `parameters` (the final check), `dtype` (the type to compute in), `reading` (files -> arrays) and
`expert_reader` (files -> stacks of experts). `runner.ranks.split` loads one rank's part.
"""
