"""Whether two models mean the same by each token."""

from runner.errors import ModelError
from runner.model import OpenedModel
from runner.tokenizer import Tokenizer, open_tokenizer

_FILE = "tokenizer.json"
_MOST_MORE = 512  # tokens: models of one family add some to a common vocabulary


def check_vocabulary(draft: OpenedModel, target: OpenedModel, tokenizer: Tokenizer) -> None:
    """Raises ModelError unless the draft model has the vocabulary of the target, whose tokenizer is given.

    One of them may have some tokens more at the end. Takes some tenths of a second, unless the files are the same.
    """
    if (same := draft.file(_FILE)) is not None and same == target.file(_FILE):
        return
    theirs = open_tokenizer(draft.file, merge_eos=not draft.checkpoint.from_store)
    if abs(theirs.vocab_size - tokenizer.vocab_size) > _MOST_MORE:
        raise ModelError(
            f"it has another vocabulary than the model: {theirs.vocab_size} tokens instead of {tokenizer.vocab_size}"
        )
    for token in range(min(theirs.vocab_size, tokenizer.vocab_size)):
        if theirs.token_bytes(token) != tokenizer.token_bytes(token):
            raise ModelError(
                f"it has another vocabulary than the model: token {token} is {theirs.token_text(token)!r} instead of"
                f" {tokenizer.token_text(token)!r}"
            )
