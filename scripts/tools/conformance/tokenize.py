"""Cases 71-74: tokenize, also while a completion is open."""

import json
import time

from scripts.tools.conformance.assertions import ALPHABET, expect, generating
from scripts.tools.conformance.cases import Section, once, wire
from scripts.tools.conformance.models import SENTENCEPIECE, SMALL
from scripts.tools.conformance.runners import Target
from scripts.tools.conformance.scripted_model import BEGIN, END, token
from scripts.tools.host.lib import Request

TOKENIZE = Section("Tokenize")


async def ids(target: Target, text: str, model: str) -> list[int]:
    """Returns the ids that the host decodes."""
    return await (await target.client(model)).tokenize(text)


@TOKENIZE.case(71, "text", once)
async def text_becomes_ids(target: Target) -> None:
    """Text becomes an array of ids, with the BOS where the model adds one."""
    reply = await (await target.client()).send("POST", "/v1/tokenize", "é\n".encode(), {"Content-Type": "text/plain"})
    expect("status and ids", (reply.status, json.loads(reply.body)), (200, list("é\n".encode())))
    expect("ids with a BOS", await ids(target, "hello", SMALL), [BEGIN, *b"hello"])
    expect("ids of a SentencePiece model", await ids(target, "a b\té", SENTENCEPIECE), list("a b\té".encode()))


@TOKENIZE.case(72, "special", once)
async def special_texts_become_their_ids(target: Target) -> None:
    """The spelling of a special token becomes its one id."""
    client = await target.client()
    wanted = [ord("a"), token("<think>"), ord("b"), END]
    expect("ids", await client.tokenize("a<think>b<|end|>"), wanted)
    expect("ids with a BOS", await ids(target, "<|end|>", SMALL), [BEGIN, END])


@TOKENIZE.case(73, "while-generating", once)
async def tokenize_is_answered_while_a_stream_is_open(target: Target) -> None:
    """It is answered promptly while another connection generates."""
    client = await target.client()
    async with generating(client):
        started = time.monotonic()
        expect("ids", await client.tokenize("hello"), list(b"hello"))
        taken = time.monotonic() - started
        assert taken < 1.0, f"it took {taken:.1f} s"


@TOKENIZE.case(73, "inside-the-final-line", wire)
async def tokenize_is_answered_inside_the_final_line(target: Target) -> None:
    """It is answered while the host handles the last line of a stream that is still open."""
    client = await target.client()
    completion = await client.complete(Request("Hi"), tokenize=True)
    expect("context", completion.context, list(f"Hi{ALPHABET}".encode()))


@TOKENIZE.case(74, "empty", once)
async def nothing_is_no_tokens(target: Target) -> None:
    """Nothing is no tokens, or the BOS alone."""
    expect("ids", await (await target.client()).tokenize(""), [])
    expect("ids with a BOS", await ids(target, "", SMALL), [BEGIN])
