"""Models of mlx-vlm in processes of their own: with hosts, with a disk, and with what a host is refused."""

from functools import partial
from pathlib import Path

import pytest

from scripts.tools.conformance.cases import run
from scripts.tools.conformance.models import SEEING
from scripts.tools.conformance.pictures import PICTURES, cached, scores
from scripts.tools.conformance.runners import Runners
from scripts.tools.conformance.this_runner import RUNNER
from scripts.tools.host.lib import Client, Medium, Process, Request, StatusError, spawn
from scripts.tools.host.lib.generations import F, H
from scripts.tools.models import vlm_seeing
from scripts.tools.models.png import png
from scripts.tools.models.store import write_store
from tests.process.conftest import written
from tests.tools.scripts.test_host_process import BLUE, RED, ask, served
from tests.vlm.pictures import FIVE

FEW = {"num_predict": 5, "temperature": 0}
HOSTED = ("qwen3_vl", "gemma3", "smolvlm")
SHOWN = (Medium(png(150, 60, (220, 20, 30))), Medium(png(96, 64, (20, 30, 220))))
LONG = "so many words about zebras " * 14


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a directory for each of five models, and a store with the same."""
    root = tmp_path_factory.mktemp("models")
    for package in FIVE:
        write_store(root / "store", package, vlm_seeing.write(package, root / package))
    return root


# --- restarts


async def told(process: Process, prompt: str, *media: Medium) -> tuple[list[float], int]:
    """Returns the scores of an answer, and the tokens of its prompt that the process found on disk; kills the process
    when all is written."""
    async with Client.of(process) as client:
        found = await client.complete(Request(prompt, FEW, logprobs=True, media=media))
        await written(client)
    process.kill()
    return scores(found), cached(found)


@pytest.mark.parametrize("package", FIVE)
async def test_a_conversation_about_pictures_survives_its_process(package: str, models: Path, tmp_path: Path) -> None:
    """And a prompt with the pictures swapped takes nothing of them from the disk."""
    start = partial(
        spawn, RUNNER, package, models_dir=models / "store", generation=F, arguments=["--disk-cache", str(tmp_path)]
    )
    prompt, swapped = f"{LONG} [img-0] and [img-1]. {LONG} What?", SHOWN[::-1]
    all_scores = []
    for media, least, most in ((SHOWN, 0, 0), (SHOWN, 600, 1000), (swapped, 300, 400), (swapped, 600, 1000)):
        with start() as process:
            process.wait_ready(60)
            found, restored = await told(process, prompt, *media)
            assert least <= restored <= most
            all_scores.append(found)
    for first, again in ((0, 1), (2, 3)):
        assert all_scores[again] == pytest.approx(all_scores[first], abs=2e-4)
    assert all_scores[2] != pytest.approx(all_scores[0], abs=2e-4)


# --- hosts


async def test_a_host_of_the_latest_generation_shows_pictures(models: Path) -> None:
    with Runners(RUNNER) as runners:
        write_store(runners.models_dir, SEEING, models / "qwen3_vl")
        for case in PICTURES.cases:
            if case.name != "sound-refused":  # the text is that of a Qwen 3.5
                outcome = await run(case, runners, H)
                assert outcome.mark == "pass", f"{case.id}: {outcome.reason}"


@pytest.mark.parametrize("package", HOSTED)
async def test_a_chat_with_pictures_through_a_host(package: str, models: Path, tmp_path: Path) -> None:
    with served([str(models / package)], tmp_path) as host:
        first = {"role": "user", "content": "What is this?", "images": [RED]}
        plain = {"role": "user", "content": "What is this?"}
        counts = []
        for messages in ([plain], [first]):
            answer = await ask(host, "/api/chat", {"model": package, "messages": messages, "options": FEW})
            assert answer.status == 200, answer
            counts.append(int(str(answer.last["prompt_eval_count"])))
        assert counts[1] > counts[0] + 5
        turn = {"role": "user", "content": "And this?", "images": [BLUE]}
        talk = [first, {"role": "assistant", "content": "Red."}, turn]
        again = await ask(host, "/api/chat", {"model": package, "messages": talk, "options": FEW})
        assert int(str(again.last["prompt_eval_cached_count"])) > counts[0], "the first picture is not read again"


async def test_what_cannot_be_shown_is_refused_with_its_reason(models: Path) -> None:
    with spawn(RUNNER, "qwen3_vl", models_dir=models / "store", generation=F) as process:
        process.wait_ready(60)
        async with Client.of(process) as client:
            for prompt, medium, text in (
                ("[img-0] Hi", Medium(SHOWN[0].data[:60]), "decode image: damaged PNG"),
                ("Hi [img-0][img-1]", SHOWN[0], "invalid image index: 1"),
                ("Hi [img-0]", Medium(b"RIFF\x24\0\0\0WAVEfmt ", "audio"), "qwen3_vl does not support audio input"),
            ):
                with pytest.raises(StatusError, match=f"^{text}") as refusal:
                    await client.complete(Request(prompt, FEW, media=[medium]))
                assert refusal.value.status == 400
    with spawn(RUNNER, "qwen3_vl", models_dir=models / "store", generation=F, arguments=["--no-media"]) as process:
        process.wait_ready(60)
        async with Client.of(process) as client:
            with pytest.raises(StatusError, match="the runner was started with --no-media"):
                await client.complete(Request("Hi [img-0] you", FEW, media=[SHOWN[0]]))
            assert (await client.complete(Request("Hi", FEW))).text is not None
