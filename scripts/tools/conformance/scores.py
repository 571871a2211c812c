"""Cases 12.33-56: what hosts since 0.35 and 0.40 ask beside completions: scores, and texts of ids."""

import asyncio
import json
import math
from collections.abc import Sequence
from typing import NamedTuple

from scripts.tools.conformance.assertions import ALPHABET, answered, drain, expect, generating, refused, under_way
from scripts.tools.conformance.cases import Section, argv
from scripts.tools.conformance.models import MAIN, SEEING, SMALL
from scripts.tools.conformance.new_store import HAS
from scripts.tools.conformance.runners import CHUNK_TOKENS, Target
from scripts.tools.conformance.sampling import first_entry
from scripts.tools.conformance.scripted_model import CONTEXT
from scripts.tools.host.lib import Reply
from scripts.tools.host.lib.answers import decode_status

OTHER_ENDPOINTS = Section("Endpoints since October 2026")
NEAR = 0.01
RECURRENT_TOKENS = 8
"""Of a row that is asked again: recurrent layers return to a checkpoint some tokens before its end."""
LETTERS = ("j", "k", "l", "m")


class Scores(NamedTuple):
    """The answer to a score. `logits` has one number for each candidate of each row."""

    logits: list[list[float]]
    input_tokens: int
    cached_tokens: int


def row(prompt: str, candidates: Sequence[str] = LETTERS) -> dict[str, object]:
    return {"prompt": prompt, "candidates": list(candidates)}


async def ask(target: Target, rows: object, model: str = MAIN, max_tokens: int = CONTEXT) -> Reply:
    return await target.post({"max_tokens": max_tokens, "rows": rows}, "/v1/score", model)


async def score(target: Target, *rows: dict[str, object], model: str = MAIN) -> Scores:
    max_tokens = decode_status((await (await target.client(model)).send("GET", "/v1/status")).body).context_length
    body = json.loads(answered(await ask(target, rows, model, max_tokens)))
    assert body.get("output_tokens", 0) == 0, f"output_tokens is {body['output_tokens']}"
    return Scores(body["logits"], body["input_tokens"], body.get("cached_tokens", 0))


def likely(logits: Sequence[float]) -> list[float]:
    """Returns the probabilities of a row: what a host makes of it, whatever offset its numbers have."""
    weights = [math.exp(each - max(logits)) for each in logits]
    return [weight / sum(weights) for weight in weights]


def near(what: str, got: Sequence[Sequence[float]], wanted: Sequence[Sequence[float]]) -> None:
    for number, (ours, theirs) in enumerate(zip(got, wanted, strict=True)):
        apart = max(abs(a - b) for a, b in zip(likely(ours), likely(theirs), strict=True))
        assert apart <= NEAR, f"{what}, row {number}: probabilities {apart:.3g} apart"


@OTHER_ENDPOINTS.case("12.33", "dimensions", argv, HAS)
async def status_names_no_dimensions(target: Target) -> None:
    """The status of a model without embeddings has `EmbeddingDimensions`, null, beside its integers."""
    body = json.loads((await (await target.client()).send("GET", "/v1/status")).body)
    expect("EmbeddingDimensions", body["EmbeddingDimensions"], None)
    expect("context length", decode_status(json.dumps(body).encode()).context_length, CONTEXT)


@OTHER_ENDPOINTS.case("12.34-37", "detokenize", argv, HAS)
async def ids_become_the_text_again(target: Target) -> None:
    """`/v1/detokenize` undoes `/v1/tokenize`; anything but a list of integers is 400 `Bad Request`."""
    client = await target.client()
    for text in ("plain", "\u00e4\U0001f600", "<think>x<|end|>", ""):
        ids = await client.tokenize(text)
        reply = await target.post(ids, "/v1/detokenize")
        expect("text", json.loads(reply.body), text)
    for body in (b"{}", b'["a"]', b"[1.5]", b""):
        refused(await target.post(body, "/v1/detokenize"), "Bad Request")
    expect("status of an unknown id", (await target.post([10**9], "/v1/detokenize")).status, 200)


