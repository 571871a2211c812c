"""The scripted model of the cases: its vocabulary, and the token that follows each last token.

* a lower-case letter is followed by the next one, `z` by the end: after "Hi" come `jklmnopqrstuvwxyz`
* a digit is followed by the next one, `9` by `0`, without end
* W, X, Y, Z are equally likely after each of themselves
* `<...>` markers lead to the cases named in the comments; anything else is followed by the end
"""

import itertools
import math
import string
from pathlib import Path

from scripts.tools.models.scripted import BYTES, Transition, write_scripted

CONTEXT = 65536
SMALL_CONTEXT = 64

_LONG = b"long " * 20000
VOCABULARY = (
    *BYTES,
    *(b"\xe3\x81", b"\x93\xe3", b"\x82\x93", b"\xf0\x9f", b"\xe2\x82", b"\xc0\x80", b"\xf4\x90\x80\x80"),
    *(b"\xf0\x9f\x98", b"\x81\x93", b"\xe4\xb8", _LONG),
)
SPECIAL = {
    len(VOCABULARY) + number: text
    for number, text in enumerate(
        [
            *("<|end|>", "<|stop|>", "<|begin|>", "<think>", "<go>"),
            *(f"<utf8-{number}>" for number in range(8)),
            *("<tail>", "<pqs>", "<154>", "<532>", "<622>", "<big>", "<deep>", "<equal>", "<long>", "<boom>"),
        ]
    )
}
_IDS = {token: number for number, token in enumerate(VOCABULARY)} | {
    text.encode(): number for number, text in SPECIAL.items()
}


def token(text: str | bytes) -> int:
    """The id of the token with exactly this text."""
    return _IDS[text.encode() if isinstance(text, str) else text]


END, BEGIN = token("<|end|>"), token("<|begin|>")
EOS = (END, token("<|stop|>"))

UTF8_VECTORS: tuple[tuple[tuple[bytes, ...], tuple[str, ...]], ...] = (
    ((b"\xe3\x81", b"\x93\xe3", b"\x82\x93"), ("こ", "ん")),
    ((b"\xf0\x9f", b"\x98", b"\x80"), ("😀",)),
    ((b"\xff", b"A"), ("\ufffd", "A")),
    ((b"\xe2\x82", b"A"), ("\ufffd\ufffdA",)),
    ((b"\xed", b"\xa0", b"\x80"), ("\ufffd\ufffd", "\ufffd")),
    ((b"\xc0\x80",), ("\ufffd\ufffd",)),
    ((b"\xf4\x90\x80\x80",), ("\ufffd\ufffd\ufffd\ufffd",)),
    ((b"\xf0\x9f\x98", b"\xe3", b"\x81\x93"), ("\ufffd\ufffd\ufffd", "こ")),
)
"""Token bytes and what each flush emits (docs/internals/wire.md, 5); vector n follows the marker `<utf8-n>`."""


def _scores(**scores: float) -> dict[int, float]:
    return {token(text): score for text, score in scores.items()}


def _transitions() -> dict[int, Transition]:
    pairs: list[tuple[str | bytes, str | bytes]] = [
        *itertools.pairwise(string.ascii_lowercase),
        *zip(string.digits, string.digits[1:] + "0", strict=True),
        *(("<go>", "<think>"), ("<think>", "x"), ("<long>", _LONG), ("<tail>", b"\xe4\xb8")),
    ]
    rows: dict[int, Transition] = {token(before): token(after) for before, after in pairs}
    for number, (chunks, _) in enumerate(UTF8_VECTORS):
        chain = (f"<utf8-{number}>".encode(), *chunks)
        rows |= {token(before): token(after) for before, after in itertools.pairwise(chain)}
    uniform = _scores(W=0, X=0, Y=0, Z=0)
    pqs = _scores(P=0, Q=5, S=4)
    rows |= dict.fromkeys(map(token, "WXYZ"), uniform)
    rows |= {
        token("Q"): pqs,  # "token 1 of [0, 5, 4]" where the last token is 1
        token("<pqs>"): pqs,  # the same where it is not
        token("U"): _scores(T=-5, U=-1, V=-3),
        token("M"): _scores(K=5, L=4, N=0),
        token("K"): _scores(L=5, K=4, N=0),
        token("<154>"): _scores(P=1, Q=5, S=4),
        token("<532>"): _scores(P=math.log(0.5), Q=math.log(0.3), S=math.log(0.2)),
        token("<622>"): _scores(P=math.log(0.6), Q=math.log(0.2), S=math.log(0.2)),
        token("<big>"): _scores(P=1000, Q=999, S=998),
        token("<deep>"): dict.fromkeys(range(len(VOCABULARY) + len(SPECIAL)), -20000.0) | _scores(P=0),
        token("<equal>"): _scores(D=5, C=5, B=5),
        token("<boom>"): token("0"),
    }
    return rows


def write_main(directory: Path, key_heads: int = 1) -> Path:
    """The model of most tests: a long context, no BOS of its own."""
    return _write(directory, CONTEXT, key_heads, add_bos=False)


def write_small(directory: Path, key_heads: int = 1) -> Path:
    """64 tokens of context, and a BOS in front of every prompt."""
    return _write(directory, SMALL_CONTEXT, key_heads, add_bos=True)


def _write(directory: Path, context: int, key_heads: int, *, add_bos: bool) -> Path:
    return write_scripted(
        directory,
        VOCABULARY,
        _transitions(),
        EOS,
        SPECIAL,
        context_length=context,
        bos=BEGIN,
        add_bos=add_bos,
        key_heads=key_heads,
    )


def write_sentencepiece(directory: Path, key_heads: int = 1) -> Path:
    """A SentencePiece-style tokenizer: after a `?` comes the word `▁Hello`, then `▁world` and the end."""
    words = (*BYTES, b" Hello", b" world")
    rows: dict[int, Transition] = {ord("?"): 256, 256: 257}
    end = {258: "</s>"}
    return write_scripted(directory, words, rows, [258], end, alphabet="sentencepiece", key_heads=key_heads)
