"""Evaluation of a trained demo model: greedy answers, of which only exact ones count."""

from collections import defaultdict
from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache, make_prompt_cache
from tokenizers import Tokenizer

from scripts.tools.demo.questions import CONVERSATIONS, END, RecallPrompt, held_out_prompts

REQUIRED_ACCURACY = 0.95


def answer(
    model: llama.Model, tokenizer: Tokenizer, prompt: str, limit: int = 120, cache: list[KVCache] | None = None
) -> str:
    """The greedy answer to `prompt` after what `cache` holds, up to the end marker or `limit` tokens."""
    cache = cache or make_prompt_cache(model)
    end = tokenizer.token_to_id(END)
    step = mx.array([tokenizer.encode(prompt, add_special_tokens=False).ids])
    tokens: list[int] = []
    while len(tokens) < limit:
        token = mx.argmax(model(step, cache=cache)[0, -1])
        if token.item() == end:
            break
        tokens.append(int(token))
        step = token.reshape(1, 1)
    return tokenizer.decode(tokens, skip_special_tokens=False)


def right_answers(model: llama.Model, tokenizer: Tokenizer, prompts: Sequence[RecallPrompt]) -> int:
    """Returns the number of `prompts` that get exactly their answer."""
    return sum(answer(model, tokenizer, prompt.prompt, limit=12) == prompt.answer for prompt in prompts)


def report(model: llama.Model, tokenizer: Tokenizer) -> bool:
    """Print what the model reaches; True if every demo answer is right and enough of the held-out recall."""
    by_facts: dict[int, list[RecallPrompt]] = defaultdict(list)
    for prompt in held_out_prompts():
        by_facts[prompt.facts].append(prompt)
    right = total = 0
    for facts, prompts in by_facts.items():
        lengths = [len(tokenizer.encode(prompt.prompt, add_special_tokens=False).ids) for prompt in prompts]
        hits = right_answers(model, tokenizer, prompts)
        print(f"  {facts} facts in {min(lengths)} to {max(lengths)} tokens: {hits} of {len(prompts)}", flush=True)
        right, total = right + hits, total + len(prompts)
    needed = f"{REQUIRED_ACCURACY:.0%} required"
    print(f"held-out recall, greedy and exact: {right} of {total} ({right / total:.1%}, {needed})")
    wrong = wrong_demo_answers(model, tokenizer)
    for line in wrong:
        print(f"  {line}")
    print(f"demo conversations: {'every answer as expected' if not wrong else f'{len(wrong)} wrong answers'}")
    return right >= REQUIRED_ACCURACY * total and not wrong


def wrong_demo_answers(model: llama.Model, tokenizer: Tokenizer) -> list[str]:
    """A line for each turn of the demo conversations that is not answered as expected."""
    wrong = []
    for conversation in CONVERSATIONS:
        for index, turn in enumerate(conversation.turns):
            text = answer(model, tokenizer, conversation.prompt(index))
            if text != turn.answer:
                wrong.append(f"{conversation.title}: {turn.user!r} -> {text!r}, not {turn.answer!r}")
    return wrong
