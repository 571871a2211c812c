"""Log-probabilities as clients read them: of texts, not of ids."""

from protocol import Logprob, TopLogprob
from runner.sampling.sample import Choice
from runner.tokenizer import Tokenizer


def entry(choice: Choice, tokenizer: Tokenizer) -> Logprob | None:
    """That of the token which was chosen, with those that were likelier than others; None if nobody wants to know."""
    if choice.logprob is None:
        return None
    top = [TopLogprob(tokenizer.token_text(token), logprob) for token, logprob in choice.top]
    return Logprob(tokenizer.token_text(choice.token), choice.logprob, top)