@OTHER_ENDPOINTS.case("12.38", "detokenize-while-generating", argv, HAS)
async def ids_wait_for_no_answer(target: Target) -> None:
    """`/v1/detokenize` is answered while an endless completion goes on."""
    async with generating(await target.client()) as stream, under_way(drain(stream)) as answering:
        expect("text", json.loads((await target.post([72, 105], "/v1/detokenize")).body), "Hi")
        assert not answering.done(), "the completion was over before it"


@OTHER_ENDPOINTS.case("12.39-40", "row", argv, HAS)
async def a_row_is_scored_as_a_completion_would_be(target: Target) -> None:
    """The scores of a row differ as the log-probabilities of a completion do; its tokens are counted."""
    scored = await score(target, row("<532>", "PQS"), row("<622>", "SPQ"))
    expect("tokens", scored.input_tokens, 2)
    for logits, prompt, letters in zip(scored.logits, ("<532>", "<622>"), ("PQS", "SPQ"), strict=True):
        told = {top.token: top.logprob for top in (await first_entry(target, prompt, 3)).top}
        near(prompt, [logits], [[told[letter] for letter in letters]])


@OTHER_ENDPOINTS.case("12.41-42", "many-rows", argv, HAS)
async def rows_share_their_prefix(target: Target) -> None:
    """64 rows of a common prefix are scored as each alone would be; asked again they come from the cache."""
    prefix = target.runners.unheard() + "text " * (4 * CHUNK_TOKENS)
    rows = [row(prefix + "abcdefgh"[number % 8] * (1 + number // 8)) for number in range(64)]
    together = await score(target, *rows)
    await many_rows_are(target, rows, together, MAIN, 1)


async def many_rows_are(
    target: Target, rows: Sequence[dict[str, object]], together: Scores, model: str, again_tokens: int
) -> None:
    """The scores are those of rows asked alone, and of the same request again, for which at most `again_tokens` of each
    row are computed."""
    alone = [await score(target, each, model=model) for each in rows[:: max(1, len(rows) // 8)]]
    near("together", together.logits[:: max(1, len(rows) // 8)], [each.logits[0] for each in alone])
    again = await score(target, *rows, model=model)
    near("again", again.logits, together.logits)
    expect("tokens", again.input_tokens, together.input_tokens)
    fewest = again.input_tokens - again_tokens * len(rows)
    assert again.cached_tokens >= fewest, f"{again.cached_tokens} of {again.input_tokens} tokens are cached"


@OTHER_ENDPOINTS.case("12.43", "beside-completions", argv, HAS)
async def completions_change_no_scores(target: Target) -> None:
    """A completion of a row's own prompt in between changes neither the scores nor its own text."""
    before = await score(target, row("Hi"), row("Hij"))
    expect("answer", await target.text("Hi"), ALPHABET)
    near("after", (await score(target, row("Hi"), row("Hij"))).logits, before.logits)


DASH = "\u2013"
TOO_MANY = [row("Hi")] * 65
WRONG: tuple[tuple[object, str], ...] = (
    ([], f"scoring requires 1{DASH}64 prompts"),
    (TOO_MANY, f"scoring requires 1{DASH}64 prompts"),
    ([row("Hi"), row("")], f"prompt 1 has 0 tokens; expected 1{DASH}4 (input is never truncated)"),
    ([row("12345")], f"prompt 0 has 5 tokens; expected 1{DASH}4 (input is never truncated)"),
    ([row("Hi", [])], f"prompt 0 requires 1{DASH}26 candidates"),
    ([row("Hi", "a" * 27)], f"prompt 0 requires 1{DASH}26 candidates"),
    ([row("Hi", ["ab"])], 'candidate "ab" must append exactly one ordinary token to prompt 0'),
    ([row("Hi", [""])], 'candidate "" must append exactly one ordinary token to prompt 0'),
    ([row("Hi", ["<think>"])], 'candidate "<think>" must append exactly one ordinary token to prompt 0'),
    ([row("Hi", "aba")], "prompt 0 has invalid or duplicate candidate tokens"),
)


@OTHER_ENDPOINTS.case("12.44-49", "wrong-rows", argv, HAS)
async def wrong_rows_are_refused(target: Target) -> None:
    """Wrong numbers of rows, tokens or candidates, and candidates that are not one token, are 400 in Ollama's words."""
    for rows, text in WRONG:
        refused(await ask(target, rows, max_tokens=4), text)
    for most in (0, CONTEXT + 1):
        refused(await ask(target, [row("Hi")], max_tokens=most), f"max_tokens must be between 1 and {CONTEXT}")
    expect("status of a row of max_tokens", (await ask(target, [row("1234")], max_tokens=4)).status, 200)


@OTHER_ENDPOINTS.case("12.50", "checked-first", argv, HAS)
async def nothing_is_computed_before_all_is_checked(target: Target) -> None:
    """A wrong candidate in the last of 64 rows is refused before a row is computed."""
    rows = [row(target.runners.unheard() * 4) for _ in range(63)]
    text = 'candidate "ab" must append exactly one ordinary token to prompt 63'
    refused(await ask(target, [*rows, row("Hi", ["ab"])]), text)
    cached = (await score(target, rows[0])).cached_tokens
    assert cached < CHUNK_TOKENS, f"{cached} tokens of a refused row are cached"


@OTHER_ENDPOINTS.case("12.51", "no-json", argv, HAS)
async def what_is_no_request_is_refused(target: Target) -> None:
    """A body that is not JSON is 400, another method 405."""
    for body in (b"", b"{", b'{"rows":5}'):
        expect(f"status of {body!r}", (await target.post(body, "/v1/score")).status, 400)
    expect("status of a GET", (await (await target.client()).send("GET", "/v1/score")).status, 405)


@OTHER_ENDPOINTS.case("12.52", "client-leaves", argv, HAS)
async def a_client_may_leave(target: Target) -> None:
    """A client that leaves during a long row delays nobody."""
    long = target.runners.unheard() + "q" * (CONTEXT // 2)
    async with under_way(score(target, row(long))) as scoring:
        await asyncio.sleep(0.3)
        assert not scoring.done(), "the row was over too soon"
    expect("answer", await target.text("Hi"), ALPHABET)


@OTHER_ENDPOINTS.case("12.53", "concurrent", argv, HAS)
async def several_scores_and_a_completion(target: Target) -> None:
    """Four scores and a completion at once get what each alone gets."""
    rows = [[row(f"{'abcd'[number]}: " + "x" * 40), row("Hi")] for number in range(4)]
    alone = [await score(target, *each) for each in rows]
    *together, text = await asyncio.gather(*(score(target, *each) for each in rows), target.text("Hi"))
    for one, other in zip(together, alone, strict=True):
        assert isinstance(one, Scores)
        near("at once", one.logits, other.logits)
    expect("answer", text, ALPHABET)


@OTHER_ENDPOINTS.case("12.54", "lengths", argv, HAS)
async def rows_have_any_length(target: Target) -> None:
    """A row longer than a prefill chunk, one that begins another, equal ones, and one of a single token are scored."""
    long = target.runners.unheard() + "y" * (3 * CHUNK_TOKENS)
    rows = [row(long + "z"), row(long), row(long), row("i")]
    near("rows", (await score(target, *rows)).logits, [(await score(target, each)).logits[0] for each in rows])


@OTHER_ENDPOINTS.case("12.55", "no-bos", argv, HAS)
async def rows_get_no_bos(target: Target) -> None:
    """A row gets no BOS, though completions of the model do."""
    expect("tokens", (await score(target, row("Hi"), model=SMALL)).input_tokens, 2)


@OTHER_ENDPOINTS.case("12.56", "recurrent", argv, HAS)
async def recurrent_models_score_too(target: Target) -> None:
    """A model with recurrent layers scores the rows of a common prefix as each alone."""
    prefix = target.runners.unheard() + "text " * (2 * CHUNK_TOKENS)
    rows = [row(prefix + letter) for letter in "abcd"]
    await many_rows_are(target, rows, await score(target, *rows, model=SEEING), SEEING, RECURRENT_TOKENS)
