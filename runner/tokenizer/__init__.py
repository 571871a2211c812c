"""Text to ids and ids to text: no MLX, no transformers."""

from runner.tokenizer.files import Files
from runner.tokenizer.tokenizer import PART_CHARACTERS, Tokenizer, open_tokenizer
from runner.tokenizer.utf8 import Utf8Stream

__all__ = ["PART_CHARACTERS", "Files", "Tokenizer", "Utf8Stream", "open_tokenizer"]
