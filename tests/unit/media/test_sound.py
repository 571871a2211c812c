"""Sounds to rows: samples of any form, one rate, quiet cuts, and the spectra of transformers' feature extractor."""

import random
from io import BytesIO
from math import ceil, floor, pi, sin, sqrt

import numpy as np
import pytest

from runner.errors import MediaError
from runner.media import sound
from runner.media.families import Gemma4Sound, Gemma4UnifiedSound
from runner.media.sound import cut_samples, decode_sound, mono, spectra, to_rate
from runner.media.sound_header import LONGEST, RATE, read_sound_header, resampled
from tests.lib.lines import lines_of
from tests.unit.media.fuzzing import damaged
from tests.unit.media.record_sound import COUNTS, RECORDED
from tests.unit.media.sounds import FLOAT, PCM, Floats, chunk, fmt, noise, pack, speech, tone, wav, wave


def read(data: bytes, frame_samples: int = 0) -> tuple[list[int], Floats]:
    header = read_sound_header(data)
    return decode_sound(data[header.start : header.stop], header, frame_samples)


def samples_of(data: bytes) -> Floats:
    header = read_sound_header(data)
    return mono(data[header.start : header.stop], header, 0, header.frames)


@pytest.mark.parametrize(
    ("form", "bits", "error"),
    [(PCM, 8, 2**-8), (PCM, 16, 2**-16), (PCM, 24, 2**-24), (PCM, 32, 2**-24), (FLOAT, 32, 0)],
)
def test_samples_of_every_form_are_numbers_between_minus_one_and_one(form: int, bits: int, error: float) -> None:
    samples = noise(500) * np.float32(0.99)
    assert np.abs(samples_of(wav(samples, bits=bits, form=form)) - samples).max() <= error


def test_the_ends_of_the_scales() -> None:
    for bits in (8, 16, 24, 32):
        least, most = (1 << bits) // 2, (1 << bits) // 2 - 1
        lowest = pack(np.array([-1.0, 0.0, 1.0]), bits=bits)
        found = samples_of(wave(fmt(bits=bits), chunk(b"data", lowest)))
        assert [*found] == [-1, 0, np.float32(most / least)]


def test_channels_are_mixed_by_their_mean() -> None:
    left, right = noise(200, 1), noise(200, 2)
    found = samples_of(wav(np.stack([left, right], axis=1), form=FLOAT, bits=32))
    assert np.array_equal(found, ((left.astype(np.float64) + right) / 2).astype(np.float32))


def test_many_samples_are_converted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    data = wav(noise(3 * 1001).reshape(-1, 3), bits=24)
    whole = samples_of(data)
    monkeypatch.setattr(sound, "_MOST_VALUES", 100)
    assert np.array_equal(samples_of(data), whole)


def bessel(x: float) -> float:
    """The modified Bessel function of the first kind, of order 0, by its series."""
    total, term, k = 0.0, 1.0, 1
    while term > total * 1e-17:
        total += term
        term *= (x / 2 / k) ** 2
        k += 1
    return total


def weight(distance: float) -> float:
    """The kernel at a distance from 0 to 1: between the entries of a table of 8192."""

    def entry(place: int) -> float:
        u = place / 8192
        sinc = sin(pi * 16 * u) / (pi * 16 * u) if u else 1.0
        return sinc * bessel(9 * sqrt(1 - u * u)) / bessel(9)

    lower = floor(distance * 8192)
    if lower == 8192:
        return 0.0
    share = distance * 8192 - lower
    return entry(lower) * (1 - share) + entry(lower + 1) * share


def slowly(samples: Floats, rate: int) -> list[float]:
    """The rule of docs/internals/wire.md, 13.2, one sample after the other."""
    found, reach = [], 16 / (0.9 * min(1, RATE / rate))
    for index in range(ceil(len(samples) * RATE / rate)):
        centre = index * rate / RATE
        near = range(max(ceil(centre - reach), 0), min(floor(centre + reach), len(samples) - 1) + 1)
        weights = [weight(abs(each - centre) / reach) for each in near]
        total = sum(own * float(samples[each]) for own, each in zip(weights, near, strict=True))
        found.append(total / sum(weights))
    return found


@pytest.mark.parametrize(
    ("rate", "count"),
    [
        *((8000, 90), (22050, 130), (44100, 200), (48000, 200), (11025, 3), (16001, 60), (15999, 2)),
        *((44101, 150), (4001, 40), (767_999, 300)),
    ],
)
def test_resampling_follows_the_rule(rate: int, count: int) -> None:
    samples = noise(count)
    found = to_rate(lambda start, stop: samples[start:stop], count, rate)
    assert found == pytest.approx(slowly(samples, rate), abs=2e-7)


