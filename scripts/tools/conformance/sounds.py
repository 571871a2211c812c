"""Cases 12.71 to 12.83 with models that hear: sounds of every form are counted, told apart, kept and refused.

See docs/internals/wire.md, 13. Spectra and towers (cases 72, 73 and 78 of the list there) are seen from inside alone:
tests/unit/media/test_sound.py and tests/model/media/towers/test_sound_towers.py have them.
"""

from math import ceil

import numpy as np

from scripts.tools.conformance.assertions import expect, refusal
from scripts.tools.conformance.cases import Section, wire
from scripts.tools.conformance.models import HEARING, MAIN, SEEING, UNIFIED
from scripts.tools.conformance.new_store import HAS
from scripts.tools.conformance.pictures import RED, cached, scores
from scripts.tools.conformance.runners import Target
from scripts.tools.host.lib import Completion, Medium, Request
from scripts.tools.models.wav import EXTENSIBLE, FLOAT, PCM, RATE, chunk, fmt, noise, pack, wav, wave

SOUNDS = Section("Sound since October 2026")
_FEW = {"num_predict": 3}
_TEXT = "What is this? "


def sound(data: bytes) -> Medium:
    return Medium(data, "audio")


def tokens(samples: int) -> int:
    """Returns the number of soft tokens of a piece of sound, as the conformer counts them."""
    return ceil(ceil(((samples + 160 - 321) // 160 + 1) / 2) / 2)


async def hear(target: Target, prompt: str, *media: Medium, model: str = HEARING) -> Completion:
    """A short answer about sounds, with the log-probabilities of its tokens."""
    return await target.complete(Request(prompt, _FEW, logprobs=True, media=media), model)


async def counted(target: Target, data: bytes, model: str = HEARING) -> int:
    """Returns the tokens that a sound takes in a prompt, without the two around them."""
    plain = (await hear(target, _TEXT, model=model)).final.prompt_eval_count
    return (await hear(target, f"{_TEXT}[img-0]", sound(data), model=model)).final.prompt_eval_count - plain - 2


async def refused(target: Target, *media: Medium, model: str = HEARING) -> str:
    return (await refusal(hear(target, f"{_TEXT}[img-0]", *media, model=model))).strip()


@SOUNDS.case("12.71", "forms", wire, HAS)
async def sounds_of_every_form_are_counted(target: Target) -> None:
    """The tokens of a WAV follow from its length, whatever its form, channels and rate."""
    forms = [(PCM, 8), (PCM, 16), (PCM, 24), (PCM, 32), (FLOAT, 32)]
    for number, rate in enumerate((8000, 16000, 22050, 44100, 48000)):
        frames = 2000 + 1000 * number
        samples = ceil(frames * RATE / rate)
        for at, (form, bits) in enumerate(forms):
            data = noise(frames * (1 + at % 2), number + 1).reshape(frames, -1)
            plain = wav(data, rate, bits, form=form)
            inner = wave(fmt(EXTENSIBLE, data.shape[1], rate, bits, inner=form), chunk(b"data", pack(data, form, bits)))
            for each in (plain, inner):
                expect(
                    f"tokens of {frames} frames of {bits} bits at {rate} Hz",
                    await counted(target, each),
                    tokens(samples),
                )


@SOUNDS.case("12.74", "refused", wire, HAS)
async def what_is_no_wav_is_refused(target: Target) -> None:
    """A file that is not a WAV, or cannot be read, is 400 with the reason."""
    data = chunk(b"data", pack(noise(1000)))
    for content, text in (
        (b"RIFF\1\0\0\0WAV", "unrecognized audio format"),
        (wave(data), "wav: no fmt chunk"),
        (wave(fmt()), "wav: no data chunk"),
        (wave(chunk(b"fmt ", bytes(14)), data), "wav: fmt chunk too short"),
        (wave(fmt(bits=12), data), "wav: unsupported format 1 with 12 bits"),
        (wave(fmt(channels=0), data), "wav: invalid fmt: 0 channels at 16000 Hz"),
        (wave(fmt(rate=0), data), "wav: invalid fmt: 1 channels at 0 Hz"),
    ):
        expect(f"refusal of {content[:24]!r}", await refused(target, sound(content)), text)


@SOUNDS.case("12.74", "other-formats", wire, HAS)
async def damaged_files_of_other_formats_are_refused(target: Target) -> None:
    """The beginning of an MP3 or an Ogg file alone is 400."""
    for content in (b"ID3\4\0\0\0\0\0\0", b"OggS\0\2" + bytes(22)):
        text = await refused(target, sound(content))
        # Who reads these formats says that nothing is in them.
        assert text.startswith(("unrecognized audio format", "decode audio: damaged ")), (
            f"{content!r} is refused with {text!r}"
        )


@SOUNDS.case("12.75", "shortest", wire, HAS)
async def the_shortest_sound_has_161_samples(target: Target) -> None:
    """A sound of 161 samples takes one token, one of 160 is 400."""
    expect("tokens", await counted(target, wav(noise(161))), 1)
    expect("refusal", await refused(target, sound(wav(noise(160)))), "audio too short")


@SOUNDS.case("12.76", "longest", wire, HAS)
async def the_longest_sound_has_ten_minutes(target: Target) -> None:
    """A sound of 600 seconds exceeds only the context; one sample more exceeds the limit for sounds."""
    for more, text in ((0, "input length ("), (1, "audio longer than 600 seconds")):
        data = wave(fmt(rate=8000, bits=8), chunk(b"data", bytes([128]) * (600 * 8000 + more)))
        found = await refused(target, sound(data))
        assert found.startswith(text), f"{more} more: {found!r}"


@SOUNDS.case("12.77", "pieces", wire, HAS)
async def a_long_sound_is_cut_where_it_is_quiet(target: Target) -> None:
    """A sound of 31 seconds is cut into two pieces, at the last quiet place near its middle."""
    samples = noise(31 * RATE)
    for second in (13.9, 15.0, 22.0):
        samples[round((second - 0.1) * RATE) : round((second + 0.1) * RATE)] = 0
    first = round(15.1 * RATE) - 800
    wanted = tokens(first) + tokens(31 * RATE - first)
    expect("tokens", await counted(target, wav(samples)), wanted)
    expect("tokens, quiet at another place", await counted(target, wav(np.roll(samples, 200))), wanted + 1)


@SOUNDS.case("12.79", "unified", wire, HAS)
async def a_unified_model_hears_samples(target: Target) -> None:
    """A unified model takes a token for each 640 samples, and one for the rest; no samples are 400."""
    for samples, wanted in ((1, 1), (640, 1), (641, 2), (31 * RATE, 775)):
        expect(f"tokens of {samples} samples", await counted(target, wav(noise(samples)), UNIFIED), wanted)
    text = await refused(target, sound(wave(fmt(), chunk(b"data", b""))), model=UNIFIED)
    expect("refusal", text, "audio too short")


@SOUNDS.case("12.80", "deaf", wire, HAS)
async def who_does_not_hear_refuses_sound(target: Target) -> None:
    """A text model, and a model that only sees, refuse sound with 400 and its kind."""
    data = sound(wav(noise(1000)))
    expect("text model", await refused(target, data, model=MAIN), "this model does not support audio input")
    expect("one that sees", await refused(target, data, model=SEEING), "qwen3.5 does not support audio input")


@SOUNDS.case("12.81", "cached", wire, HAS)
async def a_sound_is_heard_once(target: Target) -> None:
    """The same sound again comes from the cache; of another one of its length, only the text in front of it does."""
    start = target.runners.unheard() + "Listen to this: "
    front = len(await (await target.client(HEARING)).tokenize(start))
    one, other = (sound(wav(noise(8000, seed))) for seed in (1, 2))
    first = await hear(target, f"{start}[img-0] What is it?", one)
    again = await hear(target, f"{start}[img-0] What is it?", one)
    assert cached(again) > front + tokens(8000), f"{cached(again)} tokens are cached, {front} stand before the sound"
    distance = max(abs(a - b) for a, b in zip(scores(first), scores(again), strict=True))
    assert distance < 0.01, f"it is answered otherwise the second time, by {distance:.3f}"
    found = await hear(target, f"{start}[img-0] What is it?", other)
    assert cached(found) <= front + 2, f"{cached(found)} tokens are cached of another sound, {front} stand before it"
    assert scores(found) != scores(first), "both sounds have the same answer, to the last digit"


@SOUNDS.case("12.82", "kind", wire, HAS)
async def the_kind_says_what_it_is_read_as(target: Target) -> None:
    """A sound sent as kind `image` is refused as a picture."""
    text = await refused(target, Medium(wav(noise(1000)), "image"))
    assert text.startswith("decode image: "), text


@SOUNDS.case("12.83", "with-a-picture", wire, HAS)
async def sounds_and_pictures_go_together(target: Target) -> None:
    """A prompt with a sound and a picture takes the tokens of both, in either order, and each of them matters."""
    one, other = (sound(wav(noise(8000, seed))) for seed in (1, 2))
    for model in (HEARING, UNIFIED):
        plain = (await hear(target, _TEXT, model=model)).final.prompt_eval_count
        picture = (await hear(target, f"{_TEXT}[img-0]", RED, model=model)).final.prompt_eval_count - plain
        heard = (await hear(target, f"{_TEXT}[img-0]", one, model=model)).final.prompt_eval_count - plain
        answers = []
        for prompt, media in (
            (f"{_TEXT}[img-0][img-1]", (one, RED)),
            (f"{_TEXT}[img-0][img-1]", (RED, one)),
            (f"{_TEXT}[img-0][img-1]", (other, RED)),
        ):
            answers.append(await hear(target, prompt, *media, model=model))
            expect("tokens", answers[-1].final.prompt_eval_count, plain + picture + heard)
        assert len({tuple(scores(answer)) for answer in answers}) == 3, "two of three have the same answer"
