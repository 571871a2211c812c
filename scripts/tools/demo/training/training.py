"""The training loop of the demo model."""

import time
from collections.abc import Iterator

import mlx.core as mx
import mlx.optimizers as optimizers
from mlx.nn.losses import cross_entropy
from mlx.nn.utils import value_and_grad
from mlx_lm.models import llama
from tokenizers import Tokenizer

from scripts.tools.demo.questions import held_out_prompts
from scripts.tools.demo.training.dialogues import Dialogues
from scripts.tools.demo.training.evaluation import right_answers

_FIRST_RATE = 1e-5
_PEAK_RATE = 1.5e-3
_FINAL_RATE = 3e-5
_WARM_UP_STEPS = 30
_REPORT_STEPS = 100


def train(model: llama.Model, tokenizer: Tokenizer, steps: int, seed: int) -> None:
    """Train the weights of `model` in place: AdamW, the rate warming up and then falling along a cosine."""
    dialogues = Dialogues(tokenizer, seed)
    falling = optimizers.cosine_decay(_PEAK_RATE, max(1, steps - _WARM_UP_STEPS), _FINAL_RATE)
    rising = optimizers.linear_schedule(_FIRST_RATE, _PEAK_RATE, _WARM_UP_STEPS)
    rate = optimizers.join_schedules([rising, falling], [_WARM_UP_STEPS])
    optimizer = optimizers.AdamW(learning_rate=rate, betas=[0.9, 0.95], weight_decay=0.01)
    loss_and_gradients = value_and_grad(model, _loss)
    probe = held_out_prompts(20, seed=1)
    started, average = time.monotonic(), 0.0
    for step, (rows, length) in enumerate(_shapes(steps), start=1):
        tokens, weights = (mx.array(part) for part in dialogues.batch(rows, length))
        loss, gradients = loss_and_gradients(model, tokens, weights)
        gradients, _ = optimizers.clip_grad_norm(gradients, 1.0)
        optimizer.update(model, gradients)
        mx.eval(loss, model.parameters(), optimizer.state)
        average = loss.item() if step == 1 else 0.95 * average + 0.05 * loss.item()
        if step % _REPORT_STEPS == 0 or step == steps:
            right, seconds = right_answers(model, tokenizer, probe), time.monotonic() - started
            print(f"step {step} of {steps}, {seconds:.0f} s: loss {average:.4f}, recall {right} of 20", flush=True)


def _shapes(steps: int) -> Iterator[tuple[int, int]]:
    """Rows and length of every step's batch: short dialogues, and after a quarter of them also some long ones."""
    for step in range(steps):
        yield (1, 1280) if step > steps // 4 and step % 8 == 0 else (8, 160)


def _loss(model: llama.Model, tokens: mx.array, weights: mx.array) -> mx.array:
    """Mean cross entropy of the words that count; `tokens` and `weights` are `[rows, length]`."""
    losses = cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
    return (losses * weights[:, 1:]).sum() / mx.maximum(weights[:, 1:].sum(), 1)
