"""Each published model opens, is what its files say, answers, and stops.

The whole runner computes the answer to a prompt as a host renders it. Where the answer should end, the test makes the
end token the most probable one.
"""

import re
from concurrent.futures import Future
from pathlib import Path
from typing import cast

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from protocol import CompletionRequest, DoneReason
from runner.assemble import assemble
from runner.engine.engine import Turns, World
from runner.engine.events import Finished, Outbox, Text
from runner.engine.generation import Forward
from runner.engine.parts import Parts
from runner.engine.ports import NoVision
from runner.engine.request import Limits, Request
from runner.model import open_model
from runner.server.prepare import prepare
from runner.settings import Settings, context_limit
from runner.tokenizer import Tokenizer, open_tokenizer
from runner.wings import chooser
from tests.lib.steps import result_of
from tests.lib.tiny_engine import plain_outbox
from tests.published.form import ROWS, Row
from tests.published.measure import LENGTH, measured, rotation, visible

_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output)\.weight$")


class Led(World):
    """A world in which the model says certain tokens: their logits are raised above all others."""

    def __init__(self, outbox: Outbox) -> None:
        super().__init__(Turns(outbox))
        self.say: list[int] = []
        self.prompt, self.seen = 0, 0

    def wrap(self, parts: Parts) -> None:
        parts.forward = self._led(parts.forward)

    def _led(self, forward: Forward) -> Forward:
        def run(tokens: mx.array, layers: list[object]) -> mx.array:
            logits = forward(tokens, layers)
            self.seen += tokens.shape[1]
            said = self.seen - self.prompt
            return logits.at[..., self.say[said]].add(1e6) if 0 <= said < len(self.say) else logits

        return run


class Opened:
    """A row, opened by the runner."""

    def __init__(self, row: Row, root: Path) -> None:
        directory = row.write(root / "model")
        settings = Settings(
            model=str(directory), port=0, models_dir=root, cache="none", blas="auto", blas_threads=1, log_level=20,
            watch_parent=False, draft="off",
        )  # fmt: skip
        self.row, self.world = row, Led(plain_outbox())
        self.model = open_model(settings.model, settings.models_dir, chooser(settings))
        opening: Future[Tokenizer] = Future()
        opening.set_result(open_tokenizer(self.model.file, merge_eos=True))
        self.parts: Parts = assemble(settings, self.model, opening, 0.0, lambda _: None, self.world)

    def answer(self, tokens: list[int]) -> tuple[str, Finished]:
        """Returns the text and the end of an answer of `tokens`."""
        wire = CompletionRequest(prompt=self.row.talk)
        limits = Limits(context_limit(self.model.context_length, None), self.model.vocab_size)
        asked: Request = result_of(prepare(wire, self.parts.tokenizer, limits, None, NoVision()))
        asked.max_tokens = len(tokens)
        self.world.say, self.world.prompt, self.world.seen = tokens, len(asked.prompt), 0
        self.parts.scheduler.add(asked)
        while not self.parts.scheduler.idle:
            self.parts.scheduler.compute_slice()
            self.world.turns.outbox.send()
        events = asked.stream._events
        assert isinstance(events[-1], Finished), events[-1]
        return "".join(event.text for event in events if isinstance(event, Text)), events[-1]


def _rows() -> list[object]:
    return [
        pytest.param(row, id=name, marks=[pytest.mark.xfail(reason=row.waits, strict=True)] if row.waits else [])
        for name, row in ROWS.items()
    ]


@pytest.mark.parametrize("row", _rows())
def test_a_published_model_answers_and_stops(row: Row, tmp_path: Path) -> None:
    opened = Opened(row, tmp_path)
    assert opened.model.context_length == row.context
    check_turns(row, opened.parts.tokenizer)
    check_layers(row, opened.parts)
    check_ends(row, opened)
    check_head(row, opened.parts)


def check_turns(row: Row, tokenizer: Tokenizer) -> None:
    """Each special token of a chat is one token, and the text of the prompt comes back."""
    found = tokenizer.encode(row.talk)
    named = re.compile("|".join(re.escape(text) for text in sorted(row.ids, key=len, reverse=True)))
    first = [row.ids[row.first]] if row.first else []
    wanted = first + [row.ids[match[0]] for match in named.finditer(row.talk)]
    assert [token for token in found if token in row.ids.values()] == wanted
    assert tokenizer.special == {row.ids[text] for text in row.tokens}
    text = "".join(tokenizer.decode_parts(found)).removeprefix(row.first)
    assert text == row.talk or (row.vocabulary == "llama-2" and text.replace(" ", "") == row.talk.replace(" ", ""))
    assert {tokenizer.token_text(token) for token in tokenizer.eos} == {*row.ends}


def check_head(row: Row, parts: Parts) -> None:
    """Logits come from the embedding if the model is tied, else from a head. Destroys the model."""
    module = parts.loaded.module

    def logits() -> mx.array:
        return parts.loaded.logits(mx.array([[1, 2, 3]]), parts.make_layers())

    before, arrays = logits(), cast("list[tuple[str, mx.array]]", tree_flatten(module.parameters()))
    heads = [(name, mx.zeros_like(array)) for name, array in arrays if _HEAD.search(name)]
    module.update(tree_unflatten(heads))
    assert mx.array_equal(logits(), before).item() == row.tied


def check_layers(row: Row, parts: Parts) -> None:
    """Rotation and sight of every layer."""
    found = measured(parts.loaded.module, parts.make_layers, [*range(LENGTH)])
    assert len(found) == len(row.layers)
    for index, (layer, letter) in enumerate(zip(found, row.layers, strict=True)):
        said = (row.local or row.rotary) if letter in "sS" else row.rotary if letter in "fFc" else {}
        assert (layer.rotation is not None) == bool(said), f"layer {index}"
        if layer.rotation is not None:
            difference = np.abs(layer.rotation - rotation(said, len(layer.rotation)))
            assert difference.max() < 1e-5, f"layer {index}: {difference.max(axis=1).round(3)}"
        if letter not in "SF-":
            assert layer.seen() == visible(letter, row.window), f"layer {index}"


def check_ends(row: Row, opened: Opened) -> None:
    """Every end token ends an answer and is no part of it; any other token does not."""
    letter = opened.parts.tokenizer.encode_without_bos("a")[-1]
    others = {text: number for text, number in row.ids.items() if text not in row.ends}
    for end in row.ends:
        text, last = opened.answer([letter, *others.values(), row.ids[end], letter])
        assert text == "a" + "".join(others), end
        assert (last.reason, last.metrics.eval_count) == (DoneReason.STOP, len(others) + 1), end
        others = {}
