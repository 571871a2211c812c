"""Log-probabilities as clients read them: by text, not by token id."""

from protocol import Logprob, TopLogprob
from runner.sampling.sample import Choice
from runner.tokenizer import Tokenizer


def entry(choice: Choice, logprob: float, tokenizer: Tokenizer) -> Logprob:
    """Returns the entry of the chosen token, whose log-probability is `logprob`, with its likeliest alternatives."""
    top = [TopLogprob(tokenizer.token_text(token), each) for token, each in choice.top]
    return Logprob(tokenizer.token_text(choice.token), logprob, top)