@pytest.mark.parametrize("rate", [8000, 11025, 44100, 48000])
def test_blocks_leave_no_seam(rate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = noise(5000)

    def part(start: int, stop: int) -> Floats:
        return samples[start:stop]

    whole = to_rate(part, 5000, rate)
    monkeypatch.setattr(sound, "_BLOCK_FRAMES", 500)
    monkeypatch.setattr(sound, "_PASS_FRAMES", 1)
    monkeypatch.setattr(sound, "_MOST_WEIGHTS", 1000)
    assert np.abs(to_rate(part, 5000, rate) - whole).max() <= 1e-7


@pytest.mark.parametrize(("rate", "count"), [(44_101, 441_010), (250_001, 500_002), (48_000, 48_000), (7, 210)])
def test_no_rate_takes_a_pass_of_python_for_each_sample(rate: int, count: int) -> None:
    samples = np.zeros(count, np.float32)
    lines = lines_of(lambda: to_rate(lambda start, stop: samples[start:stop], count, rate))
    assert 0 < lines < max(count, resampled(count, rate)) / 2


def test_a_tone_stays_the_same_tone() -> None:
    for rate in (8000, 22050, 44100, 48000):
        source, wanted = tone(1000, 0.5, rate), tone(1000, 0.5)
        found = to_rate(lambda start, stop, source=source: source[start:stop], len(source), rate)  # type: ignore[misc]
        assert len(found) == len(wanted)
        assert np.abs(found - wanted)[200:-200].max() < 1e-3


def test_one_rate_and_hardly_any_samples_stay_as_they_are() -> None:
    samples = noise(300)
    assert np.array_equal(to_rate(lambda start, stop: samples[start:stop], 300, RATE), samples)
    assert [*to_rate(lambda start, stop: samples[start:stop], 1, 48000)] == [samples[0]]
    assert len(to_rate(lambda start, stop: samples[start:stop], 0, 48000)) == 0


def test_a_sound_is_cut_where_it_is_quiet() -> None:
    samples = speech(31, pauses=[10.0, 14.2, 17.0, 25.0])
    first, second = cut_samples(samples)
    assert 17.0 - 0.1 < first / RATE < 17.0 + 0.1, "of those within two seconds of the middle, the last"
    assert first + second == len(samples)
    lengths = cut_samples(speech(100, pauses=[24.0, 49.0, 76.0]))
    assert [round(each / RATE, 1) for each in np.cumsum(lengths)[:-1]] == pytest.approx([24.0, 49.0, 76.0], abs=0.11)


def test_of_equal_silences_the_last_window_counts() -> None:
    first, _ = cut_samples(np.zeros(LONGEST + 1000, np.float32))
    target = (LONGEST + 1000) // 2
    assert first == target + 2 * RATE - 1600 + 800


def test_pieces_that_leave_no_choice_are_cut_in_the_middle() -> None:
    lengths = cut_samples(noise(3 * LONGEST - 1000))
    assert len(lengths) == 3
    assert max(lengths) <= LONGEST
    assert lengths[0] == (LONGEST - 1000 + LONGEST) // 2


@pytest.mark.parametrize("count", [LONGEST, LONGEST + 1, 45 * RATE, 61 * RATE, 1_438_400, 300 * RATE])
def test_pieces_are_never_too_long(count: int) -> None:
    lengths = cut_samples(noise(count))
    assert len(lengths) == ceil(count / LONGEST)
    assert max(lengths) <= LONGEST
    assert sum(lengths) == count


@pytest.mark.parametrize("count", COUNTS)
def test_spectra_are_those_of_transformers(count: int) -> None:
    with np.load(RECORDED) as recorded:
        np.testing.assert_array_max_ulp(spectra(noise(count)), recorded[str(count)], maxulp=1)


def test_spectra_are_those_of_ollamas_runner() -> None:
    rows = spectra(tone(440, 0.104))
    odd, even = [-6.907755, -4.019087, -6.397553, -6.901781], [-6.907755, -4.861755, -6.335430, -6.902662]
    golden = {
        0: [-6.907755, 0.808556, -1.241259, -2.153034],
        **dict.fromkeys((1, 4, 6, 9), odd),
        **dict.fromkeys((2, 3, 7, 8), even),
        5: [-6.907755, -3.820103, -6.459379, -6.901654],
    }
    assert len(rows) == 10
    for frame, expected in golden.items():
        assert rows[frame, [0, 1, 64, 127]] == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("count", [161, 320, 321, 480, 481, 1000, 16_000, 31 * RATE])
def test_the_length_says_how_many_rows_there_are(count: int) -> None:
    clip = Gemma4Sound().clip(count)
    lengths, rows = read(wav(noise(count)))
    assert len(rows) == sum(lengths)
    if clip is None:
        assert len(lengths) == 2
        clip = Gemma4Sound().clip_of(lengths)
    assert (clip.rows, clip.tokens) == (tuple(lengths), sum(ceil(ceil(each / 2) / 2) for each in lengths))


def test_pieces_have_the_spectra_of_their_own_samples() -> None:
    samples = speech(31, pauses=[15.0])
    first, _ = cut_samples(samples)
    lengths, rows = read(wav(samples, bits=32, form=FLOAT))
    assert np.array_equal(rows[: lengths[0]], spectra(samples[:first]))
    assert np.array_equal(rows[lengths[0] :], spectra(samples[first:]))


def test_rows_of_samples_are_filled_with_zeros() -> None:
    for count, expected in ((1, 1), (640, 1), (641, 2), (31 * RATE, 775)):
        lengths, rows = read(wav(noise(count), bits=32, form=FLOAT), 640)
        clip = Gemma4UnifiedSound(640).clip(count)
        assert (lengths, clip.rows, clip.tokens) == ([expected], (expected,), expected)
        assert np.array_equal(rows.ravel()[:count], noise(count))
        assert not rows.ravel()[count:].any()


@pytest.mark.parametrize("count", [0, 1, 160])
def test_too_short_a_sound_is_refused(count: int) -> None:
    with pytest.raises(MediaError, match=r"^audio too short$"):
        Gemma4Sound().clip(count)
    with pytest.raises(MediaError, match=r"^audio too short$"):
        spectra(noise(count))
    if not count:
        with pytest.raises(MediaError, match=r"^audio too short$"):
            Gemma4UnifiedSound(640).clip(count)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("rate", [RATE, 44100])
@pytest.mark.parametrize("frame_samples", [0, 640])
def test_what_is_no_number_is_refused(value: float, rate: int, frame_samples: int) -> None:
    samples = noise(2000)
    samples[1234] = value
    with pytest.raises(MediaError, match=r"^wav: a sample is not a finite number$"):
        read(wav(samples, rate, 32, form=FLOAT), frame_samples)


def test_samples_beyond_all_spectra_are_refused() -> None:
    with pytest.raises(MediaError, match=r"^wav: the samples are too large$"):
        read(wav(noise(2000) * np.float32(3e38), bits=32, form=FLOAT))
    assert np.isfinite(read(wav(noise(2000) * np.float32(1e30), bits=32, form=FLOAT))[1]).all()


def test_damaged_sounds_are_read_or_refused() -> None:
    chance = random.Random(5)
    files = [wav(noise(900).reshape(-1, 2), 44_100, 24), wav(noise(700), form=FLOAT, bits=32), wav(speech(0.1), bits=8)]
    read_ones = 0
    for number in range(240):
        data = damaged(files[number % 3], chance)
        try:
            lengths, rows = read(data, 640 * (number % 2))
        except MediaError:
            continue
        read_ones += 1
        assert sum(lengths) == len(rows)
        assert np.isfinite(rows).all()
    assert read_ones > 40


def encoded(samples: Floats, rate: int, name: str) -> bytes:
    soundfile = pytest.importorskip("soundfile")
    stream = BytesIO()
    soundfile.write(stream, samples, rate, format={"Ogg": "OGG"}.get(name, name))
    return stream.getvalue()


@pytest.mark.parametrize(("name", "close"), [("FLAC", 1e-4), ("MP3", 0.06), ("Ogg", 0.06)])
@pytest.mark.parametrize("rate", [16_000, 44_100])
def test_other_formats_are_heard_as_a_wav(name: str, close: float, rate: int) -> None:
    samples = np.stack([tone(440, 0.5, rate), tone(660, 0.5, rate)], axis=1)
    data = encoded(samples, rate, name)
    assert read_sound_header(data).format == name
    lengths, rows = read(data, 640)
    wanted = read(wav(samples, rate), 640)[1].ravel()
    found = rows.ravel()
    assert lengths == [len(rows)]
    lag = next(lag for lag in range(2400) if np.abs(found[lag + 800 : lag + 4000] - wanted[800:4000]).max() < close)
    assert lag < 2400, "an MP3 may begin with silence"
    assert len(found) - lag >= len(wanted) - 640


def test_other_formats_have_the_most_channels_and_the_most_samples_a_second_too() -> None:
    def read(*_shape: object, **_form: object) -> Floats:
        raise AssertionError("it is refused before")

    for channels, rate in ((0, 8000), (65, 8000), (1, 0), (1, 768_001)):
        with pytest.raises(MediaError, match=rf"^decode audio: {channels} channels at {rate} Hz exceed the limit of"):
            sound._frames(read, channels, rate)


def test_other_formats_that_are_damaged_or_too_long_are_refused() -> None:
    for name in ("FLAC", "MP3", "Ogg"):
        data = encoded(tone(440, 0.5), RATE, name)
        with pytest.raises(MediaError, match=r"^decode audio: damaged|^audio too short"):
            read(data[:30] + bytes(100))
    long = encoded(np.zeros(601 * 8000, np.float32), 8000, "FLAC")
    with pytest.raises(MediaError, match=r"^audio longer than 600 seconds$"):
        read(long)
