"""The second part of the training: the text model learns to say what the tower has seen."""

import time
from collections.abc import Sequence

import mlx.core as mx
from mlx import optimizers
from mlx.nn.losses import cross_entropy
from mlx.nn.utils import value_and_grad
from mlx_lm.models import qwen3_5
from tokenizers import Tokenizer

from scripts.tools.demo.training.seeing.batch import Batch, logits
from scripts.tools.demo.training.seeing.delta_rule import in_blocks
from scripts.tools.demo.training.seeing.dialogues import Dialogues, Seen

_ROWS = 12
_PEAK_RATE = 2e-3
_WARM_UP_STEPS = 30
_REPORT_STEPS = 50


def train_text(
    model: qwen3_5.Model, tokenizer: Tokenizer, seen: Sequence[Seen], sections: Sequence[int], steps: int, seed: int
) -> None:
    """Trains the weights of `model` in place; those of the tower stay as they are."""

    def loss(model: qwen3_5.Model, batch: Batch) -> tuple[mx.array, mx.array]:
        """Returns the mean cross entropy of the words that count, and the share of them that are right."""
        found, wanted, weights = logits(model, batch, sections)[:, :-1], batch.tokens[:, 1:], batch.weights[:, 1:]
        right = (mx.argmax(found, axis=-1) == wanted) * weights
        return (cross_entropy(found, wanted) * weights).sum() / weights.sum(), right.sum() / weights.sum()

    dialogues = Dialogues(tokenizer, seen, seed)
    falling = optimizers.cosine_decay(_PEAK_RATE, max(1, steps - _WARM_UP_STEPS), 5e-5)
    rising = optimizers.linear_schedule(1e-5, _PEAK_RATE, _WARM_UP_STEPS)
    rate = optimizers.join_schedules([rising, falling], [_WARM_UP_STEPS])
    optimizer = optimizers.AdamW(learning_rate=rate, betas=[0.9, 0.95], weight_decay=0.01)
    loss_and_gradients = value_and_grad(model, loss)
    started, average, share = time.monotonic(), 0.0, 0.0
    with in_blocks():
        for step in range(1, steps + 1):
            (lost, right), gradients = loss_and_gradients(model, dialogues.batch(_ROWS))
            gradients, _ = optimizers.clip_grad_norm(gradients, 1.0)
            optimizer.update(model, gradients)
            mx.eval(lost, right, model.parameters(), optimizer.state)
            pace = 1 if step == 1 else 0.05
            average, share = average + pace * (lost.item() - average), share + pace * (right.item() - share)
            if step % _REPORT_STEPS == 0 or step == steps:
                seconds = time.monotonic() - started
                print(
                    f"text, step {step} of {steps}, {seconds:.0f} s: loss {average:.4f}, right {share:.1%}", flush=True
                )
