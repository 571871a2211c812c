"""The headers of sounds: what is read, what is refused, and how little of a file that takes."""

import struct
import time
from math import ceil

import pytest

from runner.errors import MediaError, RequestError
from runner.media import sound_header
from runner.media.sound_header import RATE, read_sound_header
from tests.unit.media.sounds import EXTENSIBLE, FLOAT, PCM, chunk, fmt, noise, pack, wav, wave

DATA = chunk(b"data", pack(noise(100)))


@pytest.mark.parametrize(
    ("form", "bits"), [(PCM, 8), (PCM, 16), (PCM, 24), (PCM, 32), (FLOAT, 32)], ids=lambda each: str(each)
)
@pytest.mark.parametrize("channels", [1, 2, 6])
@pytest.mark.parametrize("rate", [8000, 16000, 22050, 44100, 48000, 768_000])
def test_all_forms_are_read(form: int, bits: int, channels: int, rate: int) -> None:
    samples = noise(300 * channels).reshape(300, channels)
    data = wav(samples, rate, bits, form=form)
    header = read_sound_header(data)
    assert (header.format, header.rate, header.channels, header.bits) == ("WAV", rate, channels, bits)
    assert header.floats == (form == FLOAT)
    assert header.frames == 300
    assert header.samples == ceil(300 * RATE / rate)
    assert data[header.start : header.stop] == pack(samples, form, bits)
    wide = wave(fmt(EXTENSIBLE, channels, rate, bits, inner=form), chunk(b"data", pack(samples, form, bits)))
    assert read_sound_header(wide)[:-2] == header[:-2]


