"""Input from strangers reaches the log as one short harmless line for each request, or not at all."""

from urllib.parse import quote

from scripts.tools.host.lib import MARKERS, OUT_OF_MEMORY
from tests.process.hostile.victim import LINE_LIMIT_BYTES, PLAIN_HEAD, Victim, post, status_of

PHRASES = (*MARKERS, *OUT_OF_MEMORY)
CLOSE = b"Connection: close\r\n"


def _get(target: bytes, method: bytes = b"GET", head: bytes = b"") -> bytes:
    return method + b" " + target + b" HTTP/1.1\r\n" + PLAIN_HEAD + CLOSE + head + b"\r\n"


async def written(victim: Victim, requests: list[bytes]) -> list[str]:
    """Returns the log lines that these requests cause."""
    before = len(victim.process.output.text)
    async with victim.storm():
        for request in requests:
            assert 400 <= status_of(await victim.exchange(request)) < 500
    return victim.process.output.text[before:].splitlines()


async def test_a_path_that_is_a_marker_is_written_harmlessly(victim: Victim) -> None:
    """Markers in paths: escaped or not, repeated, in other cases and in look-alikes of Go's lower case."""
    lookalikes = ["INSUFFICIENT MEMORY", "v\u212a_error_out_of_device_memory", "fa\u0130led to allocate"]
    targets = [quote(f"/{text}" * times).encode() for text in (*PHRASES, *lookalikes) for times in (1, 3)]
    lines = await written(victim, [_get(target) for target in targets])
    told = [line for line in lines if "msg=ServeHTTP" in line and "status=404" in line]
    assert len(told) == len(targets)
    for line in told:
        go_lower = line.replace("\u0130", "i").replace("\u212a", "k").lower()
        assert not [phrase for phrase in OUT_OF_MEMORY if phrase in go_lower]


async def test_a_path_with_a_control_character_is_one_printable_line(victim: Victim) -> None:
    odd = ("\n", "\r", "\x00", "\x1b[2J", "\x7f", "\u0085", "\u2028", "\u202e", "\ud800", '"')
    targets = [quote(f"/a{each}Error: b", errors="surrogatepass").encode() for each in odd]
    lines = await written(victim, [_get(target) for target in targets])
    assert len([line for line in lines if "ServeHTTP" in line]) == len(odd)


async def test_long_requests_are_short_lines(victim: Victim) -> None:
    """Targets as long as the server accepts, in characters that grow when they are escaped, and longer ones."""
    targets = [b"/" + piece * (size // len(piece)) for piece in (b"a", b"%0a", b"%ff") for size in (8000, 100_000)]
    lines = await written(victim, [_get(target) for target in targets])
    assert len([line for line in lines if "ServeHTTP" in line]) == 3, "what is no HTTP is not told"
    assert max(len(line.encode()) for line in lines) < LINE_LIMIT_BYTES


async def test_methods_and_headers_of_strangers(victim: Victim) -> None:
    marker = b"Error: mlx: out of memory"
    requests = [
        _get(b"/v1/status", b"X-ERR!PANIC"),
        _get(b"/v1/status", head=b"Origin: " + marker + b"\r\n"),
        _get(b"/nope", head=b"User-Agent: " + marker + b"\r\nReferer: " + marker + b"\r\n"),
        post("/completion", b'{"Prompt":5,"x":"' + marker + b'"}'),
        post("/completion", b'{"Prompt":"","Media":[{"Kind":"' + marker + b'"}]}'),
        post("/completion", marker),
    ]
    lines = await written(victim, requests)
    assert not [line for line in lines if "out of memory" in line or "Prompt" in line]


async def test_a_prompt_and_an_answer_are_never_written(victim: Victim) -> None:
    secret = "xyzzy plugh"
    before = len(victim.process.output.text)
    async with victim.storm():
        await victim.exchange(post("/completion", f'{{"Prompt":"{secret} a"}}'.encode()))
        await victim.exchange(post("/v1/tokenize", secret.encode()))
        await victim.exchange(post("/completion", f'{{"Prompt":"{secret}"'.encode()))
    text = victim.process.output.text[before:]
    assert "xyzzy" not in text
    assert "bcdefg" not in text
