"""Tokenizes text and decodes tokens, without MLX and without transformers.

`open_tokenizer` opens a model's `tokenizer.json` with Hugging Face's tokenizers, or its `tokenizer.model` with
sentencepiece, and takes BOS, EOS and added tokens from the configs beside it. Results match Ollama's own runner.

Owners: a `Tokenizer` and its backend do not change after construction, so any thread may use them; long texts are
encoded without the GIL. A `Utf8Stream` belongs to the one generation that it decodes.

Read in this order: `tokenizer` (with the interface of a vocabulary); `tokenizer_json` with `piece_bytes`;
`tokenizer_model` with `added_tokens`; `model_files`; `detokenizer` (an answer's tokens to the text to deliver).
"""

from runner.tokenizer.model_files import Files
from runner.tokenizer.tokenizer import PART_CHARACTERS, Tokenizer, Utf8Stream, open_tokenizer

__all__ = ["PART_CHARACTERS", "Files", "Tokenizer", "Utf8Stream", "open_tokenizer"]