REFUSED = {
    "nothing": (b"", "unrecognized audio format"),
    "eleven bytes": (wave()[:11], "unrecognized audio format"),
    "another RIFF": (wave(fmt(), DATA).replace(b"WAVE", b"AVI "), "unrecognized audio format"),
    "M4A": (b"\0\0\0\x20ftypM4A " + bytes(100), "unrecognized audio format"),
    "no chunks": (wave(), "wav: no fmt chunk"),
    "no fmt": (wave(DATA), "wav: no fmt chunk"),
    "no data": (wave(fmt()), "wav: no data chunk"),
    "a short fmt": (wave(chunk(b"fmt ", bytes(15)), DATA), "wav: fmt chunk too short"),
    "no channels": (wave(fmt(channels=0), DATA), "wav: invalid fmt: 0 channels at 16000 Hz"),
    "no rate": (wave(fmt(rate=0), DATA), "wav: invalid fmt: 1 channels at 0 Hz"),
    "12 bits": (wave(fmt(bits=12), DATA), "wav: unsupported format 1 with 12 bits"),
    "0 bits": (wave(fmt(bits=0), DATA), "wav: unsupported format 1 with 0 bits"),
    "doubles": (wave(fmt(FLOAT, bits=64), DATA), "wav: unsupported format 3 with 64 bits"),
    "ADPCM": (wave(fmt(2, bits=4), DATA), "wav: unsupported format 2 with 4 bits"),
    "extensible without a format": (wave(fmt(EXTENSIBLE), DATA), "wav: unsupported format 65534 with 16 bits"),
    "extensible of another": (wave(fmt(EXTENSIBLE, inner=6), DATA), "wav: unsupported format 6 with 16 bits"),
    "192 channels": (
        wave(fmt(channels=192), DATA),
        "wav: 192 channels at 16000 Hz exceed the limit of 64 channels at 768000 Hz",
    ),
    "4 GHz": (
        wave(fmt(rate=0xFFFFFFFF), DATA),
        "wav: 1 channels at 4294967295 Hz exceed the limit of 64 channels at 768000 Hz",
    ),
    "a million chunks": (wave(fmt(), *[chunk(b"junk", b"")] * 1_000_000, DATA), "wav: more than 4096 chunks"),
    "a second too long": (wave(fmt(rate=1, bits=8), chunk(b"data", bytes(601))), "audio longer than 600 seconds"),
    "a sample too long": (
        wave(fmt(rate=8000, bits=8), chunk(b"data", bytes(600 * 8000 + 1))),
        "audio longer than 600 seconds",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    data, text = REFUSED[name]
    started = time.process_time()
    with pytest.raises(MediaError) as refusal:
        read_sound_header(data)
    assert time.process_time() - started < 0.1
    assert isinstance(refusal.value, RequestError)
    assert (str(refusal.value), refusal.value.status) == (text, 400)


@pytest.mark.parametrize(
    ("start", "name"),
    [(b"ID3\4", "MP3"), (b"\xff\xfb\x90\x64", "MP3"), (b"\xff\xf3", "MP3"), (b"fLaC", "FLAC"), (b"OggS", "Ogg")],
)
def test_other_formats_need_a_package(start: bytes, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = start + bytes(300)
    monkeypatch.setattr(sound_header, "_has_soundfile", lambda: True)
    header = read_sound_header(data)
    assert (header.format, header.is_exact, header.stop - header.start) == (name, False, len(data))
    assert header.frames == 4 * 48_000, "as many seconds as so many bytes can hold"
    assert read_sound_header(start + bytes(10_000_000)).samples == 600 * RATE
    monkeypatch.setattr(sound_header, "_has_soundfile", lambda: False)
    with pytest.raises(MediaError, match=rf"^unrecognized audio format: {name} needs soundfile \(pip install "):
        read_sound_header(data)


@pytest.mark.parametrize("start", [b"\xff\xe8", b"\xff\xd8\xff", b"\xff\xe0", b"\xfe\xff"])
def test_what_only_looks_like_an_mp3_is_none(start: bytes) -> None:
    with pytest.raises(MediaError, match=r"^unrecognized audio format$"):
        read_sound_header(start + bytes(300))


LENGTHS = {
    "ten minutes, to the last sample": (wave(fmt(rate=8000, bits=8), chunk(b"data", bytes(600 * 8000))), 600 * 8000),
    "half a sample at the end": (wave(fmt(channels=2), chunk(b"data", pack(noise(101)))), 50),
    "no data": (wave(fmt(), chunk(b"data", b"")), 0),
    # As programs write that cannot go back to the header.
    "4 GB by its header": (wave(fmt(), chunk(b"data", pack(noise(100)), 0xFFFFFFFF)), 100),
    "2 GB by its header": (wave(fmt(), chunk(b"data", pack(noise(100)), 0x7FFFFFFF)), 100),
    "a byte more by its header": (wave(fmt(), chunk(b"data", pack(noise(100)), 201)), 100),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_the_samples_of_a_file_are_counted(name: str) -> None:
    data, frames = LENGTHS[name]
    header = read_sound_header(data)
    assert (header.frames, header.samples) == (frames, frames * RATE // header.rate)


def test_the_last_chunk_of_a_name_counts_and_odd_ones_are_padded() -> None:
    data = wave(chunk(b"LIST", b"abc"), fmt(channels=7), fmt(rate=8000), chunk(b"data", b"\1\2\3"), DATA)
    header = read_sound_header(data)
    assert (header.rate, header.channels, header.frames) == (8000, 1, 100)
    assert data[header.start : header.stop] == pack(noise(100))


def test_every_beginning_of_a_file_is_read_or_refused() -> None:
    data = wave(chunk(b"LIST", b"abc"), fmt(EXTENSIBLE, 2, inner=PCM), chunk(b"data", pack(noise(64))))
    frames = []
    for stop in range(len(data)):
        try:
            frames.append(read_sound_header(data[:stop]).frames)
        except MediaError:
            assert frames == []
    assert frames == sorted(frames)
    assert frames[-1] == 31
    assert struct.unpack_from("<I", data, 4)[0] == len(data) - 8
