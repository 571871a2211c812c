"""Cases 32 and 33 with a model that sees: pictures are read, told apart, kept and refused.

See docs/internals/wire.md, 2.9.
"""

import json

from scripts.tools.conformance.assertions import ALPHABET, expect, refusal
from scripts.tools.conformance.cases import Section, asks, once, reads, wire
from scripts.tools.conformance.models import SEEING
from scripts.tools.conformance.runners import Target
from scripts.tools.host.lib import Completion, Medium, Request
from scripts.tools.models.png import png

PICTURES = Section("Pictures")
MEDIA = asks("Media")
RED, BLUE = (Medium(png(64, 48, colour)) for colour in ((220, 20, 30), (20, 30, 220)))
"""Two pictures of one size."""
WAVE = Medium(b"RIFF\x24\0\0\0WAVEfmt \x10\0\0\0\1\0\1\0\x40\x1f\0\0\x80\x3e\0\0\2\0\x10\0data\0\0\0\0", "audio")
FEW = {"num_predict": 3}


async def see(target: Target, prompt: str, *media: Medium) -> Completion:
    """A short answer about pictures, with the log-probabilities of its tokens."""
    return await target.complete(Request(prompt, FEW, logprobs=True, media=media), SEEING)


async def tokens(target: Target, text: str) -> int:
    return len(await (await target.client(SEEING)).tokenize(text))


def scores(completion: Completion) -> list[float]:
    return [entry.logprob for answer in completion.answers for entry in answer.logprobs or ()]


def cached(completion: Completion) -> int:
    """Returns the number of prompt tokens that were not computed."""
    return int(json.loads(completion.lines[-1])["PromptEvalCachedCount"] or 0)


@PICTURES.case(32, "sound-refused", wire, MEDIA)
async def sound_is_refused_by_who_sees_only(target: Target) -> None:
    """A model that sees and does not hear refuses sound with 400 and its kind."""
    expect("text", await refusal(see(target, "[img-0] Hi", WAVE)), "qwen3.5 does not support audio input")


@PICTURES.case(32, "damaged-picture", wire, MEDIA)
async def a_damaged_picture_is_refused(target: Target) -> None:
    """A damaged or empty picture is 400 before the answer begins, and the text names the picture as the cause."""
    for data in (RED.data[: len(RED.data) // 2], RED.data[:20], b"", b"no picture"):
        text = await refusal(see(target, "[img-0] Hi", Medium(data)))
        assert text.startswith("decode image: "), f"{data[:30]!r}... is refused with {text!r}"


@PICTURES.case(33, "image-tags", wire, MEDIA)
async def tags_name_pictures(target: Target) -> None:
    """Image tags: an id without media is refused, media without a tag and the same tag twice are served."""
    for number in (1, 7):
        text = await refusal(see(target, f"[img-0][img-{number}]", RED))
        expect("refusal", text, f"invalid image index: {number}")
    plain = (await see(target, "ab", RED)).final.prompt_eval_count
    expect("tokens without a tag", plain, await tokens(target, "ab"))
    picture = (await see(target, "a[img-0]b", RED)).final.prompt_eval_count - plain
    assert picture > 2, f"a picture counts as {picture} tokens"
    twice = (await see(target, "a[img-0]b[img-0]", RED)).final.prompt_eval_count
    expect("tokens with the tag twice", twice, plain + 2 * picture)


@PICTURES.case(33, "tags-as-text", once)
async def tags_without_media_are_text(target: Target) -> None:
    """Image tags are plain text in a request without media, for models that see and for others."""
    expect("text after a tag", await target.text("[img-3]x"), ALPHABET[-2:])
    final = (await target.complete(Request("[img-3]x", FEW), SEEING)).final
    expect("tokens", final.prompt_eval_count, await tokens(target, "[img-3]x"))


@PICTURES.case(33, "told-apart", wire, MEDIA)
async def pictures_are_told_apart(target: Target) -> None:
    """Different pictures of one size get their own answers, in every order, whatever was asked before."""
    prompt = target.runners.unheard() + "[img-0] What colour?"
    red, blue = scores(await see(target, prompt, RED)), scores(await see(target, prompt, BLUE))
    assert red != blue, "both pictures have the same answer, to the last digit"
    for name, medium, wanted in (("red", RED, red), ("blue", BLUE, blue)):
        found = scores(await see(target, prompt, medium))
        distance = max(abs(one - other) for one, other in zip(found, wanted, strict=True))
        assert distance < 0.01, f"{name} is answered otherwise the second time, by {distance:.3f}"


@PICTURES.case(33, "cached", wire, MEDIA, reads("PromptEvalCachedCount"))
async def a_picture_is_read_once(target: Target) -> None:
    """The same picture again comes from the cache; of another one, only the text in front of it does."""
    start = target.runners.unheard() + "Look at this: "
    front = await tokens(target, start)
    await see(target, f"{start}[img-0] What colour?", RED)
    again = cached(await see(target, f"{start}[img-0] What colour?", RED))
    assert again > front + 1, f"{again} tokens are cached, of which {front} stand before the picture"
    other = cached(await see(target, f"{start}[img-0] What colour?", BLUE))
    assert other <= front + 1, f"{other} tokens are cached of another picture, of which {front} stand before it"
