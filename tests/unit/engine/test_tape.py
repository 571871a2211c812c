"""The file of a recording, and what may be recorded and replayed where."""

import math
import os
from pathlib import Path

import msgspec
import pytest

from runner.errors import RunnerError, UsageError
from runner.model import OpenedModel, open_model
from runner.settings import Settings, flags_of
from runner.sizes import Bound
from runner.tape.file import (
    DECIDING,
    VERSION,
    Identity,
    TapeFile,
    TapeReader,
    check_identity,
    check_recordable,
    header_of,
)
from runner.tape.tape import EntryKind
from scripts.tools.models.scripted import BYTES, write_scripted
from tests.lib.taped_engine import HEADER

ENTRY = (EntryKind.SECONDS, 0.5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> OpenedModel:
    return opened(tmp_path_factory.mktemp("model"), 1)


def opened(directory: Path, step: int) -> OpenedModel:
    """Returns a model that answers with bytes so many steps further."""
    path = write_scripted(directory / "model", BYTES, {byte: (byte + step) % 256 for byte in range(256)}, [ord("z")])
    return open_model(str(path), directory)


def settings_for(model: str, **more: object) -> Settings:
    fixed = {"port": 0, "models_dir": "/nowhere", "cache": "trie", "blas": "off", "blas_threads": 1, "log_level": 20}
    return msgspec.convert({"model": model, "watch_parent": False, **fixed, **more}, Settings, dec_hook=_path)


def _path(kind: type, value: object) -> object:
    return kind(value)


def test_only_its_owner_may_read_a_recording(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        tape = TapeFile(tmp_path / "tape", HEADER)
    finally:
        os.umask(before)
    assert tape.path.stat().st_mode & 0o777 == 0o600
    os.close(tape._file)


def test_no_file_is_overwritten(tmp_path: Path) -> None:
    tapes = [TapeFile(tmp_path / "tape", HEADER) for _ in range(3)]
    assert [tape.path.name for tape in tapes] == ["tape", "tape.2", "tape.3"]
    for tape in tapes:
        os.close(tape._file)


@pytest.mark.parametrize("room", [0, 5, None])
def test_a_full_disk_ends_the_recording_and_nothing_else(
    room: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tape = TapeFile(tmp_path / "tape", HEADER)
    tape.write([ENTRY])
    write = os.write

    def full(file: int, data: bytes) -> int:
        if room is None:
            raise OSError(28, "No space left on device")
        return write(file, data[:room])

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        tape.write([ENTRY, ENTRY])
    tape.write([ENTRY])
    reader = TapeReader(tape.path)
    assert [*reader.entries()] == [ENTRY]
    assert (reader.missing_at is not None) == bool(room)


def test_no_changed_byte_is_read(tmp_path: Path) -> None:
    """Not one: neither of a length, which would look as if the end were missing, nor of a sum or a body."""
    tape = TapeFile(tmp_path / "tape", HEADER)
    for seconds in (1.0, 2.0):
        tape.write([(EntryKind.SECONDS, seconds)])
    data = tape.path.read_bytes()
    for at in range(len(data)):
        tape.path.write_bytes(data[:at] + bytes([data[at] ^ 0x80]) + data[at + 1 :])
        with pytest.raises(RunnerError) as caught:
            TapeReader(tape.path)
        assert "\n" not in str(caught.value)
    os.close(tape._file)


def test_a_file_that_is_cut_is_read_to_its_last_whole_frame(tmp_path: Path) -> None:
    tape = TapeFile(tmp_path / "tape", HEADER)
    ends = [tape.path.stat().st_size]
    for seconds in (1.0, 2.0):
        tape.write([(EntryKind.SECONDS, seconds)])
        ends.append(tape.path.stat().st_size)
    data = tape.path.read_bytes()
    for size in range(len(data)):
        tape.path.write_bytes(data[:size])
        if size < ends[0]:
            with pytest.raises(RunnerError):
                TapeReader(tape.path)
            continue
        reader, whole = TapeReader(tape.path), sum(end <= size for end in ends) - 1
        assert len([*reader.entries()]) == whole
        assert reader.missing_at == (None if size in ends else ends[whole])
    os.close(tape._file)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("cache", value) for value in ("", "both", "trie\n")),
        *(("dtype", value) for value in ("float8", "auto|keep")),
        *(("parallel", value) for value in (0, -1, 65)),
        *(("kv_bits", value) for value in (0, 2, 7, 16)),
        *(("max_gap_s", value) for value in (0.0, -1.0, math.nan, math.inf)),
        *(("memory", {"percent": value}) for value in (-1.0, 101.0, math.nan)),
        *(("cache_memory", {"bytes": value}) for value in (-1, 1 << 63)),
        *(("context_tokens", value) for value in (-1, 1 << 40)),
        *(("draft_tokens", value) for value in (0, 64)),
        *(("prefill_chunk_tokens", value) for value in (0, 1 << 40)),
        *(("blas_threads", value) for value in (0, 1 << 20)),
        ("draft_known", True),
    ],
)
def test_a_choice_that_no_flag_makes_is_refused_by_name(name: str, value: object, tmp_path: Path) -> None:
    header = msgspec.structs.replace(HEADER, settings={**HEADER.settings, name: value})
    tape = TapeFile(tmp_path / "tape", header)
    with pytest.raises(RunnerError, match=rf"the header of the recording is unreadable: .*\b{name}\b"):
        TapeReader(tape.path)
    os.close(tape._file)


