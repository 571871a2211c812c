"""What `mlx-runner check` says about the directory of the disk cache."""

import os
from pathlib import Path

from runner.disk.wing import DiskFacts, disk_facts
from tests.unit.disk.made import NAMESPACE, segment, store


def test_a_directory_is_listed_by_model(tmp_path: Path) -> None:
    tokens = list(range(40))
    opened = store(tmp_path)
    for stop in (30, 40):
        opened.publish(segment(tokens, 0, stop))
    (tmp_path / "photos").mkdir()
    broken = tmp_path / NAMESPACE.replace("0", "1")
    broken.mkdir()
    (broken / "about.json").write_text("{")
    piped, large = (tmp_path / NAMESPACE.replace("0", number) / "about.json" for number in "23")
    for path in (piped, large):
        path.parent.mkdir()
    os.mkfifo(piped)
    large.write_bytes(bytes(1 << 20))
    facts = disk_facts(tmp_path)
    (model,) = facts.models
    size = sum(path.stat().st_size for path in opened.folder.iterdir())
    assert (model.name, model.folder, model.files, model.bytes) == ("tiny", NAMESPACE, 3, size)
    assert facts.text == f"{tmp_path}: tiny, {size / 1e3:.1f} KB in 3 files ({NAMESPACE})"


def test_an_empty_one_and_a_missing_one(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "nothing"):
        assert disk_facts(directory) == DiskFacts(directory=str(directory), models=[])
    assert DiskFacts(directory="/kept", models=[]).text == "/kept: empty"
