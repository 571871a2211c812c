"""Any value of `Format` is answered or refused within its limits, and other requests are not affected."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from time import monotonic

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scripts.tools.soak.hostile_formats import FORMATS
from tests.lib.patience import stretched
from tests.process.hostile.victim import PATIENCE_S, Victim, completion, post, status_of

MOST_GAP_S = 2.0
"""The longest gap allowed in a concurrent stream: much longer than usual, much shorter than these formats take."""
KEPT = 10
"""Descriptors of eight workers that wait for the same format again, and of the process that forks them."""
SLOW = "the answer cannot follow its grammar: it takes more than 50 ms for each token; make it simpler"
MODEST = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}


def asking(wanted: object, prompt: str = "7", num_predict: int = 12) -> bytes:
    return completion(json.dumps({"Prompt": prompt, "Format": wanted, "Options": {"num_predict": num_predict}}))


def told(answer: bytes) -> str:
    """Returns the reason why a format was refused or ended early, if it was. Fails if the response is no answer."""
    status, body = status_of(answer), answer.partition(b"\r\n\r\n")[2].decode()
    assert status in (200, 400), answer[:300]
    if status == 400:
        return body
    last = [json.loads(line) for line in body.splitlines() if line.startswith("{")][-1]
    assert last.get("Done") or last.get("Error"), last
    return str(last["Error"]["error"] if last.get("Error") else "")


def workers(victim: Victim) -> int:
    """Counts the worker processes, whether they compile or follow a format or wait for the next answer."""
    count = 0
    for path in Path(f"/proc/{victim.process.pid}/task/{victim.process.pid}/children").read_text().split():
        with suppress(OSError):
            children = Path(f"/proc/{path}/task/{path}/children").read_text().split()
            count += sum("State:\tZ" not in Path(f"/proc/{child}/status").read_text() for child in children)
    return count


@asynccontextmanager
async def flowing(victim: Victim) -> AsyncIterator[None]:
    """Keeps an answer without a format and tokenize requests running inside the block."""
    gaps: list[float] = []
    over = asyncio.Event()
    reader, writer = await victim.open()
    writer.write(completion(json.dumps({"Prompt": "0", "Options": {"num_predict": 60_000}})))
    await reader.readuntil(b'"Done":false')

    async def read() -> None:
        before = monotonic()
        while not over.is_set():
            assert await reader.read(1 << 16), "it ended by itself"
            gaps.append(monotonic() - before)
            before = monotonic()

    async def tokenize() -> None:
        while not over.is_set():
            async with asyncio.timeout(PATIENCE_S):
                assert status_of(await victim.exchange(post("/v1/tokenize", b"abc"))) == 200
            await asyncio.sleep(0.1)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(read())
        tasks.create_task(tokenize())
        yield
        over.set()
    writer.transport.abort()
    assert len(gaps) > 2
    assert max(gaps) < stretched(MOST_GAP_S)


async def test_all_of_them_at_once_do_not_delay_other_requests(victim: Victim) -> None:
    async with victim.storm(kept=KEPT), flowing(victim):
        answers = await asyncio.gather(
            *[victim.exchange(asking(wanted), timeout_s=120.0) for wanted in FORMATS.values()]
        )
    reasons = {name: told(answer) for name, answer in zip(FORMATS, answers, strict=True)}
    for name in ("a large divisor", "another large divisor", "an intersection"):
        assert "compiling it takes longer than" in reasons[name] or "of memory" in reasons[name], reasons[name]


@pytest.mark.parametrize("name", ["a large divisor", "free texts that branch"])
async def test_a_disconnect_ends_the_compilation(name: str, victim: Victim) -> None:
    assert told(await victim.exchange(asking(MODEST))) == ""
    await asyncio.sleep(0.5)  # its worker comes to the others that are kept, and one of these may go
    kept = workers(victim)
    async with victim.storm(kept=KEPT):
        leaving = [await victim.open() for _ in range(4)]
        for _, writer in leaving:
            writer.write(asking(FORMATS[name]))
        async with asyncio.timeout(PATIENCE_S):
            while workers(victim) < kept + 4:
                await asyncio.sleep(0.01)
        for _, writer in leaving:
            writer.transport.abort()
        async with asyncio.timeout(PATIENCE_S):
            while workers(victim) > kept:
                await asyncio.sleep(0.01)


async def test_slow_masks_do_not_delay_other_requests(victim: Victim) -> None:
    async with victim.storm(kept=KEPT), flowing(victim):
        slow = [
            asyncio.create_task(victim.exchange(asking(FORMATS["an ambiguous grammar"], num_predict=8), timeout_s=120))
            for _ in range(2)
        ]
        async with asyncio.timeout(PATIENCE_S):
            modest = [told(await victim.exchange(asking(MODEST))) for _ in range(5)]
        for answer in await asyncio.gather(*slow):
            assert told(answer) in ("", SLOW)
    assert modest == [""] * 5


# --- random formats

LETTERS = st.sampled_from("ab01 ")
ATOMS = LETTERS | st.sampled_from([".", "[ab]", "[^a]", r"\d", r"\w", "(a|b)*", "(ab?)+", "é", r"\p{L}"])
REGEXES = st.recursive(
    ATOMS,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=4).map("".join)
        | st.tuples(inner, st.sampled_from(["*", "+", "?", "{40}", "{1,300}", "{3,}"])).map(lambda t: f"({t[0]}){t[1]}")
        | st.tuples(inner, inner).map(lambda t: f"({t[0]}|{t[1]})")
    ),
    max_leaves=12,
)
NAMES = st.sampled_from(["x", "y", "z", "TEXT"])
RULES = st.lists(
    st.lists(NAMES | REGEXES.map(lambda regex: f"/{regex}/") | st.sampled_from(['"a"', '""', "x?", "(y z)*", "TEXT+"])),
    min_size=1,
    max_size=4,
).map(lambda ways: " | ".join(" ".join(way) or '""' for way in ways))
LARKS = st.tuples(RULES, RULES, RULES, REGEXES, REGEXES).map(
    lambda t: f"start: x\nx: {t[0]}\ny: {t[1]}\nz: {t[2]}\nTEXT: /{t[3]}/ & ~/{t[4]}/\n"
)
SCHEMAS = st.recursive(
    st.sampled_from([{}, {"type": "string"}, {"type": "integer"}, {"const": "a"}, {"type": "string", "format": "date"}])
    | REGEXES.map(lambda pattern: {"type": "string", "pattern": pattern})
    | st.tuples(st.integers(1, 10**9), st.integers(-(10**9), 10**9)).map(
        lambda t: {"type": "integer", "multipleOf": t[0], "minimum": t[1]}
    )
    | st.integers(0, 10**6).map(lambda count: {"type": "string", "minLength": count}),
    lambda inner: (
        st.lists(inner, max_size=4).map(lambda each: {"allOf": each})
        | st.lists(inner, max_size=4).map(lambda each: {"anyOf": each})
        | st.tuples(inner, st.integers(0, 10**5)).map(lambda t: {"type": "array", "items": t[0], "minItems": t[1]})
        | st.tuples(inner, st.integers(1, 3000)).map(
            lambda t: {"properties": {f"p{number}": t[0] for number in range(t[1])}}
        )
    ),
    max_leaves=6,
)
WANTED = (
    SCHEMAS
    | REGEXES.map(lambda pattern: {"type": "regex", "pattern": pattern})
    | LARKS.map(lambda grammar: {"type": "lark", "grammar": grammar})
)


@settings(max_examples=40, derandomize=True, suppress_health_check=list(HealthCheck))
@given(wanted=st.lists(WANTED, min_size=8, max_size=8))
def test_any_formats_are_answered_or_refused(wanted: list[object], victim: Victim) -> None:
    async def ask() -> list[bytes]:
        async with victim.storm(kept=KEPT):
            return await asyncio.gather(*[victim.exchange(asking(each), timeout_s=120.0) for each in wanted])

    for answer in asyncio.run(ask()):
        told(answer)
