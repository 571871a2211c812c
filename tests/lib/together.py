"""Several users of one trie cache at the same time, over fake layers.

A `Client` drives an open session step by step, in the order of the engine. Each step of any client checks everything:
the content of every sequence of layers and of every snapshot in the trie, locks, bytes, and the owners of layers.

    users = Together("K")
    first = users.begin([1, 2, 3, 4, 5, 6])        # opens a session
    first.read(until=4)                            # prefills four tokens
    second = users.begin([1, 2, 3, 9])             # a second session, over layers of its own
    first.say(20, 21)                              # prefills the rest, then decodes two tokens
    second.close()
    first.close()
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import cast

from runner.cache.checkpoints import CheckpointPolicy
from runner.cache.node import Node, spelled
from runner.cache.sequence import SequenceLayers
from runner.cache.session import CHECK_TOKENS, TrieSession
from runner.cache.trie_cache import TrieCache
from tests.lib.breaking import breaking
from tests.lib.fakes import FAMILIES, Content, FakeLayer, content_of, facts_of_fakes, shown
from tests.lib.story import CHUNK, BranchOnly, check_content, check_trie, shape

Held = dict[tuple[tuple[int, ...], int], Content]
"""Keyed by the tokens from the root to the end of a node, and a slot."""


def own(user: int, count: int = 10) -> list[int]:
    """Returns tokens that only this user says."""
    return [user * 100 + word for word in range(count)]


class BrokenError(MemoryError):
    """The fault that a test causes."""


class Together:
    """The users of one trie cache, and their sessions."""

    def __init__(
        self, family: str, *, budget: int | None = None, policy: CheckpointPolicy | None = None, chunk: int = CHUNK
    ) -> None:
        self.kinds = FAMILIES[family]
        self.chunk = chunk
        self.budget = budget
        self.cache = TrieCache(facts_of_fakes(self.kinds), budget, policy or BranchOnly())
        self.clients: list[Client] = []

    def begin(self, prompt: Sequence[int], salt: str = "") -> "Client":
        session = self.cache.begin(prompt, salt)
        assert isinstance(session, TrieSession)
        client = Client(self, session, prompt)
        self.clients.append(client)
        self.check()
        return client

    def turn(self, prompt: Sequence[int], answer: Sequence[int] = (20, 21), salt: str = "") -> TrieSession:
        """Serves a request to its end, whichever sessions are open."""
        client = self.begin(prompt, salt)
        client.say(*answer)
        client.close()
        return client.session

    def cached(self, prompt: Sequence[int]) -> int:
        """Returns the number of cached tokens of a prompt, for a client that begins and leaves at once."""
        client = self.begin(prompt)
        client.close()
        return client.session.cached

    def follows(self, prompt: Sequence[int], salt: str = "") -> bool:
        follows = self.cache.follows(prompt, salt)
        self.check()
        return follows

    def reserve(self, nbytes: int) -> None:
        self.cache.reserve(nbytes)
        self.check()

    def bound(self, nbytes: int) -> None:
        self.cache.bound(nbytes)
        self.check()

    def check(self) -> None:
        """Checks that every session's layers are right, and its own."""
        check_trie(self.cache, self.kinds)
        assert [client.session for client in self.clients] == self.cache.sequences.sessions
        sequences = [client.session.sequence for client in self.clients]
        assert len(set(sequences)) == len(sequences), "two sessions over the same layers"
        for client in self.clients:
            client.check()
        if self.budget is not None and (self.clients or not self.cache.reserved_bytes):
            self.check_bytes(self.budget)

    def check_bytes(self, budget: int) -> None:
        """Checks that everything fits the budget, but for the layers of open sessions, an eighth for their checkpoints,
        and what they have computed since the last look at the budget."""
        facts, sessions = self.cache.sequences.facts, self.cache.sequences.sessions
        own = sum(session.sequence.nbytes for session in sessions) + self.cache.reserved_bytes
        points = max(budget // 8, facts.point_bytes * len(sessions)) if sessions else 0
        since = sum(facts.token_bytes * CHECK_TOKENS + facts.point_bytes for _ in sessions)
        assert self.cache.nbytes <= max(budget, own + points) + since

    @property
    def nodes(self) -> list[Node]:
        return list(self.cache.trie.nodes())

    @property
    def shape(self) -> str:
        return shape(self.nodes)

    @property
    def held(self) -> Held:
        """Everything that the trie holds."""
        return {
            (tuple(spelled(node.path())), slot): content_of(snapshot)
            for node in self.nodes
            for slot, snapshot in enumerate(node.slots)
            if snapshot is not None
        }


class Client:
    """Drives an open session."""

    def __init__(self, users: Together, session: TrieSession, prompt: Sequence[int]) -> None:
        self.session = session
        self._users = users
        self._prompt = list(prompt)
        self.seen = self._prompt[: session.cached]  # what the layers were shown
        self.drafts: list[int] = []  # what a round has shown them beyond that
        assert session.total == len(prompt)
        assert session.cached <= session.matched <= session.total
        assert session.cached < session.total
        assert session.remaining == self._prompt[session.cached :]

    def read(self, chunks: int | None = None, until: int | None = None) -> "Client":
        """Prefills `chunks` chunks, or until `until` tokens are reached, or all tokens but the last."""
        done = 0
        most = self._users.chunk
        while done != chunks and (until is None or self.session.position < until):
            if until is not None:
                most = min(self._users.chunk, until - self.session.position)
            count = self.session.next_forward(most)
            if not count:
                break
            at = self.session.position
            self._forward(self.session.recorded[at : at + count])
            done += 1
        return self

    def say(self, *answer: int) -> "Client":
        """Decodes: the forward of every token is dispatched before the token is read."""
        self.start()
        for token in answer:
            self._forward([token])
            self.record(token)
        return self

    def start(self) -> "Client":
        """Computes the rest of the prompt, including its last token."""
        self.read()
        if self.session.position < len(self.session.recorded):
            self._forward(self.session.recorded[-1:])
        return self

    def forward_unread(self, token: int) -> "Client":
        """Dispatches the forward of a token that is never read."""
        self.start()
        self._forward([token])
        return self

    def draft(self, *tokens: int) -> "Client":
        """Runs a round over these tokens, and leaves it open."""
        self.start()
        self._draft(tokens)
        return self

    def accept(self, count: int, record: bool = True) -> None:
        """Ends the round: the first `count` tokens are right. They are computed again if they have to be."""
        right, self.drafts = self.drafts[:count], []
        if self.session.accept(count):
            self.seen = [*self.seen, *right]
            self._users.check()
        elif count == 1:
            self._forward(right)
        else:
            self._draft(right)
            self.drafts, self.seen = [], [*self.seen, *right]
            assert self.session.accept(count)
            self._users.check()
        for token in right if record else ():
            self.record(token)

    def fail_in_round(self) -> None:
        """Fails a round between two layers."""
        with suppress(BrokenError), self.session.draft_round(3):
            self._layers[0].see([99, 99, 99])
            raise BrokenError
        self.close()

    def record(self, token: int) -> None:
        self.session.record(token)
        self._users.check()

    def close(self) -> None:
        """Ends the session, or lets the client leave."""
        self._users.clients.remove(self)
        self.session.close()
        self._users.check()

    def fail(self) -> None:
        """Ends the session after an evaluation that raised."""
        self.session.failed = True
        self.close()

    def fail_in_layers(self) -> None:
        """Fails the next forward between two layers."""
        with suppress(BrokenError), self.session.forward(1):
            self._layers[0].see([99])
            raise BrokenError
        self.close()

    def fail_in_cache(self) -> None:
        """Fails the cache's own part of the next forward."""
        with (
            suppress(BrokenError),
            breaking(SequenceLayers, "count_forward", error=BrokenError),
            self.session.forward(1),
        ):
            self._see([99])
        self.close()

    def check(self) -> None:
        assert self.session.position == len(self.seen)
        if self.session.in_round:
            for layer, kind in zip(self._layers, self._users.kinds, strict=True):
                assert layer.view() == shown(kind, [*self.seen, *self.drafts]), "touched in a round"
        elif self.seen:
            check_content(self.session.layers, self._users.kinds, self.seen)

    @property
    def _layers(self) -> list[FakeLayer]:
        return cast("list[FakeLayer]", self.session.layers)

    def _see(self, tokens: Sequence[int]) -> None:
        for layer in self._layers:
            layer.see(tokens)

    def _forward(self, tokens: Sequence[int]) -> None:
        self.seen = [*self.seen, *tokens]
        with self.session.forward(len(tokens)):
            self._see(tokens)
        self._users.check()

    def _draft(self, tokens: Sequence[int]) -> None:
        with self.session.draft_round(len(tokens)):
            self._see(tokens)
        self.drafts = list(tokens)
        self._users.check()
