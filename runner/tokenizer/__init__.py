"""Tokenizes text and decodes tokens, without MLX and without transformers.

`open_tokenizer` opens a model's `tokenizer.json` with Hugging Face's tokenizers, or its `tokenizer.model` with
sentencepiece, and reads BOS, EOS and added tokens from the configs beside this file. Results equal those of Ollama's
runner.

Owners: any thread may use a `Tokenizer` and its backend, which do not change after construction; long texts are encoded
without the GIL. A `Utf8Stream` belongs to the generation that it decodes.

Read in this order: `tokenizer` (with the interface of a vocabulary) and `special_ids`; `tokenizer_json` with
`piece_bytes`; `tokenizer_model` with `model_proto`; `added_tokens`, `model_files`; `detokenizer` (an answer's tokens to
text).
"""

from runner.tokenizer.model_files import Files
from runner.tokenizer.tokenizer import PART_CHARACTERS, Tokenizer, open_tokenizer

__all__ = ["PART_CHARACTERS", "Files", "Tokenizer", "open_tokenizer"]
