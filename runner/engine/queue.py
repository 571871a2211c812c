"""The requests that wait to begin, that wait for a prefix which another request computes, or that wait for media."""

from collections import deque
from functools import partial

from runner.cache import PrefixCache
from runner.engine.generation import Generation, Results
from runner.engine.memory import MemoryBudget
from runner.engine.recovery import Recovery
from runner.engine.request import Request
from runner.trace import TRACE


class RequestQueue:
    """Decides which request begins next. Owner: the engine thread.

    Requests begin in the order of arrival, except that a request which waits for the disk is passed by later ones. If
    another request is about to compute a prefix of the request at the head, the head leaves the queue and waits for
    that prefix. It then counts as running, and begins before the requests in the queue.
    """

    def __init__(self, salt: str, parallel: int) -> None:
        """At most `parallel` requests run at the same time. `salt` is the salt of their prompts in the cache."""
        self.changed = False
        """True if another request may be able to begin: only then is one searched for, by walking the trie."""
        self.arrived: deque[Request] = deque()
        """The requests in the queue, in the order of arrival."""
        self.awaiting_prefix: dict[Request, int] = {}
        """Each request that waits for a prefix, and the time at which it left the queue, in ns."""
        self._salt = salt
        self._parallel = parallel
        self._next: Request | None = None

    @property
    def requests(self) -> list[Request]:
        """All waiting requests, in the order in which they may begin."""
        return [*self.awaiting_prefix, *self.arrived]

    def add(self, request: Request) -> None:
        """Appends a request to the queue."""
        self.arrived.append(request)
        self.changed = True

    def await_prefix(self, request: Request, left_ns: int) -> None:
        """Makes a request, which left the queue at `left_ns`, wait while another one computes their shared prefix."""
        self.awaiting_prefix[request] = left_ns

    def remove_cancelled(self) -> list[Request]:
        """Removes and returns the requests whose clients have left."""
        cancelled = [each for each in self.requests if each.cancelled]
        for request in cancelled:
            self.changed = True
            if self.awaiting_prefix.pop(request, None) is None:
                self.arrived.remove(request)
        return cancelled

    def next_request(self, cache: PrefixCache, memory: MemoryBudget, computed: int) -> Request | None:
        """Returns the request that can begin while `computed` others run; None if none can. Searches only after a
        change."""
        if self.changed:
            self._next = self._find(cache, memory, computed)
            self.changed = False
        return self._next

    def remove(self, request: Request) -> int | None:
        """Removes the request that `next_request` returned. Returns when it left the queue to wait for a prefix, if it
        did."""
        self._next = None
        self.changed = True
        left_ns = self.awaiting_prefix.pop(request, None)
        if left_ns is None:
            self.arrived.remove(request)
        return left_ns

    def _find(self, cache: PrefixCache, memory: MemoryBudget, computed: int) -> Request | None:
        for request in self.awaiting_prefix:
            if not cache.follows(request.keys, self._salt):
                return request if not computed or _admits(memory, cache, request) else None
        running = computed + len(self.awaiting_prefix)
        head = next((each for each in self.arrived if not each.restoring), None)
        if head is not None and running < self._parallel and (not running or _admits(memory, cache, head)):
            return head
        return None


def _admits(memory: MemoryBudget, cache: PrefixCache, request: Request) -> bool:
    return memory.admits(cache, len(request.prompt), grammar=request.grammar is not None)


class MediaQueue:
    """The requests whose prompts have reached an item of media. One item is encoded at a time: that of the oldest
    request whose item is ready. Owner: the engine thread."""

    def __init__(self, memory: MemoryBudget, recovery: Recovery) -> None:
        self.generations: list[Generation] = []
        self._memory = memory
        self._recovery = recovery

    @property
    def ready(self) -> list[Generation]:
        """The requests whose media can be encoded now, the oldest first."""
        return [each for each in self.generations if each.media.ready]

    def encode_piece(self, cache: PrefixCache) -> Results:
        """Computes one piece of an item. When the item is encoded or has failed, the request leaves the queue and is
        returned. If memory ran out, the request also leaves, but the recovery has it instead."""
        generation = self.ready[0]
        TRACE.name("encode", request=generation.request.number)
        results: Results = [(generation, [])]
        try:
            if not generation.media.encode_piece(partial(self._memory.make_room, cache)):
                return []
        except Exception as error:  # the request restarts or ends; the engine continues
            results = self._recovery.retry_or_fail(generation, error)
        self.generations.remove(generation)
        return results
