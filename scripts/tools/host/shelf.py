"""The models that a host serves: found by name, loaded under one name each, with their chat templates."""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from scripts.tools.host.go_json import Body, RefusedError, options_of
from scripts.tools.host.lib import Host, Loaded
from scripts.tools.host.models import Catalog, Model
from scripts.tools.host.template import ChatTemplate, Renderer


class Shelf:
    """Finds the models of `catalog` and has `host` run them."""

    def __init__(self, host: Host, catalog: Catalog) -> None:
        self.host = host
        self.catalog = catalog
        self.models: dict[str, Model] = {}
        """The models that were loaded, by the argument of their runners."""
        self.renderer = Renderer()
        self._templates: dict[str, ChatTemplate] = {}

    def find(self, name: str) -> Model:
        model = self.catalog.find(name) if name else None
        if model is None:
            raise RefusedError(404, f"model '{name}' not found")
        return model

    def argument(self, model: Model) -> str:
        """Returns the name of its runner: the first one under which this digest was loaded."""
        for loaded in self.host.loaded:
            if self.models[loaded.model].digest == model.digest:
                return loaded.model
        self.models[model.argument] = model
        return model.argument

    @asynccontextmanager
    async def runner(self, model: Model, body: Body, keep_alive_s: float | None = None) -> AsyncIterator[Loaded]:
        """One request's use of a model, with the options in its body. Raises `LoadError`, `RefusedError`."""
        num_ctx = options_of(body, self.host.generation).get("num_ctx", 0)
        size = num_ctx if isinstance(num_ctx, int) else 0
        async with self.host.runner(self.argument(model), keep_alive_s=keep_alive_s, num_ctx=size) as loaded:
            yield loaded

    def template(self, model: Model) -> ChatTemplate:
        if model.digest not in self._templates:
            template = self._templates[model.digest] = ChatTemplate(model, self.renderer)
            if template.source is None:
                print(f"{model.name} has no chat template: roles are spelled out as words", file=sys.stderr)
        return self._templates[model.digest]
