"""A trace: requests in order of time, as tokens and as JSON lines.

The lines have the fields of Mooncake's traces: `timestamp` (ms), `input_length`, `output_length` and `hash_ids`. An id
names a block of the prompt together with everything before it; the last block may be incomplete. Four optional fields
say more: `session`; `turns`, the offsets of the tokens that templates put around messages; and `answer_ids`, the blocks
from the one in which the prompt ends up to the end of the answer. Lines of NVIDIA's AIPerf have a `session_id`: each
continues the prompt and the answer of the line before, `delay` ms after it.
"""

import json
from bisect import insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import NamedTuple, cast

TURN = 1
"""The token that stands for every special token around messages."""
FIRST = 16
"""The first token without a fixed meaning: from here on, a token differs from all others and says nothing else."""
BLOCK_TOKENS = 512
_TOKENS_PER_S = 40
"""The speed of answers, where a trace has no time of their end."""

Tokens = Sequence[int]


class Request(NamedTuple):
    """A request; `at_ms` is its time of arrival. The requests of a session follow one another."""

    at_ms: float
    session: str
    prompt: Tokens
    answer: Tokens

    @property
    def end_ms(self) -> float:
        return self.at_ms + 1000 * len(self.answer) / _TOKENS_PER_S


class Turns:
    """The requests of a trace that can begin, in order of time: a session's next one when the one before has ended."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = requests
        self._waiting: list[int] = [*range(len(requests))]
        self._busy: set[str] = set()

    def next(self, now_ms: float = inf) -> int | None:
        """Takes the number of a request out that has arrived; returns None if none can begin."""
        for number in self._waiting:
            request = self._requests[number]
            if request.at_ms > now_ms:
                break
            if request.session not in self._busy:
                self._waiting.remove(number)
                self._busy.add(request.session)
                return number
        return None

    def end(self, number: int) -> None:
        self._busy.remove(self._requests[number].session)

    def put_back(self, number: int) -> None:
        self.end(number)
        insort(self._waiting, number)


def _cut(tokens: Tokens, block: int) -> list[Tokens]:
    return [tokens[at : at + block] for at in range(0, len(tokens), block)]


class _Blocks:
    """The ids of blocks. The beginning of a block has its id, so complete blocks come first."""

    def __init__(self) -> None:
        self._below: dict[int, list[tuple[Tokens, int]]] = defaultdict(list)
        self._count = 0

    def chain(self, blocks: Iterable[Tokens]) -> list[int]:
        """Returns the ids of blocks that follow one another from the beginning."""
        ids: list[int] = []
        for block in blocks:
            siblings = self._below[ids[-1] if ids else -1]
            found = next((name for tokens, name in siblings if tokens[: len(block)] == block), None)
            if found is None:
                found, self._count = self._count, self._count + 1
                siblings.append((block, found))
            ids.append(found)
        return ids


def lines_of(requests: Sequence[Request], block: int = BLOCK_TOKENS) -> Iterator[str]:
    """Yields the lines of a trace. Where prompts part inside a block, they part at its beginning in the file."""
    cut = [_cut([*each.prompt, *each.answer], block) for each in requests]
    blocks = _Blocks()
    for each in cut:
        blocks.chain(part for part in each if len(part) == block)
    for each in sorted(cut, key=lambda parts: -len(parts[-1])):
        blocks.chain(each)
    for request, each in zip(requests, cut, strict=True):
        line = {
            "timestamp": round(request.at_ms),
            "session": request.session,
            "input_length": len(request.prompt),
            "output_length": len(request.answer),
            "hash_ids": blocks.chain(_cut([*request.prompt], block)),
            "answer_ids": blocks.chain(each)[len(request.prompt) // block :],
            "turns": [offset for offset, token in enumerate(request.prompt) if token == TURN],
        }
        yield json.dumps(line)


def read(lines: Iterable[str], block: int = BLOCK_TOKENS) -> list[Request]:
    """Returns a trace in order of time. Raises ValueError for lines that are none of a trace."""
    found: list[Request] = []
    last: dict[str, Request] = {}
    names: dict[object, int] = {}

    def spelled(ids: Iterable[object], length: int) -> list[int]:
        begins = [FIRST + block * names.setdefault(name, len(names)) for name in ids]
        return [begin + offset for begin in begins for offset in range(block)][:length]

    for number, line in enumerate(lines):
        try:
            row = json.loads(line)
            length, answer_length = int(row["input_length"]), int(row["output_length"])
            ids, before = [*row["hash_ids"]], last.get(row.get("session_id"))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"line {number + 1} is no request of a trace: {error!r}") from error
        if len(ids) * block < length:
            raise ValueError(f"line {number + 1}: {len(ids)} blocks of {block} tokens do not hold {length}")
        if "answer_ids" in row:
            whole = spelled([*ids[: length // block], *row["answer_ids"]], length + answer_length)
        else:
            rest = ((number, each) for each in range(-(-answer_length // block)))
            whole = [*spelled(ids, length), *spelled(rest, answer_length)]
        for offset in row.get("turns", ()):
            whole[offset] = TURN
        prompt, answer = whole[:length], whole[length:]
        at_ms = float(row.get("timestamp", 0.0))
        if before is not None:
            prompt = [*before.prompt, *before.answer, *prompt]
            at_ms = before.end_ms + float(row.get("delay", 0.0))
        session = cast("str", row.get("session", row.get("session_id", str(number))))
        last[session] = Request(at_ms, session, prompt, answer)
        found.append(last[session])
    return sorted(found, key=lambda each: each.at_ms)
