"""The training of the model that sees, from nothing."""

from typing import NamedTuple

import mlx.core as mx
from tokenizers import Tokenizer

from scripts.tools.demo.training.directory import named_weights
from scripts.tools.demo.training.seeing.dialogues import Seen
from scripts.tools.demo.training.seeing.directory import SeeingModel, new_config, new_model
from scripts.tools.demo.training.seeing.gallery import gallery
from scripts.tools.demo.training.seeing.text import train_text
from scripts.tools.demo.training.seeing.tokenizer import train_tokenizer
from scripts.tools.demo.training.seeing.tower import train_tower

_PICTURES = 800


class Steps(NamedTuple):
    """The numbers of steps of both parts."""

    tower: int
    text: int


class Trained(NamedTuple):
    """All that is saved."""

    model: SeeingModel
    tokenizer: Tokenizer
    config: dict[str, object]


def train(steps: Steps, seed: int, pictures: int = _PICTURES) -> Trained:
    """Trains the tower, lets it encode `pictures` pictures, and trains the text model on what it sees."""
    mx.random.seed(seed)
    tokenizer = train_tokenizer()
    config = new_config(tokenizer)
    model = new_model(config)
    mx.eval(named_weights(model.text), named_weights(model.tower))
    parameters = sum(weight.size for part in (model.text, model.tower) for weight in named_weights(part).values())
    print(f"{parameters:,} parameters, vocabulary {tokenizer.get_vocab_size()}", flush=True)
    exhibits = gallery(model.family, pictures, seed)
    train_tower(model.tower, exhibits, steps.tower, seed)
    seen = []
    for exhibit in exhibits:
        *_, features = model.tower.encode(exhibit.patches, exhibit.grid)
        mx.eval(features)
        seen.append(Seen(exhibit, features))
    train_text(model.text, tokenizer, seen, model.sections, steps.text, seed)
    return Trained(model, tokenizer, config)
