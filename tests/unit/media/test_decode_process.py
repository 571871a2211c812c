"""The process that decodes: equal pixels, limits, and an end with its client."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from runner.errors import MediaError
from runner.media import decode_process, sound
from runner.media.decode_process import DecodeProcess
from runner.media.geometry import grid
from runner.media.header import read_picture_header
from runner.media.sound_header import read_sound_header
from runner.process import orders
from tests.unit.media.pictures import FORMS, decode, encoded, in_form, png_of_size, smooth
from tests.unit.media.sounds import FLOAT, chunk, fmt, noise, speech, wav, wave

SIZE = grid(64, 32, 16, 2)


class Watched(DecodeProcess):
    """Knows its processes."""

    def __init__(self) -> None:
        super().__init__()
        self.processes: list[subprocess.Popen[bytes]] = []

    def _start(self) -> None:
        super()._start()
        assert self._child is not None
        self.processes.append(self._child.process)

    def pixels(self, data: bytes, left: Callable[[], bool] = bool) -> bytes:
        return self.decode_picture(data, read_picture_header(data), SIZE, "drop", left)

    def rows(self, data: bytes, frame_samples: int = 0, left: Callable[[], bool] = bool) -> tuple[list[int], bytes]:
        return self.decode_sound(data, read_sound_header(data), frame_samples, left)


@pytest.fixture
def process() -> Iterator[Watched]:
    watched = Watched()
    yield watched
    processes = watched.processes
    watched._stop()
    assert all(each.returncode is not None for each in processes), "none is left"


PICTURE = in_form("jpeg", smooth(200, 120))
HERE = decode(PICTURE, read_picture_header(PICTURE), 64, 32).tobytes()
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux bounds the memory of a process")


def test_one_process_decodes_all_media_as_this_one_would(process: Watched) -> None:
    for form in FORMS:
        data = in_form(form, smooth(200, 120))
        assert process.pixels(data) == decode(data, read_picture_header(data), 64, 32).tobytes()
        with pytest.raises(MediaError, match=r"^decode image: "):
            process.pixels(data[: len(data) * 2 // 3])
    for data in (wav(noise(5000)), wav(noise(40_000).reshape(-1, 2), 44_100, 24), wav(speech(31), bits=8)):
        for frame_samples in (0, 640):
            assert process.rows(data, frame_samples) == rows_here(data, frame_samples)
            assert process.pixels(PICTURE) == HERE
    with pytest.raises(MediaError, match="a sample is not a finite number"):
        process.rows(wav(noise(5000) * np.float32(np.nan), form=FLOAT, bits=32))
    assert len(process.processes) == 1


@pytest.mark.parametrize("medium", ["image", "audio"])
def test_it_ends_with_its_client_and_the_next_one_has_another(medium: str, process: Watched) -> None:
    process.pixels(PICTURE)
    first = process.processes[0]
    os.kill(first.pid, signal.SIGSTOP)  # as if it never came to an end
    answers = iter([False, False, True])
    decode = partial(process.pixels, PICTURE) if medium == "image" else partial(process.rows, wav(noise(5000)))
    with pytest.raises(MediaError, match=rf"^decode {medium}: the client has left$"):
        decode(left=lambda: next(answers))
    assert first.returncode == -signal.SIGKILL
    assert process.pixels(PICTURE) == HERE
    assert len(process.processes) == 2


def test_a_process_that_was_stopped_holds_up_nothing(process: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    large = PICTURE + bytes(4 << 20)  # more than a pipe holds
    looks = 0

    def looked(_asked: object) -> bool:
        nonlocal looks
        looks += 1
        return False

    lefts: list[Callable[[], bool]] = [iter([False, True]).__next__, bool]
    for left, reason in zip(lefts, ("the client has left$", "did not answer in 70 s and was ended: send"), strict=True):
        process.pixels(PICTURE)
        os.kill(process.processes[-1].pid, signal.SIGSTOP)
        with monkeypatch.context() as patch:
            patch.setattr(orders, "_answered", looked)
            with pytest.raises(MediaError, match=f"^decode image: .*{reason}"):
                process.pixels(large, left)
        assert process.processes[-1].returncode == -signal.SIGKILL
    assert looks == 1 + 1401, "twenty a second: 70.05 s"
    assert process.pixels(large) == HERE
    assert len(process.processes) == 3


def test_a_client_that_has_left_before_costs_no_process(process: Watched) -> None:
    with pytest.raises(MediaError, match="the client has left"):
        process.pixels(PICTURE, lambda: True)
    assert process.processes == []


@LINUX
def test_it_gets_the_memory_that_a_picture_of_its_size_takes(process: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    large = png_of_size(9000, 2000)
    assert len(process.pixels(large)) == 64 * 32 * 3
    monkeypatch.setattr(decode_process, "decode_bytes", lambda header, geometry, size: -(64 << 20))
    with pytest.raises(MediaError, match="takes more memory or time than a "):
        process.pixels(large)
    monkeypatch.undo()
    assert len(process.pixels(large)) == 64 * 32 * 3


def test_it_gets_the_processor_time_that_a_medium_of_its_size_takes(
    process: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_process, "_LEAST_S", 0.001)
    monkeypatch.setattr(decode_process, "_MEGAPIXEL_S", 0)
    monkeypatch.setattr(decode_process, "_MEGASAMPLE_S", 0)
    with pytest.raises(MediaError, match="takes more memory or time than a "):
        process.pixels(png_of_size(9000, 9000))
    assert process.processes[0].returncode is not None
    with pytest.raises(MediaError, match="takes more memory or time than a "):
        process.rows(wav(noise(600 * 8000), 8000, 8))


@LINUX
@pytest.mark.parametrize("first", ["picture", "sound"])
def test_what_is_loaded_with_the_first_medium_counts_towards_its_limit_of_nothing(
    first: str, process: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_process, "_SPARE_BYTES", 4 << 20)
    monkeypatch.setattr(decode_process, "_PIECE_BYTES", 4 << 20)
    if first == "picture":
        grey = encoded(Image.fromarray(np.full((2, 3), 0xABCD, np.uint16)))
        assert set(process.pixels(grey)) == {0xAB}
    else:
        assert process.rows(wav(noise(900), 44_101)) == rows_here(wav(noise(900), 44_101))
    assert len(process.processes) == 1


@LINUX
def test_the_memory_that_is_counted_is_enough(process: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_process, "_SPARE_BYTES", 16 << 20)  # what libraries take for a picture of any size
    image = smooth(2400, 1500, "RGBA")
    image.putalpha(200)
    for form in ("png", "jpeg-progressive", "gif", "webp", "avif"):
        data = in_form(form, image if form in ("png", "webp", "avif") else image.convert("RGB"))
        turned = read_picture_header(data)._replace(width=1500, height=2400, orientation=6)
        assert process.decode_picture(data, turned, grid(2048, 1024, 16, 2), "black", bool)
    assert len(process.processes) == 1


def test_no_process_outlives_its_owner() -> None:
    process = Watched()
    process.pixels(PICTURE)
    assert process._child is not None
    close = process._child.close
    del process
    assert not close.alive


def rows_here(data: bytes, frame_samples: int = 0) -> tuple[list[int], bytes]:
    header = read_sound_header(data)
    lengths, rows = sound.decode_sound(data[header.start : header.stop], header, frame_samples)
    return lengths, rows.tobytes()


@LINUX
def test_it_gets_the_memory_that_a_sound_of_its_length_takes(process: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_process, "_SPARE_BYTES", 16 << 20)
    many = wave(fmt(FLOAT, 64, 768_000, 32), chunk(b"data", noise(2_000_000).tobytes()))
    slow = wave(fmt(rate=1, bits=8), chunk(b"data", bytes([128]) * 100))
    for data, frame_samples in ((many, 0), (slow, 0), (slow, 640), (wav(noise(100 * 8000), 8000, 8), 640)):
        lengths, rows = process.rows(data, frame_samples)
        assert len(rows) == sum(lengths) * 4 * (frame_samples or 128)
    monkeypatch.setattr(decode_process, "sound_bytes", lambda header: -(64 << 20))
    with pytest.raises(MediaError, match=r"^decode audio: decoding takes more memory or time than a sou"):
        process.rows(slow)
    assert len(process.processes) == 1


def test_it_reads_other_formats_within_the_same_limits(process: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    soundfile = pytest.importorskip("soundfile")
    for name, form in (("FLAC", "FLAC"), ("MP3", "MP3"), ("Ogg", "OGG")):
        stream = BytesIO()
        soundfile.write(stream, np.stack([noise(400_000)] * 2, axis=1), 44_100, format=form)
        data = stream.getvalue()
        assert read_sound_header(data).format == name
        lengths, rows = process.rows(data)
        assert len(lengths) == 1
        assert 900 < lengths[0] < 920
        assert len(rows) == 512 * lengths[0]
    assert len(process.processes) == 1
    monkeypatch.setattr(decode_process, "_LEAST_S", 0.001)
    monkeypatch.setattr(decode_process, "_MEGASAMPLE_S", 0)
    with pytest.raises(MediaError, match="takes more memory or time than a "):
        process.rows(data)
