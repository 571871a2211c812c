"""Greedy answers of the model that sees, by mlx-lm's class, the tower and the hooks of runner/model/pictures alone."""

from collections.abc import Sequence
from typing import cast

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from tokenizers import Tokenizer

from runner.media.picture import decode, read_header
from runner.media.prompt import Marker, Picture, PicturePrompt, split_markers
from runner.model.pictures.embedding import Rows
from runner.model.pictures.forward import PictureForward
from runner.model.towers import Grid
from scripts.tools.demo.questions import END
from scripts.tools.demo.training.seeing.directory import SeeingModel
from scripts.tools.demo.training.seeing.tokenizer import SOFT, START, STOP, token_id


class Viewer:
    """Asks a model about pictures. No code of the engine takes part, and nothing of a prompt is kept."""

    def __init__(self, model: SeeingModel, tokenizer: Tokenizer) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._forward = PictureForward(model.text, sections=model.sections)
        self._features: dict[bytes, mx.array] = {}

    def answer(self, prompt: str, pictures: Sequence[bytes] = (), limit: int = 24) -> str:
        """Returns the greedy answer, up to the end marker or `limit` tokens."""
        shown = self._prompt(prompt, pictures)
        layers = make_prompt_cache(self._model.text)
        rows = [Rows(start, stop, self._seen(picture)) for start, stop, picture in shown.spans]
        positions = shown.positions(0, len(shown.ids)) if rows else None
        found = self._forward(
            shown.ids, layers, rows, positions, lambda tokens, layers: self._model.text(tokens, cache=layers)
        )
        tokens: list[int] = []
        with self._forward.shifted([shown.shift]):
            while len(tokens) < limit:
                token = cast("int", mx.argmax(found[0, -1]).item())
                if token == self._tokenizer.token_to_id(END):
                    break
                tokens.append(token)
                found = self._model.text(mx.array([[token]]), cache=layers)
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))

    def _prompt(self, prompt: str, pictures: Sequence[bytes]) -> PicturePrompt:
        start, soft, stop = (token_id(self._tokenizer, token) for token in (START, SOFT, STOP))
        parts: list[list[int] | Picture] = []
        for part in split_markers(prompt) if pictures else [prompt]:
            if isinstance(part, Marker):
                header = read_header(pictures[part.id])
                geometry = self._model.family.geometry(header.width, header.height)
                parts += [[start], Picture(pictures[part.id], header, geometry, -1 - part.id), [stop]]
            else:
                parts.append(self._tokenizer.encode(part, add_special_tokens=False).ids)
        return PicturePrompt(parts, soft, mrope=True)

    def _seen(self, picture: Picture) -> mx.array:
        if picture.data not in self._features:
            geometry = picture.geometry
            pixels = decode(picture.data, picture.header, geometry.width, geometry.height)
            patches = mx.array(self._model.family.patches(pixels, geometry))
            *_, self._features[picture.data] = self._model.tower.encode(patches, Grid(geometry.rows, geometry.columns))
            mx.eval(self._features[picture.data])
        return self._features[picture.data]
