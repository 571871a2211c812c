"""Layers that remember what they saw, and a small language for telling what happens to a cache.

A `Conversation` drives a cache in the order of the engine: prefill in chunks, one token kept for decode, and the
forward of every sampled token dispatched before that token is read and recorded. After every forward it compares what
the layers show with what fresh layers show that saw the same tokens at once; after every request, that all layers
stand at the end of the record. No model, no arrays: the stories run in microseconds.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import mlx.core as mx

from runner.cache.interface import LayerState, Miss, Session, Snapshot
from runner.cache.single import SingleEntryCache

WINDOW = 4
CHUNK = 5


class FakeLayer(LayerState):
    """A layer whose content is the tokens it saw."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def see(self, tokens: Sequence[int]) -> None:
        """The forward."""
        self.seen.extend(tokens)

    def view(self) -> object:
        """What attention would find."""
        return tuple(self.seen)

    @property
    def offset(self) -> int:
        return len(self.seen)

    @property
    def empty(self) -> bool:
        return not self.seen

    def advance(self, count: int) -> None: ...

    def rewind(self, to: int) -> bool:
        del self.seen[to:]
        return True

    def reset(self) -> None:
        self.seen.clear()

    def snapshot(self, start: int) -> Snapshot | None:
        raise NotImplementedError

    def restore(self, snapshot: Snapshot, to: int) -> bool:
        raise NotImplementedError

    def split(self, snapshot: Snapshot, at: int) -> tuple[Snapshot | None, Snapshot]:
        raise NotImplementedError

    def merge(self, first: Snapshot | None, second: Snapshot | None) -> Snapshot | None:
        raise NotImplementedError

    def arrays(self) -> list[mx.array]:
        return []


class FakeWindow(FakeLayer):
    """Shows the last WINDOW tokens, and has forgotten the others for good."""

    refusal = Miss.WINDOW_PASSED

    def view(self) -> object:
        return tuple(self.seen[-WINDOW:])

    def rewind(self, to: int) -> bool:
        return to == self.offset or (self.offset <= WINDOW and super().rewind(to))


class FakeRecurrent(FakeLayer):
    """Shows one number made of everything it saw, and counts nothing: told by `advance` alone."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = 0

    def view(self) -> object:
        return hash(tuple(self.seen))

    @property
    def offset(self) -> int:
        return self.counted

    def advance(self, count: int) -> None:
        self.counted += count

    def rewind(self, to: int) -> bool:
        return to == self.counted

    def reset(self) -> None:
        super().reset()
        self.counted = 0


class CancelledError(Exception):
    """The client went away."""


# K: keys and values only. S: with a window. R: with a recurrent layer. P: nothing but recurrent layers, no clock at all
FAMILIES: dict[str, tuple[type[FakeLayer], ...]] = {
    "K": (FakeLayer, FakeLayer),
    "S": (FakeLayer, FakeWindow),
    "R": (FakeLayer, FakeRecurrent),
    "P": (FakeRecurrent, FakeRecurrent),
}


class Hook(Protocol):
    """Called between two steps of a request; what it raises is what went wrong there."""

    def __call__(self, layers: list[FakeLayer]) -> None: ...


class Conversation:
    """One user, one cache."""

    def __init__(self, family: str, chunk: int = CHUNK) -> None:
        self.kinds = FAMILIES[family]
        self.chunk = chunk
        self.layers: list[FakeLayer] = [kind() for kind in self.kinds]
        self.cache = SingleEntryCache(lambda: list(self.layers))

    @property
    def record(self) -> list[int]:
        """What the cache claims to hold."""
        return self.cache._tokens

    @property
    def offsets(self) -> set[int]:
        return {layer.offset for layer in self.layers}

    def turn(
        self,
        prompt: Sequence[int],
        answer: Sequence[int] = (20, 21),
        *,
        salt: str = "",
        before_record: Callable[[int], None] = lambda _: None,
        before_close: Hook = lambda _: None,
    ) -> Session:
        """A request served to its end; the model says `answer`.

        `before_record(k)` runs after the forward of the k-th sampled token was dispatched, before it is recorded.
        """
        session = self.cache.begin(prompt, salt)
        try:
            self._check_begin(session, prompt)
            self._prefill(session, prompt)
            self._forward(session, prompt[-1:], prompt)
            for k, token in enumerate(answer):
                self._forward(session, [token], [*prompt, *answer[: k + 1]])
                before_record(k)
                session.record(token)
            before_close(self.layers)
        except CancelledError:
            pass
        finally:
            session.close()
            self._check_closed()
        return session

    def cancelled_prefill(self, prompt: Sequence[int], after_chunks: int) -> Session:
        """The client goes away after so many chunks."""
        session = self.cache.begin(prompt)
        self._check_begin(session, prompt)
        self._prefill(session, prompt, after_chunks)
        session.close()
        self._check_closed()
        return session

    def failed_forward(self, prompt: Sequence[int], after_chunks: int) -> Session:
        """The next forward breaks between two layers."""
        session = self.cache.begin(prompt)
        self._prefill(session, prompt, after_chunks)
        try:
            with session.forward(1):
                self.layers[0].see(prompt[:1])
                self._break()
        except MemoryError:
            session.close()
        self._check_closed()
        return session

    def _break(self) -> None:
        raise MemoryError

    def _prefill(self, session: Session, prompt: Sequence[int], after_chunks: int | None = None) -> None:
        at = session.cached
        for done, count in enumerate(session.forward_plan(self.chunk)):
            if done == after_chunks:
                return
            self._forward(session, prompt[at : at + count], prompt[: at + count])
            at += count

    def _forward(self, session: Session, tokens: Sequence[int], all_of_it: Sequence[int]) -> None:
        with session.forward(len(tokens)):
            for layer in self.layers:
                layer.see(tokens)
        self._check_content(all_of_it)

    def _check_content(self, tokens: Sequence[int]) -> None:
        fresh = [kind() for kind in self.kinds]
        for layer in fresh:
            layer.see(tokens)
        assert [layer.view() for layer in self.layers] == [layer.view() for layer in fresh]

    def _check_begin(self, session: Session, prompt: Sequence[int]) -> None:
        assert session.total == len(prompt)
        assert session.cached <= session.matched <= session.total
        assert session.cached < session.total
        assert session.remaining == list(prompt[session.cached :])
        assert self.offsets == {session.cached}

    def _check_closed(self) -> None:
        assert self.offsets == {len(self.record)}
        if self.record:
            self._check_content(self.record)
