"""Training of the demo models, from text and pictures made here; `train` runs it, `training_hearing` adds sound.

The one in scripts/demo_model looks facts up in its own prompt; the one in scripts/demo_draft_model does so with a fifth
of the weights, to draft for it; the one in scripts/demo_seeing_model says which colour the circle in a picture has, and
where it is. Shapes and tokenizers stay those of these directories. Everything follows from one seed: the same kind of
machine and the same BLAS give the same file. Exit status 1 if the model is not good enough.
"""

import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar, cast

import mlx.core as mx
import numpy as np
from mlx import optimizers
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.losses import cross_entropy
from mlx.nn.utils import value_and_grad
from PIL import Image
from tokenizers import Tokenizer

from runner.media.families import Qwen35
from runner.media.forward import AngledRope, Angles, angles
from runner.media.towers import Grid
from runner.media.towers.qwen3_5 import Qwen35Tower
from runner.model.weights.parameters import replace_submodule
from scripts.tools.demo import plain, questions, seeing
from scripts.tools.demo.plain import named_weights
from scripts.tools.demo.questions import END, MARKERS

# isort: split
from mlx_lm.models import llama

T = TypeVar("T")


# The text models: random weights, with an induction circuit laid into the first two layers.
#
# From ordinary random weights a model of this size does not find out within minutes that an answer can be looked up in
# its prompt. The hidden vector is split into slots; slot 0 of the embedding holds a random vector for the token. Head h
# of layer 0 attends exactly h + 1 tokens back and copies what stands there into slot h + 1: its query and key biases,
# rotated by RoPE, are in phase at one distance only. The heads of layer 1 compare slots of the query with slots of the
# keys one token further back, so that "Nora lives in" finds where "Nora lives in" stood before, and copy the token that
# stands there into slot 0; they use the slow RoPE pairs, which hardly turn over the whole context.

_SLOT = 3 / 16  # of the hidden vector: five slots, and some dimensions to spare
_IDENTITY_SCALE, _OTHER_SCALE = 0.5, 0.02  # of a token's vector, and of the random weights around the circuit
_POSITION_GAIN = 11.0  # attention logits that a RoPE pair adds where it is in phase
_MATCH_GAIN, _COPY_GAIN = 6.0, 2.0
_MATCH_DISTANCE = 4096  # tokens over which the RoPE pairs of a match head turn less than half a radian
_NAME_AND_RELATION = ((2, 3, 20 / 64), (0, 1, 8 / 64))
_MATCH_HEADS = (_NAME_AND_RELATION, _NAME_AND_RELATION, _NAME_AND_RELATION, ((0, 1, 28 / 64),))
"""The comparisons of each head: (slot of the query, slot of the key, dimensions as a share of the head's width)."""


def lay_circuit(model: llama.Model, words: Sequence[str], rng: np.random.Generator) -> None:
    """Sets every weight of `model`, whose token i reads `words[i]`."""
    drawn = [(name, rng.normal(0, _OTHER_SCALE, weight.shape)) for name, weight in named_weights(model).items()]
    weights = [(name, values * (not name.endswith("bias"))) for name, values in drawn if "norm" not in name]
    model.load_weights([(name, mx.array(values, mx.float32)) for name, values in weights], strict=False)
    slot, table = int(model.args.hidden_size * _SLOT), np.array(model.model.embed_tokens.weight)
    vectors = dict[str, np.ndarray]()
    for token, word in enumerate(words):  # alike with and without a leading space
        table[token, :slot] = vectors.setdefault(word.strip() or word, rng.normal(0, _IDENTITY_SCALE, slot))
    model.model.embed_tokens.weight = mx.array(table)
    width = model.layers[0].self_attn.head_dim
    frequencies = model.args.rope_theta ** (-np.arange(0, width, 2) / width)
    _look_back(model.layers[0].self_attn, slot, frequencies)
    _look_up(model.layers[1].self_attn, slot, frequencies, rng)