@pytest.mark.parametrize("name", ["directory", "pipe"])
def test_what_is_no_file_is_refused_and_nothing_is_written_beside_it(name: str, tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match=rf"--record .*/{name}: this is not a file; name a file that you may write"):
        TapeFile(tmp_path / name, HEADER)
    assert len([*tmp_path.iterdir()]) == 2


def test_a_frame_that_is_left_out_is_noticed(tmp_path: Path) -> None:
    tape = TapeFile(tmp_path / "tape", HEADER)
    ends = []
    for seconds in (1.0, 2.0, 3.0):
        tape.write([(EntryKind.SECONDS, seconds)])
        ends.append(tape.path.stat().st_size)
    data = tape.path.read_bytes()
    tape.path.write_bytes(data[: ends[0]] + data[ends[1] :])
    with pytest.raises(RunnerError, match=rf"damaged in the \d+ bytes from byte {ends[0]}$"):
        TapeReader(tape.path)
    os.close(tape._file)


@pytest.mark.parametrize("data", [b"", b"[\n", b"mlx-runner tape\n", b"mlx-runner tape2", b"mlx-runner tape2\0\0\0"])
def test_another_file_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tape"
    path.write_bytes(data)
    with pytest.raises(RunnerError, match=r"not a recording of|another version|ends within its header"):
        TapeReader(path)
    with pytest.raises(RunnerError, match="no such file"):
        TapeReader(tmp_path / "none")


def test_a_replay_has_the_settings_of_the_recording(model: OpenedModel, tmp_path: Path) -> None:
    numbers = {"parallel": 3, "kv_bits": 8, "max_gap_s": 0.25, "draft_tokens": 2, "prefill_chunk_tokens": 64}
    bounds = {"memory": Bound(9 << 30, 40.0), "cache_memory": Bound(percent=25.0)}
    words = {"dtype": "keep", "cache": "single", "draft": "small", "no_media": True}
    settings = settings_for(model.name, **numbers, **bounds, **words)
    tape = TapeFile(tmp_path / "tape", header_of(settings, model))
    again = TapeReader(tape.path).settings
    own = {"models_dir": settings.models_dir, "log_level": 20}
    expected = msgspec.structs.replace(settings, context_tokens=model.context_length)
    assert msgspec.structs.replace(again, **own) == expected
    os.close(tape._file)


@pytest.mark.parametrize("other", [1, 2, VERSION + 1])
def test_a_recording_of_another_format_is_refused_with_both_numbers(other: int, tmp_path: Path) -> None:
    """Whatever else its header has."""
    header = {"model": "a", "identity": msgspec.structs.replace(HEADER.identity, format=other), "choices": {"cache": 1}}
    tape = TapeFile(tmp_path / "tape", header)  # type: ignore[arg-type]
    with pytest.raises(RunnerError, match=rf"format: recorded with {other}, found {VERSION}$"):
        TapeReader(tape.path)
    os.close(tape._file)


def test_every_flag_is_on_the_tape_or_known_to_decide_nothing_that_is_computed() -> None:
    assert {*DECIDING} <= {*flags_of(Settings)}
    assert {*flags_of(Settings)} - {*DECIDING} == {
        *("model", "models_dir", "verify"),  # which model it is stands beside the choices
        *("port", "watch_parent", "hand_over", "log_level", "trace", "record", "verbose", "inspect_text"),
        *("disk_cache", "disk_memory"),  # not recorded
        *("ranks_here", "followers", "secret_file"),  # each rank is told its own
    }


@pytest.mark.parametrize("name", Identity.__struct_fields__)
def test_what_differs_is_refused_by_name(name: str, model: OpenedModel) -> None:
    settings = settings_for(model.name)
    header = header_of(settings, model)
    check_identity(header, settings, model)
    other = 99 if name == "format" else "another"
    header = msgspec.structs.replace(header, identity=msgspec.structs.replace(header.identity, **{name: other}))
    with pytest.raises(RunnerError, match=rf"{name.replace('_', '-')}: recorded with {other}, found "):
        check_identity(header, settings, model)


def test_what_is_not_recorded_is_refused(model: OpenedModel) -> None:
    check_recordable(settings_for(model.name), model)
    with pytest.raises(UsageError, match="leave out --disk-cache"):
        check_recordable(settings_for(model.name, disk_cache="/kept"), model)
    with pytest.raises(UsageError, match=r"--blas /lib/x\.so can be neither recorded nor replayed"):
        check_recordable(settings_for(model.name, blas="/lib/x.so"), model)
    sees = model._replace(config={**model.config, "vision_config": {}})
    with pytest.raises(UsageError, match="add --no-media"):
        check_recordable(settings_for(model.name), sees)
    check_recordable(settings_for(model.name, no_media=True), sees)
