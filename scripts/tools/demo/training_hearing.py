"""Trains the demo model that hears: its tower first, then its text model on what the tower makes of sounds.

`scripts/train_demo_model demo_hearing_model` runs it.
"""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.losses import cross_entropy
from tokenizers import Tokenizer

from runner.media.sound import spectra
from runner.media.towers.gemma4_sound import Gemma4SoundTower
from scripts.tools.demo import hearing, plain
from scripts.tools.demo.questions import END, MARKERS
from scripts.tools.demo.training import Batch, Place, Row, optimize

_TOKEN_S = 0.04
_ROWS = 12


class Recording(NamedTuple):
    """A sound as the tower takes it, and gives it."""

    tune: hearing.Tune
    rows: mx.array
    """Spectra [count, 128]."""
    labels: np.ndarray
    """Of each soft token: 0, or number and pitch of the tone that is heard."""
    features: Sequence[np.ndarray] = ()
    """Of each soft token [width], once the tower is trained."""


def recordings(count: int, seed: int) -> list[Recording]:
    """Returns sounds of all tunes, those of three tones as often as the others."""
    rng, found, tunes = random.Random(seed), list[Recording](), hearing.tunes()
    for number in range(count):
        length = 1 + number % hearing.MOST_TONES
        tune = rng.choice([each for each in tunes if len(each) == length])
        samples, times = hearing.play(tune, rng.getrandbits(31) * 2)
        rows = spectra(samples)
        labels = np.zeros(-(-len(rows) // 4), np.int32)
        for place, (pitch, (start, stop)) in enumerate(zip(tune, times, strict=True)):
            first, last = round((start + 0.05) / _TOKEN_S), round((stop + 0.01) / _TOKEN_S)
            labels[first:last] = 1 + place * len(hearing.PITCHES) + [*hearing.PITCHES].index(pitch)
        found.append(Recording(tune, mx.array(rows), labels))
    return found


class Listener(Module):
    """A tower without a text model: a linear layer reads number and pitch of a tone off each soft token."""

    def __init__(self, tower: Gemma4SoundTower) -> None:
        Module.__init__(self)
        self.tower = tower
        self.read = Linear(tower.width, 1 + hearing.MOST_TONES * len(hearing.PITCHES))

    def loss(self, batch: Sequence[Recording]) -> mx.array:
        heard = [[*self.tower.encode(each.rows, [each.rows.shape[0]])][-1] for each in batch]
        labels = mx.array(np.stack([each.labels for each in batch]))
        return cross_entropy(self.read(mx.stack(heard)), labels).mean()


def sound_batches(known: Sequence[Recording], seed: int) -> Iterator[list[Recording]]:
    rng = random.Random(seed)
    while True:
        yield rng.sample(known, _ROWS)


def talk_batches(tokenizer: Tokenizer, known: Sequence[Recording], seed: int) -> Iterator[Batch]:
    """Yields talks about one sound that the tower has encoded, and some without any."""
    rng = random.Random(seed)
    soft = plain.token_id(tokenizer, plain.HEARD)
    while True:
        rows = [Row(tokenizer) for _ in range(_ROWS)]
        for row in rows:
            if rng.random() < 0.12:
                alone = [*hearing.SMALL_TALK.items(), *((question, hearing.DEAF) for question in hearing.QUESTIONS)]
                row.turn(*rng.choice(alone))
                continue
            heard = rng.choice(known)
            asked = rng.sample([*hearing.QUESTIONS], 4)
            row.say(f"{MARKERS['user']}{plain.HEARD_START}")
            row.places += [Place(soft, False, feature) for feature in heard.features]
            row.say(f"{plain.HEARD_STOP}{asked[0]}{END}{MARKERS['assistant']}")
            row.say(f"{hearing.QUESTIONS[asked[0]](heard.tune)}{END}", counts=True)
            for question in asked[1:]:
                row.turn(question, hearing.QUESTIONS[question](heard.tune))
        yield Batch(rows, max(len(row.places) for row in rows))


def train_hearing(source: Path, steps: int, seed: int, tower_steps: int = 500, count: int = 600) -> dict[str, mx.array]:
    """Returns the weights of a model that hears, under the names of a published one: its tower is trained first."""
    mx.disable_compile()
    mx.random.seed(seed)
    model, tokenizer = plain.new_hearing(plain.read_config(source)), plain.read_tokenizer(source)
    generator = np.random.default_rng(seed)
    for name, weight in plain.named_weights(model.tower).items():
        if "conv" in name and weight.ndim > 2:
            scale = 1 / np.sqrt(np.prod(weight.shape[1:]))
            model.tower.load_weights(
                [(name, mx.array(generator.normal(0, scale, weight.shape), mx.float32))], strict=False
            )
    known, listener = recordings(count, seed), Listener(model.tower)
    optimize("tower", listener, listener.loss, sound_batches(known, seed), tower_steps, 3e-3)
    for index, each in enumerate(known):
        *_, features = model.tower.encode(each.rows, [each.rows.shape[0]])
        known[index] = each._replace(features=[*np.array(features)])

    def loss(batch: Batch) -> mx.array:
        return batch.loss(_logits(model, batch))

    optimize("text", model.text, loss, talk_batches(tokenizer, known, seed), steps, 2e-3)
    return plain.published_hearing(model)


def _logits(model: plain.HearingModel, batch: Batch) -> mx.array:
    """Returns the logits [rows, length, vocabulary], with features as the runner has them."""
    table = model.text.model
    embedded = batch.embedded(table.embed_tokens(batch.tokens), table.embed_scale)
    return cast("mx.array", model.text(batch.tokens, input_embeddings=embedded))