def _look_back(attention: llama.Attention, slot: int, frequencies: np.ndarray) -> None:
    """Lets head h attend h + 1 tokens back and copy slot 0 from there to slot h + 1, at the size it has in slot 0."""
    value, output = np.array(attention.v_proj.weight), np.array(attention.o_proj.weight)
    query_bias, key_bias = (np.zeros(len(value), np.float32) for _ in range(2))
    width, hidden = 2 * len(frequencies), len(output)
    size = np.sqrt(_POSITION_GAIN * np.sqrt(width))  # attention divides the product of two of them by sqrt(width)
    for head in range(len(value) // width):
        start, angle = head * width, -frequencies * (head + 1)
        query_bias[start : start + width] = size * np.concatenate([np.cos(angle), np.sin(angle)])
        key_bias[start : start + width // 2] = size
        value[start : start + slot] = np.eye(slot, hidden)
        target = slice((head + 1) * slot, (head + 2) * slot)
        output[target] = 0
        # RMSNorm before the layer has blown slot 0, alone in its vector, up to this size.
        output[target, start : start + slot] = np.eye(slot) * _IDENTITY_SCALE / np.sqrt(hidden / slot)
    attention.v_proj.weight, attention.o_proj.weight = mx.array(value), mx.array(output)
    attention.q_proj.bias, attention.k_proj.bias = mx.array(query_bias), mx.array(key_bias)


def _look_up(attention: llama.Attention, slot: int, frequencies: np.ndarray, rng: np.random.Generator) -> None:
    """Lets heads compare slots as `_MATCH_HEADS` says and copy slot 0 of what they find into slot 0."""
    linears = attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj
    query, key, value, output = (np.array(linear.weight) for linear in linears)
    width = 2 * len(frequencies)
    slow = np.flatnonzero(frequencies * _MATCH_DISTANCE < 0.5)
    steady = np.concatenate([slow, slow + width // 2])  # the dimensions of a head that hardly depend on the distance
    for head, comparisons in enumerate(_MATCH_HEADS):
        start = head * width
        query[start : start + width] = key[start : start + width] = 0
        free = start + steady
        for query_slot, key_slot, share in comparisons:
            rows, free = np.split(free, [int(width * share)])
            projection = rng.normal(0, np.sqrt(_MATCH_GAIN / slot), (len(rows), slot))
            query[rows, query_slot * slot : (query_slot + 1) * slot] = projection
            key[rows, key_slot * slot : (key_slot + 1) * slot] = projection
        value[start : start + slot] = np.eye(slot, value.shape[1])
        output[:slot, start : start + slot] = np.eye(slot) * _IDENTITY_SCALE * _COPY_GAIN
    for linear, weight in zip(linears, (query, key, value, output), strict=True):
        linear.weight = mx.array(weight)


# The tower: random weights, but a patch is read as its mean colour and the lowest frequencies of its brightness.

_WAVES = 4
"""Of the table of positions, along each axis; each takes two dimensions."""


def lay_waves(tower: Qwen35Tower, rng: np.random.Generator) -> None:
    """Sets the patch embedding and the table of positions."""
    width, patch = tower.patch_embed.bias.size, tower.patch
    free = width - 4 * _WAVES
    kernel = rng.normal(0, 0.02 / patch, (width, 3, patch, patch))
    kernel[:3] = np.eye(3)[:, :, None, None] * (1.5 / patch**2)
    frequencies = sorted(((u, v) for u in range(patch) for v in range(patch) if u + v), key=lambda uv: (sum(uv), uv))
    for index, (u, v) in enumerate(frequencies[: free - 3], start=3):
        kernel[index] += np.outer(_wave(u, patch), _wave(v, patch)) / patch**2
    tower.patch_embed.weight = mx.array(kernel.reshape(width, -1).astype(np.float32))
    tower.patch_embed.bias = mx.zeros(width)
    table = rng.normal(0, 0.02, (tower.side, tower.side, width))
    angle = np.pi * np.arange(tower.side)[:, None] / (tower.side - 1) * (np.arange(_WAVES) + 1) / 2
    for offset, turn in enumerate((np.cos, np.sin)):
        table[:, :, free + offset :: 4] += 0.7 * turn(angle)[:, None]
        table[:, :, free + 2 + offset :: 4] += 0.7 * turn(angle)[None]
    tower.pos_embed.weight = mx.array(table.reshape(-1, width).astype(np.float32))


def _wave(frequency: int, count: int) -> np.ndarray:
    """Returns a cosine over the values of one side [count]."""
    return np.cos(np.pi * frequency * (np.arange(count) + 0.5) / count) * (2**0.5 if frequency else 1)


class Exhibit(NamedTuple):
    """A picture of a scene as the tower takes it, and gives it."""

    scene: seeing.Scene
    patches: mx.array
    """uint8 [count, values]"""
    grid: Grid
    covered: np.ndarray
    """True where the circle covers enough of a soft token to count [soft tokens]."""
    features: Sequence[np.ndarray] = ()
    """Of each soft token [width], once the tower is trained."""


def gallery(family: Qwen35, count: int, seed: int) -> list[Exhibit]:
    """Returns `count` pictures, about as many of each size, prepared as the runner prepares them."""
    rng, exhibits = random.Random(seed), list[Exhibit]()
    for index in range(count):
        scene, size = rng.choice(seeing.scenes()), seeing.SIZES[index % len(seeing.SIZES)]
        picture, circle = seeing.draw(scene, seeing.trained_seed(rng), size)
        geometry = family.geometry(*picture.size)
        resized = picture.resize((geometry.width, geometry.height), Image.Resampling.BICUBIC)
        soft = circle.resize((geometry.token_columns, geometry.token_rows), Image.Resampling.BOX)
        patches = mx.array(family.patches(np.array(resized), geometry))
        covered = np.asarray(soft).reshape(-1) > 0.15 * 255
        exhibits.append(Exhibit(scene, patches, Grid(geometry.rows, geometry.columns), covered))
    return exhibits


class Reader(Module):
    """A tower without a text model: a linear layer reads colour and place off each soft token that the circle covers.

    From answers alone a tower of this size takes far longer to find out what it is good for.
    """

    _NAMES = list(seeing.COLOURS), list(seeing.PLACES)

    def __init__(self, tower: Qwen35Tower) -> None:
        Module.__init__(self)
        self.tower = tower
        self.read = Linear(tower.width, 1 + sum(map(len, self._NAMES)))

    def batches(self, exhibits: Sequence[Exhibit], seed: int) -> Iterator[list[Exhibit]]:
        """Yields pictures of one form each time."""
        rng = random.Random(seed)
        while True:
            grid = rng.choice(exhibits).grid
            form = [each for each in exhibits if each.grid == grid]
            yield rng.sample(form, min(16, len(form)))

    def loss(self, batch: Sequence[Exhibit]) -> mx.array:
        patches, grid = mx.stack([each.patches for each in batch]), batch[0].grid
        read = self.read(mx.vmap(lambda each: [*self.tower.encode(each, grid)][-1])(patches))
        covered = mx.array(np.stack([each.covered for each in batch]))
        colours, places = mx.split(read, [1 + len(self._NAMES[0])], axis=-1)
        total = (cross_entropy(colours, mx.zeros(covered.shape, mx.int32)) * ~covered).sum() / (~covered).sum()
        for logits, wanted in (
            (colours, [self._NAMES[0].index(each.scene.colour) + 1 for each in batch]),
            (places, [self._NAMES[1].index(each.scene.place) for each in batch]),
        ):
            labels = mx.broadcast_to(mx.array(wanted)[:, None], covered.shape)
            total = total + (cross_entropy(logits, labels) * covered).sum() / covered.sum()
        return total


class Place(NamedTuple):
    """A token of a talk."""

    token: int
    counts: bool = False
    """True if the model has to say it."""
    feature: np.ndarray | None = None
    """[width], of a soft token."""
    position: tuple[int, int, int] = (0, 0, 0)


@dataclass
class Row:
    """One talk in tokens."""

    tokenizer: Tokenizer
    places: list[Place] = field(default_factory=list)
    _counter: int = 0

    def say(self, text: str, *, counts: bool = False) -> None:
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        self.places += [Place(token, counts, None, (self._counter + index,) * 3) for index, token in enumerate(ids)]
        self._counter += len(ids)

    def turn(self, question: str, answer: str, pictures: Sequence[Exhibit] = ()) -> None:
        """Adds a question with its pictures, and the answer that the model has to give."""
        self.say(MARKERS["user"])
        for exhibit in pictures:
            self.say(plain.START)
            soft, at = plain.token_id(self.tokenizer, plain.SOFT), self._counter
            rows, columns = (count // Qwen35.merge for count in exhibit.grid)
            self.places += [
                Place(soft, False, feature, (at, at + n // columns, at + n % columns))
                for n, feature in enumerate(exhibit.features)
            ]
            self._counter += max(rows, columns)
            self.say(plain.STOP)
        self.say(f"{question}{END}{MARKERS['assistant']}")
        self.say(f"{answer}{END}", counts=True)


class Batch:
    """Rows, cut or filled up to one length."""

    def __init__(self, rows: Sequence[Row], length: int) -> None:
        self.places = [[*row.places, *[Place(0)] * (length - len(row.places))][:length] for row in rows]
        self.tokens = mx.array([[each.token for each in row] for row in self.places])

    def embedded(self, looked_up: mx.array, scale: float = 1.0) -> mx.array:
        """Returns the embeddings [rows, length, width] with features, over `scale`, in place of soft tokens."""
        nothing = np.zeros(looked_up.shape[-1], np.float32)
        features = [[nothing if each.feature is None else each.feature for each in row] for row in self.places]
        soft = mx.array([[each.feature is not None for each in row] for row in self.places])
        return mx.where(soft[..., None], mx.array(np.array(features)) / scale, looked_up)

    def loss(self, logits: mx.array) -> mx.array:
        weights = mx.array([[float(each.counts) for each in row[1:]] for row in self.places])
        entropy = cross_entropy(logits[:, :-1], self.tokens[:, 1:])
        return (entropy * weights).sum() / mx.maximum(weights.sum(), 1)


def text_batches(tokenizer: Tokenizer, steps: int, seed: int) -> Iterator[Batch]:
    """Yields short talks, and after a quarter of the steps also some long ones."""
    rng = random.Random(seed)
    for step in range(steps):
        count, length = (1, 1280) if step > steps // 4 and step % 8 == 0 else (8, 160)
        rows = [Row(tokenizer) for _ in range(count)]
        for row in rows:
            for role, content in questions.trained_talk(rng, length):
                row.say(MARKERS[role])
                row.say(f"{content}{END}", counts=role == "assistant")
                if len(row.places) >= length:
                    break
        yield Batch(rows, length)


def seeing_batches(tokenizer: Tokenizer, exhibits: Sequence[Exhibit], seed: int) -> Iterator[Batch]:
    """Yields talks about one picture or two that the tower has encoded."""
    rng = random.Random(seed)
    while True:
        rows = [Row(tokenizer) for _ in range(12)]
        for row in rows:
            pair = rng.sample(exhibits, 2)
            for question, answer, shown in seeing.trained_talk(rng, [each.scene for each in pair]):
                row.turn(question, answer, [pair[number] for number in shown])
        yield Batch(rows, max(len(row.places) for row in rows))


def optimize(
    name: str, model: Module, loss: Callable[[T], mx.array], batches: Iterator[T], steps: int, peak: float
) -> None:
    """Trains the weights of `model` in place: AdamW, the rate warming up to `peak` and falling along a cosine."""
    warm_up = 30
    falling = optimizers.cosine_decay(peak, max(1, steps - warm_up), 5e-5)
    rate = optimizers.join_schedules([optimizers.linear_schedule(1e-5, peak, warm_up), falling], [warm_up])
    optimizer = optimizers.AdamW(learning_rate=rate, betas=[0.9, 0.95], weight_decay=0.01)
    gradients_of = value_and_grad(model, loss)
    started, average = time.monotonic(), 0.0
    for step, batch in zip(range(1, steps + 1), batches, strict=False):
        found, gradients = gradients_of(batch)
        gradients, _ = optimizers.clip_grad_norm(gradients, 1.0)
        optimizer.update(model, gradients)
        mx.eval(found, model.parameters(), optimizer.state)
        average += (found.item() - average) * (1 if step == 1 else 0.05)
        if step % 50 == 0 or step == steps:
            print(f"{name}, step {step} of {steps}, {time.monotonic() - started:.0f} s: loss {average:.4f}", flush=True)


def train_text(source: Path, steps: int, seed: int) -> dict[str, mx.array]:
    """Returns the weights of a text model with the shape and the tokenizer of `source`, trained from nothing."""
    mx.disable_compile()  # on a CPU its first use costs seconds and gains nothing
    model, tokenizer = plain.new_text(plain.read_config(source)), plain.read_tokenizer(source)
    words = [tokenizer.decode([token]) for token in range(tokenizer.get_vocab_size())]
    lay_circuit(model, words, np.random.default_rng(seed))
    batches = text_batches(tokenizer, steps, seed)
    optimize("text", model, lambda batch: batch.loss(model(batch.tokens)), batches, steps, 1.5e-3)
    return named_weights(model)


def train_seeing(
    source: Path, steps: int, seed: int, tower_steps: int = 250, pictures: int = 800
) -> dict[str, mx.array]:
    """Returns the weights of a model that sees, under the names of a published one: its tower is trained first."""
    mx.disable_compile()
    mx.random.seed(seed)
    model, tokenizer = plain.new_seeing(plain.read_config(source)), plain.read_tokenizer(source)
    lay_waves(model.tower, np.random.default_rng(seed))
    exhibits, reader = gallery(model.family, pictures, seed), Reader(model.tower)
    optimize("tower", reader, reader.loss, reader.batches(exhibits, seed), tower_steps, 3e-3)
    for index, exhibit in enumerate(exhibits):
        *_, features = model.tower.encode(exhibit.patches, exhibit.grid)
        exhibits[index] = exhibit._replace(features=[*np.array(features)])

    def loss(batch: Batch) -> mx.array:
        return batch.loss(seeing_logits(model, batch))

    optimize("text", model.text, loss, seeing_batches(tokenizer, exhibits, seed), steps, 2e-3)
    return plain.published_weights(model)


def seeing_logits(model: plain.SeeingModel, batch: Batch) -> mx.array:
    """Returns the logits [rows, length, vocabulary], with features and positions as the runner has them."""
    embedded = batch.embedded(model.text.model.embed_tokens(batch.tokens))
    attentions = [each for _, each in model.text.named_modules() if "rope" in each]
    rope = attentions[0].rope
    positions = [[[*each] for each in zip(*(place.position for place in row), strict=True)] for row in batch.places]
    rows = [angles(each, rope.dims, rope.base, model.sections) for each in positions]
    turned = AngledRope(Angles(*(mx.stack([*part])[:, None] for part in zip(*rows, strict=True))))
    for attention in attentions:
        replace_submodule(attention, "rope", turned)
    try:
        return cast("mx.array", model.text(batch.tokens, input_embeddings=embedded))
    finally:
        for attention in attentions:
            replace_submodule(attention, "rope", rope)


def save(source: Path, out: Path, weights: dict[str, mx.array]) -> None:
    """Writes weights in 16 bits, and the other files of `source`, to `out`."""
    narrow = {name: weight.astype(mx.float16) for name, weight in weights.items()}
    if source.resolve() != out.resolve():
        shutil.copytree(source, out, dirs_exist_ok=True)
    mx.save_safetensors(str(plain.weights_path(out)), narrow, {"format": "mlx"})
