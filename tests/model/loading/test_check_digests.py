"""`--verify` compares the content of every used blob with its name."""

import logging
import re
import shutil
import threading
from contextlib import AbstractContextManager
from io import BufferedReader
from pathlib import Path

import pytest

from runner.commands.check import digests
from runner.errors import ModelError
from runner.model import OpenedModel
from runner.model.sources.checkpoint import File, raise_fault
from runner.model.sources.safetensors import open_file
from scripts.tools.models.store import JSON, TENSOR, Store
from tests.model.loading.conftest import bytes_read, checked, open_stored
from tests.model.loading.malformed import WEIGHT, flip, with_manifest, zeros

OTHER = "model.layers.1.mlp.up_proj.weight"


def verify(opened: OpenedModel) -> None:
    digests.verify_digests(opened.checkpoint, opened.tensors.values())


def told(caplog: pytest.LogCaptureFixture) -> list[tuple[str, dict[str, object]]]:
    return [(record.getMessage(), record.__dict__["attributes"]) for record in caplog.records]


def test_a_sound_store_is_verified_each_blob_once(
    store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_manifest(layers=[*store.layers, store.layer(WEIGHT)])(store)
    opened = open_stored(store)
    hashed: list[Path] = []

    def opened_file(path: Path, size_bytes: int | None) -> AbstractContextManager[tuple[BufferedReader, int]]:
        hashed.append(path)
        return open_file(path, size_bytes)

    monkeypatch.setattr(digests, "open_file", opened_file)
    with caplog.at_level(logging.INFO, digests.__name__):
        verify(opened)
    blobs = sorted((store.models_dir / "blobs").iterdir())
    assert sorted(hashed) == blobs
    ((message, attributes),) = told(caplog)
    assert message == "verified"
    assert attributes["blobs"] == len(blobs)
    assert attributes["bytes"] == sum(path.stat().st_size for path in blobs)


@pytest.mark.parametrize("name", [WEIGHT, "preprocessor_config.json"])
def test_a_changed_blob_is_told_with_both_digests_and_its_path(name: str, store: Store) -> None:
    store.put("preprocessor_config.json", b"{ }", JSON)
    opened = open_stored(store)
    flip(name)(store)
    path = store.blob_of(name)
    with pytest.raises(ModelError) as refused:
        verify(opened)
    assert re.fullmatch(
        rf"digest mismatch, file must be downloaded again: want {store.layer(name)['digest']}, "
        rf"got sha256:[0-9a-f]{{64}}: {name} in {path}",
        str(refused.value),
    )


def test_what_is_not_used_is_not_verified(store: Store) -> None:
    """Reading it would be useless."""
    store.put_tensors("v", {"vision_tower.patch_embed.weight": zeros("F32", 8, 8)})
    store.put("draft.model.norm.weight", b"not even opened", TENSOR)
    store.put("draft/config.json", b"{ }", JSON)
    for name in ("v", "draft.model.norm.weight", "draft/config.json"):
        flip(name)(store)
    verify(open_stored(store))


def test_check_tells_of_every_changed_blob_and_of_each_fault_once(store: Store) -> None:
    """Blobs of the wrong size and missing ones are reported before."""
    store.put("preprocessor_config.json", b"{ }", JSON)
    changed = (WEIGHT, OTHER, "preprocessor_config.json")
    for name in changed:
        flip(name)(store)
    store.blob_of("model.norm.weight").write_bytes(b"short")
    store.blob_of("tokenizer.json").unlink()
    problems = checked("tiny", store.models_dir, verify=True).problems
    assert len(problems) == len(changed) + 2
    for name in (*changed, "model.norm.weight", "tokenizer.json"):
        (problem,) = (problem for problem in problems if store.blob_of(name).name in problem)
        assert problem.startswith("digest mismatch, ") == (name in changed)


def test_two_blobs_are_hashed_at_a_time(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reader waits until another one has a file open too."""
    opened = open_stored(store)
    meeting = threading.Barrier(2, timeout=20)
    met = threading.Event()

    def open_together(path: Path, size_bytes: int | None) -> AbstractContextManager[tuple[BufferedReader, int]]:
        if not met.is_set():
            meeting.wait()
            met.set()
        return open_file(path, size_bytes)

    monkeypatch.setattr(digests, "open_file", open_together)
    verify(opened)
    assert met.is_set()


def test_after_the_first_mismatch_nothing_more_is_hashed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the rest of a large model would be useless."""
    large = store.models_dir / "blobs" / f"sha256-{'1' * 64}"
    with large.open("wb") as file:
        file.truncate(1 << 36)
    flip(WEIGHT)(store)
    opened = open_stored(store)
    text_blobs = {**opened.checkpoint.text_blobs, "large": File(large)}
    checkpoint = opened.checkpoint._replace(text_blobs=text_blobs)
    before = bytes_read()
    with pytest.raises(ModelError, match="digest mismatch"):
        digests.verify_digests(checkpoint, opened.tensors.values(), raise_fault)
    assert bytes_read() - before < 1 << 33, "the rest was read"
    shutil.rmtree(store.models_dir)
