"""Turns an opened model into an mlx-lm module with its weights.

All code here runs on the engine thread, which owns MLX. The same functions assemble each model twice: first from
placeholders, to find every fault before any weights are read, then from the real arrays.

Read in this order: `loading` (the steps, bounded in memory), `assembly` (placeholders or arrays -> module),
`model_args` (arguments of mlx-lm's classes), `mended` (config fields that these classes ignore), `experts` and `packed`
(tensors in the form that mlx-lm's `sanitize` knows), `other_packings` (FP8, AWQ), `quantized_layers` (layers that
compute with packed weights), `parameters` (the final check), `dtype` (the type to compute in), `reading` (files ->
arrays) and `expert_reader` (files -> stacks of experts). `runner.ranks.split` loads one rank's part.
"""
