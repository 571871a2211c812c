"""The demo models by mlx-lm's classes and plain loops: no code of the engine takes part, and nothing is kept.

So a wrong answer of the runner is the engine's. The trainer evaluates with these as well.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from tokenizers import Tokenizer

import runner.process.lean_mlx_lm  # noqa: F401  makes mlx_lm.models importable without mlx_lm's own start-up
from runner.media.families import Qwen35
from runner.media.forward import FeatureRows, MediaForward
from runner.media.header import read_picture_header
from runner.media.picture import decode_picture
from runner.media.prompt import Item, Marker, MediaPrompt, Picture, split_markers
from runner.media.sound import decode_sound
from runner.media.sound_header import read_sound_header
from runner.media.towers import Grid
from runner.media.towers.gemma4 import free_but
from runner.media.towers.gemma4_sound import Gemma4SoundTower
from runner.media.towers.qwen3_5 import Qwen35Tower
from scripts.tools.demo import hearing, seeing
from scripts.tools.demo.questions import CONVERSATIONS, END

# isort: split
from mlx_lm.models import gemma4_text, llama, qwen3_5
from mlx_lm.models.cache import KVCache, make_prompt_cache

START, SOFT, STOP = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
"""The tokens around a picture, and that of its features."""


HEARD_START, HEARD, HEARD_STOP = "<|audio_start|>", "<|audio_pad|>", "<|audio_end|>"
"""The same of a sound."""


class HearingModel(NamedTuple):
    """Text model and tower for sound."""

    text: gemma4_text.Model
    tower: Gemma4SoundTower


class SeeingModel(NamedTuple):
    """Text model and tower, and what config.json says about both."""

    text: qwen3_5.Model
    tower: Qwen35Tower
    family: Qwen35
    sections: list[int]
    """The numbers of frequencies that turn by time, row and column."""


def read_config(directory: Path) -> dict[str, object]:
    config: dict[str, object] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return config


def read_tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def token_id(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    assert found is not None
    return found


def weights_path(directory: Path) -> Path:
    return directory / "model.safetensors"


def wide_weights(directory: Path) -> dict[str, mx.array]:
    """Returns the saved weights as float32."""
    stored = cast("dict[str, mx.array]", mx.load(str(weights_path(directory))))
    return {name: weight.astype(mx.float32) for name, weight in stored.items()}


def named_weights(model: Module) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


def new_text(config: Mapping[str, object]) -> llama.Model:
    """Returns a text model of `config`'s shape, whose weights are MLX's random ones."""
    return llama.Model(llama.ModelArgs.from_dict(dict(config)))


def new_seeing(config: Mapping[str, object]) -> SeeingModel:
    """Returns a model that sees of `config`'s shape, whose weights are MLX's random ones."""
    text = cast("dict[str, dict[str, list[int]]]", config["text_config"])
    return SeeingModel(
        qwen3_5.Model(qwen3_5.ModelArgs.from_dict(dict(config))),
        Qwen35Tower(config),
        Qwen35.from_config(config, {}),
        text["rope_parameters"]["mrope_section"],
    )


def new_hearing(config: Mapping[str, object]) -> HearingModel:
    """Returns a model that hears of `config`'s shape, whose weights are MLX's random ones."""
    text = cast("dict[str, object]", config["text_config"])
    tower = Gemma4SoundTower(config)
    free_but((), tower)
    return HearingModel(gemma4_text.Model(gemma4_text.ModelArgs.from_dict(text)), tower)


def load_hearing(directory: Path) -> tuple[HearingModel, Tokenizer]:
    """Returns the saved model that hears, its weights cast to float32, and its tokenizer."""
    model, wide = new_hearing(read_config(directory)), wide_weights(directory)
    text = {name.replace("model.language_model.", "model."): each for name, each in wide.items() if "audio" not in name}
    model.text.load_weights([*text.items()])
    heard = {name: weight for stored, weight in wide.items() if (name := Gemma4SoundTower.parameter_name(stored))}
    model.tower.load_weights([*model.tower.sanitize(heard).items()])
    return model, read_tokenizer(directory)


def published_hearing(model: HearingModel) -> dict[str, mx.array]:
    """Returns the weights of a model that hears under the names of a published Gemma 4."""
    weights = {
        re.sub(r"^model\.", "model.language_model.", name): each for name, each in named_weights(model.text).items()
    }
    for name, weight in named_weights(model.tower).items():
        root = "embed_audio" if name.startswith("embedding_projection") else "audio_tower"
        weights[f"model.{root}.{name}"] = weight
    return weights


def load_text(directory: Path) -> tuple[llama.Model, Tokenizer]:
    """Returns the saved model, its 16-bit weights cast to float32 (fast on every CPU), and its tokenizer."""
    model = new_text(read_config(directory))
    model.load_weights([*wide_weights(directory).items()])
    return model, read_tokenizer(directory)


def load_seeing(directory: Path) -> tuple[SeeingModel, Tokenizer]:
    """Returns the saved model that sees, its weights cast to float32, and its tokenizer."""
    model, wide = new_seeing(read_config(directory)), wide_weights(directory)
    model.text.load_weights([*model.text.sanitize(wide).items()])
    seen = {name: weight for stored, weight in wide.items() if (name := Qwen35Tower.parameter_name(stored))}
    model.tower.load_weights([*model.tower.sanitize(seen).items()])
    return model, read_tokenizer(directory)


def published_weights(model: SeeingModel) -> dict[str, mx.array]:
    """Returns the weights of a model that sees under the names, and in the forms, of a published Qwen 3.5."""
    weights = {}
    for name, weight in named_weights(model.text).items():
        if name.endswith("conv1d.weight"):
            weight = weight.moveaxis(2, 1)  # [channels, 1, width]
        elif re.search(r"(layernorm|model\.norm|[qk]_norm)\.weight$", name):
            weight = weight - 1
        weights[re.sub(r"^language_model\.model\.", "model.language_model.", name)] = weight
    tower = model.tower
    for name, weight in named_weights(tower).items():
        stored = re.sub(r"^((?:blocks\.\d+\.mlp|merger)\.)fc", r"\1linear_fc", name)
        if name == "patch_embed.weight":  # a patch counts for two moments in time, half in each
            sides = (tower.times, tower.patch, tower.patch)
            halves = weight.reshape(-1, 3, 1, *sides[1:]) / tower.times
            weight = mx.broadcast_to(halves, (weight.shape[0], 3, *sides))
        weights[f"model.visual.{re.sub('^patch_embed', 'patch_embed.proj', stored)}"] = weight
    return weights


def answer(
    model: llama.Model, tokenizer: Tokenizer, prompt: str, limit: int = 120, cache: list[KVCache] | None = None
) -> str:
    """Returns the greedy answer to `prompt` after what `cache` holds, up to the end marker or `limit` tokens."""
    cache = cache or make_prompt_cache(model)
    logits = model(mx.array([tokenizer.encode(prompt, add_special_tokens=False).ids]), cache=cache)
    return _continue(model, tokenizer, logits, limit, cache)


class Viewer:
    """Asks a model that sees about pictures, by the tower and the hooks of runner/media/forward.py alone."""

    def __init__(self, model: SeeingModel, tokenizer: Tokenizer) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._forward = MediaForward(model.text, sections=model.sections)
        self._features: dict[bytes, mx.array] = {}

    def answer(self, prompt: str, pictures: Sequence[bytes] = (), limit: int = 24) -> str:
        """Returns the greedy answer, up to the end marker or `limit` tokens."""
        shown, text = self._prompt(prompt, pictures), self._model.text
        layers = make_prompt_cache(text)
        rows = [FeatureRows(start, stop, self._seen(picture)) for start, stop, picture in shown.spans]
        positions = shown.positions(0, len(shown.ids)) if rows else None
        logits = self._forward(shown.ids, layers, rows, positions, lambda tokens, layers: text(tokens, cache=layers))
        with self._forward.shifted([shown.shift]):
            return _continue(text, self._tokenizer, logits, limit, layers)

    def _prompt(self, prompt: str, pictures: Sequence[bytes]) -> MediaPrompt:
        start, soft, stop = (token_id(self._tokenizer, token) for token in (START, SOFT, STOP))
        parts: list[list[int] | Picture] = []
        for part in split_markers(prompt) if pictures else [prompt]:
            if isinstance(part, Marker):
                header = read_picture_header(pictures[part.id])
                geometry = self._model.family.geometry(header.width, header.height)
                parts += [
                    [start],
                    Picture(data=pictures[part.id], header=header, geometry=geometry, name=-1 - part.id),
                    [stop],
                ]
            else:
                parts.append(self._tokenizer.encode(part, add_special_tokens=False).ids)
        return MediaPrompt(parts, soft, mrope=True)

    def _seen(self, picture: Item) -> mx.array:
        assert isinstance(picture, Picture)
        if picture.data not in self._features:
            geometry = picture.geometry
            pixels = np.asarray(decode_picture(picture.data, picture.header, geometry.width, geometry.height))
            patches = mx.array(self._model.family.patches(pixels, geometry))
            *_, self._features[picture.data] = self._model.tower.encode(patches, Grid(geometry.rows, geometry.columns))
            mx.eval(self._features[picture.data])
        return self._features[picture.data]


class Hearer:
    """Asks a model that hears about sounds, by the tower and the hooks of runner/media/forward.py alone."""

    def __init__(self, model: HearingModel, tokenizer: Tokenizer) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._forward = MediaForward(model.text)

    def answer(self, prompt: str, sounds: Sequence[bytes] = (), limit: int = 48) -> str:
        """Returns the greedy answer, up to the end marker or `limit` tokens."""
        text, ids, rows = self._model.text, list[int](), list[FeatureRows]()
        start, soft, stop = (token_id(self._tokenizer, token) for token in (HEARD_START, HEARD, HEARD_STOP))
        for part in split_markers(prompt) if sounds else [prompt]:
            if isinstance(part, Marker):
                features = self._heard(sounds[part.id])
                rows.append(FeatureRows(len(ids) + 1, len(ids) + 1 + len(features), features, one_way=True))
                ids += [start, *[soft] * len(features), stop]
            else:
                ids += self._tokenizer.encode(part, add_special_tokens=False).ids
        layers = make_prompt_cache(text)
        logits = self._forward(ids, layers, rows, None, lambda tokens, layers: text(tokens, cache=layers))
        return _continue(text, self._tokenizer, logits, limit, layers)

    def _heard(self, data: bytes) -> mx.array:
        header = read_sound_header(data)
        lengths, rows = decode_sound(data[header.start : header.stop], header, 0)
        *_, features = self._model.tower.encode(mx.array(rows), lengths)
        mx.eval(features)
        return features


def _continue(
    model: llama.Model | qwen3_5.Model | gemma4_text.Model,
    tokenizer: Tokenizer,
    logits: mx.array,
    limit: int,
    cache: list[KVCache],
) -> str:
    """Returns the greedy answer after a prompt's `logits` [1, L, vocabulary]."""
    end, tokens = tokenizer.token_to_id(END), list[int]()
    while len(tokens) < limit:
        token = mx.argmax(logits[0, -1])
        if token.item() == end:
            break
        tokens.append(int(token))
        logits = model(token.reshape(1, 1), cache=cache)
    return str(tokenizer.decode(tokens, skip_special_tokens=False))


def is_good(directory: Path) -> bool:
    """Asks a model all that the demo asks and prints what it gets wrong. Returns True if that is nothing."""
    ask: Callable[[str, Sequence[bytes]], str]
    if "audio_config" in read_config(directory):
        ask, known = Hearer(*load_hearing(directory)).answer, hearing.known_looks()
    elif "vision_config" in read_config(directory):
        ask, known = Viewer(*load_seeing(directory)).answer, seeing.known_looks()
    else:
        model, tokenizer = load_text(directory)
        ask = lambda prompt, _: answer(model, tokenizer, prompt)  # noqa: E731
        known = [
            seeing.Look(talk.prompt(turn), (), said.answer)
            for talk in CONVERSATIONS
            for turn, said in enumerate(talk.turns)
        ]
    answers = [(right, ask(prompt, pictures)) for prompt, pictures, right in known]
    wrong = [f"  {right!r} is answered {given!r}" for right, given in answers if given != right]
    print("\n".join([*wrong, f"{len(wrong)} of {len(known)} answers of the demo are wrong"]))
    return not wrong
