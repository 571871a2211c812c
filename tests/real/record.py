"""`python -m tests.real.record`: has mlx-lm itself answer the prompts in `PROMPTS`, greedily, into `answers.json`."""

import json
import sys
from pathlib import Path

import mlx.core as mx

from runner import cpu
from scripts.tools.real.chat import render

ANSWERS = Path(__file__).with_name("answers.json")
TOKENS = 48
QUESTIONS = (
    "What is the capital of France?",
    "Name three primary colours.",
    "Write a haiku about the sea.",
    "What is 7 plus 5?",
    "Explain in one sentence why the sky is blue.",
    "Give me a Python function that adds two numbers.",
    "Translate 'good morning' into Spanish.",
    "Who wrote Romeo and Juliet?",
)


def chat(*turns: str) -> str:
    """Returns the prompt of a conversation, as the model's template writes it: user and assistant in turn."""
    return render((("user", "assistant")[number % 2], turn) for number, turn in enumerate(turns))


def main() -> None:
    """Generates with the packed weights, in float32, as `--dtype float32` computes."""
    cpu.preload()
    mx.disable_compile()
    from mlx_lm import load, stream_generate

    from scripts.tools.real.main import make_model

    model, tokenizer = load(str(make_model()))[:2]
    model.set_dtype(mx.float32)
    answers = {}
    for question in QUESTIONS:
        prompt = tokenizer.encode(chat(question), add_special_tokens=False)
        parts = stream_generate(model, tokenizer, prompt, max_tokens=TOKENS)
        answers[question] = "".join(part.text for part in parts)
        sys.stdout.write(f"{question} -> {answers[question]}\n")
    ANSWERS.write_text(json.dumps(answers, indent=2) + "\n")


if __name__ == "__main__":
    main()
