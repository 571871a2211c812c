"""Opens models on disk: in Ollama's store, or in a directory in the style of Hugging Face.

Either becomes a `ModelCheckpoint`: text files by name, and logical tensors as the headers describe them. The code here
reads no tensor data, and needs no MLX. Every result is immutable.

A fault after which opening can go on is passed to a `ReportFault` callback. A serving runner raises it (`raise_fault`).
`mlx-runner check` collects the faults, and gets the tensors of a broken file in `unreadable`.

Read in this order: `checkpoint` (the result), `safetensors` (headers, checked), `name` (model names), `manifest` (both
trees of tags), `ollama_store`, `model_directory`, `foreign` (files of other programs).
"""
