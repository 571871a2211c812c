"""Reads models on disk: Ollama's store, or a directory in the style of Hugging Face.

Both become one `Checkpoint`: text files by name, and logical tensors as the headers describe them. No tensor data is
read here. Needs no MLX; everything returned is immutable.

A fault despite which opening can go on goes to a `ReportFault` callback: serving raises it (`raise_fault`),
`mlx-runner check` collects it and continues, with unreadable tensors listed as `unreadable`.

Read in this order: `checkpoint` (the result), `safetensors` (headers, checked), `name` (model names), `manifest`
(both trees of tags), `ollama_store`, `model_directory`, `foreign` (files of other programs).
"""
