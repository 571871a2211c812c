"""`--no-media`: a model that sees is served without its tower, and says why it takes no pictures."""

import json
import re

import pytest

from scripts.tools.conformance.models import SEEING
from scripts.tools.host.lib import Client, Medium, Process, Request, StatusError
from scripts.tools.models.png import png
from tests.process.conftest import SpawnModel, read_stats

FEW = {"num_predict": 5}
FOLDED_BYTES = 64 * 3 * 16 * 16 * 4
"""Of the tower's tensors, those for a second picture in time, which are added to those for the first."""
PICTURE = Medium(png(64, 48, (220, 20, 30)))


async def held_bytes(process: Process) -> tuple[int, int]:
    """Returns the memory in the status, and that of the weights, before anything was asked."""
    async with Client.of(process) as client:
        status = json.loads((await client.send("GET", "/v1/status")).body)
        return status["Memory"], (await read_stats(client)).memory.weights_bytes


async def test_without_media_a_model_that_sees_serves_texts_and_saves_its_tower(start: SpawnModel) -> None:
    sees, blind = start(SEEING, ["--draft", "off"]), start(SEEING, ["--no-media", "--draft", "off"])
    (memory, weights), (less_memory, less_weights) = await held_bytes(sees), await held_bytes(blind)
    found = re.search(r'msg="the model sees pictures".* bytes=(\d+)', sees.output.text)
    assert found is not None
    saved = int(found[1]) - FOLDED_BYTES
    assert weights - less_weights == saved > 500_000
    assert memory - less_memory >= saved
    assert "the model sees pictures" not in blind.output.text
    async with Client.of(sees) as client, Client.of(blind) as other:
        text = Request("Tell me", FEW)
        assert (await other.complete(text)).text == (await client.complete(text)).text
        marked = Request("[img-0]", FEW)
        assert (await other.complete(marked)).final.prompt_eval_count == len(await other.tokenize("[img-0]"))
        for prompt in ("[img-0] What is this?", "no marker"):
            with pytest.raises(StatusError) as refusal:
                await other.complete(Request(prompt, FEW, media=[PICTURE]))
            why = "this model does not support image input: the runner was started with --no-media"
            assert (refusal.value.status, str(refusal.value)) == (400, why)
        assert (await client.complete(Request("[img-0]", FEW, media=[PICTURE]))).final.prompt_eval_count > 60
