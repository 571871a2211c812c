"""Requests that are not computed yet: in the queue, or behind another one that computes what they share."""

from collections import deque

from runner.cache import Cache
from runner.engine.memory.budget import MemoryBudget
from runner.engine.request import Request


class RequestQueue:
    """Says who begins next. Owner: the engine thread.

    The queue is first in, first out. Who has left it to wait behind another one holds a place, and goes first.
    """

    def __init__(self, salt: str, places: int) -> None:
        """At most `places` requests hold one at once."""
        self.changed = False
        """Whether something has happened by which another one might begin; set it, asking costs a look at the trie."""
        self.queue: deque[Request] = deque()
        self.behind: dict[Request, int] = {}
        """Who has left the queue, and when: in ns."""
        self._salt = salt
        self._places = places
        self._first: Request | None = None

    def __bool__(self) -> bool:
        """Whether anybody waits."""
        return bool(self.queue or self.behind)

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.queue.append(request)
        self.changed = True

    def put_behind(self, request: Request, left_ns: int) -> None:
        """It left the queue at `left_ns`, and has to wait for what another one computes."""
        self.behind[request] = left_ns

    def drop_cancelled(self) -> list[Request]:
        """Forget those for whom nobody waits any more; returns them."""
        dropped = [each for each in (*self.queue, *self.behind) if each.cancelled] if self else []
        for request in dropped:
            self.changed = True
            if self.behind.pop(request, None) is None:
                self.queue.remove(request)
        return dropped

    def first(self, cache: Cache, memory: MemoryBudget, computed: int) -> Request | None:
        """The first that can begin while so many others are computed, as of the last change."""
        if self.changed:
            self._first, self.changed = self._find(cache, memory, computed), False
        return self._first

    def take(self, request: Request) -> int | None:
        """What `first` gave begins. Returns when it left the queue, if that was before."""
        self._first, self.changed = None, True
        left_ns = self.behind.pop(request, None)
        if left_ns is None:
            self.queue.popleft()
        return left_ns

    def _find(self, cache: Cache, memory: MemoryBudget, computed: int) -> Request | None:
        for request in self.behind:
            if not cache.follows(request.prompt, self._salt):
                return request if not computed or memory.admits(cache, len(request.prompt)) else None
        taken = computed + len(self.behind)
        if self.queue and taken < self._places:
            request = self.queue[0]
            if not taken or memory.admits(cache, len(request.prompt)):
                return request
        return None
