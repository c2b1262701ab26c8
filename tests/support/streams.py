"""Streams, events and graphs of a device that does its work late, and in any order that they allow.

What is launched waits in the queue of its stream until the host waits for the device. Then one stream after the other
goes on by one piece of work, chosen at random among those that no event holds back: whoever forgot to wait for another
stream is found out sooner or later. Work of one stream is done in order.

A graph keeps what was launched while it was captured, in all streams that were forked from the capturing one, and
launches it again. As on a GPU, a stream that did not fork has no part in a capture, and one that forked must join.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, Literal

Work = Callable[[], object]
Order = Literal["random", "default first", "default last"]
"""Of streams that could go on: whichever, or the default one before or after all others."""


class Mark:
    """A place in a stream's queue that an event was recorded at."""

    def __init__(self, done: bool = False) -> None:
        self.done = done


class _Wait:
    def __init__(self, mark: Mark) -> None:
        self.mark = mark


class Spin:
    """A kernel that reads memory until another stream has written what it waits for, or until its time is over.

    Other streams go on meanwhile. If none can, the kernel runs, and finds that its time is over.
    """

    def __init__(self, is_over: Callable[[], bool]) -> None:
        self.is_over = is_over


Entry = Work | Mark | _Wait | Spin


class Streams:
    """The queues. ``late``: nothing is done before the host waits; else everything at once, as it is launched."""

    def __init__(self) -> None:
        self.late = False
        self.current: Hashable = None  # the default stream
        self.graph: Graph | None = None  # that is being captured
        self._queues: dict[Hashable, deque[Entry]] = {}
        self._lock = threading.RLock()
        self._order: Order = "random"
        self._chance = random.Random(0)
        self.by_kind: dict[str, int] = {}  # launches, by what they are
        self.bus: dict[str, list[int]] = {}  # of replayed graphs: bytes of pinned memory that each kind read and wrote
        self.measured: list[int] | None = None  # those of the kind that runs
        # The same of launches outside of graphs, by kind and whether the stream is the default one; None: not counted.
        self.traffic: dict[tuple[str, bool], list[int]] | None = None
        self.programs: dict[str, int] = {}  # of a launch of each kind, at most
        self.variants: set[Hashable] = set()  # of kernels, that a GPU would have compiled

    def seed(self, number: int, order: Order | None = None) -> None:
        """Of the order in which streams go on; None: any of them."""
        self._chance = random.Random(number)
        self._order = order or self._chance.choice(("random", "default first", "default last"))

    @property
    def waiting(self) -> int:
        """Entries of all queues."""
        return sum(map(len, self._queues.values()))

    def launch(self, work: Work, kind: str = "", spin: Spin | None = None) -> None:
        """``spin``: what the work waits for, while other streams go on."""
        if self.graph is not None:
            self.graph.keep(self.current, work, kind, spin)
            return
        self.by_kind[kind] = self.by_kind.get(kind, 0) + 1
        if self.traffic is not None:
            work = partial(self._measure, work, self.traffic.setdefault((kind, self.current is None), [0, 0]))
        if self.late:
            if spin is not None:
                self._push(self.current, spin)
            self._push(self.current, work)
        else:
            work()

    def record(self, stream: Hashable) -> Mark:
        if self.graph is not None:
            return self.graph.record(stream)
        mark = Mark(done=not self.late and not self._queues.get(stream))
        if not mark.done:
            self._push(stream, mark)
        return mark

    def wait(self, stream: Hashable, mark: Mark | None) -> None:
        """What ``stream`` is given from now on waits for the mark; None: of an event that was never recorded."""
        if self.graph is not None:
            self.graph.wait(stream, mark)
        elif mark is not None and not mark.done:
            self._push(stream, _Wait(mark))

    def finish(self, stream: Hashable = ..., mark: Mark | None = None) -> None:
        """The host waits: for a mark, for a stream, or for all."""
        with self._lock:
            while self._is_open(stream, mark):
                free = [name for name, queue in self._queues.items() if queue and not self._is_held(queue[0])]
                free = free or [name for name, queue in self._queues.items() if queue and isinstance(queue[0], Spin)]
                assert free, "streams wait for each other, or for an event that nobody records"
                if self._order != "random":  # as far as there is a choice
                    free = [name for name in free if (name is None) == (self._order == "default first")] or free
                self._do(self._queues[self._chance.choice(free)].popleft())
            self._queues = {name: queue for name, queue in self._queues.items() if queue}

    def _is_open(self, stream: Hashable, mark: Mark | None) -> bool:
        if mark is not None:
            return not mark.done
        return any(map(bool, self._queues.values())) if stream is ... else bool(self._queues.get(stream))

    def _is_held(self, entry: Entry) -> bool:
        if isinstance(entry, Spin):
            return not entry.is_over()
        return isinstance(entry, _Wait) and not entry.mark.done

    def _do(self, entry: Entry) -> None:
        if isinstance(entry, Mark):
            entry.done = True
        elif not isinstance(entry, _Wait | Spin):
            entry()

    def _push(self, stream: Hashable, entry: Entry) -> None:
        with self._lock:
            self._queues.setdefault(stream, deque()).append(entry)

    def play(self, stream: Hashable, entry: Entry, kind: str) -> None:
        """For graphs: an entry of one that is replayed."""
        if not isinstance(entry, Mark | _Wait | Spin):
            self.by_kind[kind] = self.by_kind.get(kind, 0) + 1
            entry = partial(self._measure, entry, self.bus.setdefault(kind, [0, 0]))
        if self.late:
            self._push(stream, entry)
        else:
            assert not self._is_held(entry) or isinstance(entry, Spin), "a graph waits for an event of later"
            self._do(entry)

    def _measure(self, work: Work, counts: list[int]) -> None:
        self.measured = counts
        try:
            work()
        finally:
            self.measured = None


STREAMS = Streams()


class Graph:
    """``torch.cuda.CUDAGraph``"""

    replays: ClassVar[int] = 0  # of all graphs
    replayed: ClassVar[Counter[str]] = Counter()  # work of each kind, of all graphs

    def __init__(self, *_: object, **__: object) -> None:
        self._entries: list[tuple[Hashable, Any, str]] = []
        self._origin: Hashable = None
        # Of the capture, by stream: how much work of each stream it is behind. Of the marks the same.
        self._behind: dict[Hashable, dict[Hashable, int]] = {}
        self._marks: dict[Mark, dict[Hashable, int]] = {}

    @property
    def works(self) -> list[str]:
        """Kinds of the work that it keeps, in order."""
        return [kind for _, entry, kind in self._entries if not isinstance(entry, Mark | _Wait | Spin)]

    # --- while it is captured ---

    def capture_begin(self, *_: object, **__: object) -> None:
        assert STREAMS.graph is None, "a capture within a capture"
        self._origin, STREAMS.graph = STREAMS.current, self
        self._behind[self._origin] = {}

    def capture_end(self) -> None:
        STREAMS.graph = None
        joined = self._behind[self._origin]
        for stream, behind in self._behind.items():
            assert joined.get(stream, 0) == behind.get(stream, 0), "the capture ended before a forked stream has joined"

    def keep(self, stream: Hashable, work: Work, kind: str, spin: Spin | None = None) -> None:
        if spin is not None:
            self._add(stream, spin)
        self._add(stream, work, kind)

    def record(self, stream: Hashable) -> Mark:
        mark = Mark()
        self._add(stream, mark)
        self._marks[mark] = dict(self._behind[stream])
        return mark

    def wait(self, stream: Hashable, mark: Mark | None) -> None:
        assert mark in self._marks, "a capture waits for an event that was not recorded in it (capture isolation)"
        behind = self._behind.setdefault(stream, {})  # forked, if it was not there
        for other, count in self._marks[mark].items():
            behind[other] = max(behind.get(other, 0), count)
        self._add(stream, _Wait(mark))

    def _add(self, stream: Hashable, entry: Any, kind: str = "") -> None:
        assert stream in self._behind, "work of a stream that was not forked from the capturing one (capture isolation)"
        self._behind[stream][stream] = self._behind[stream].get(stream, 0) + 1
        self._entries.append((stream, entry, kind))

    # --- from then on ---

    def replay(self) -> None:
        Graph.replays += 1
        Graph.replayed.update(self.works)
        new = {mark: Mark() for mark in self._marks}
        once = object()  # this replay's own branches
        for stream, entry, kind in self._entries:
            to = STREAMS.current if stream == self._origin else (once, stream)
            if isinstance(entry, Mark):
                entry = new[entry]
            elif isinstance(entry, _Wait):
                entry = _Wait(new[entry.mark])
            STREAMS.play(to, entry, kind)

    def reset(self) -> None:
        self._entries.clear()


@contextmanager
def graph(made: Graph, *_: object, **__: object) -> Iterator[None]:
    """``torch.cuda.graph``"""
    made.capture_begin()
    try:
        yield
    except BaseException:
        STREAMS.graph = None
        raise
    made.capture_end()


class Stream:
    """``torch.cuda.Stream``, and a context in which it is the current one."""

    def __init__(self, *_: object, **__: object) -> None:
        self.name: Hashable = object()
        self._before: list[Hashable] = []

    def __enter__(self) -> Stream:
        self._before.append(STREAMS.current)
        STREAMS.current = self.name
        return self

    def __exit__(self, *_: object) -> None:
        STREAMS.current = self._before.pop()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    def synchronize(self) -> None:
        STREAMS.finish(self.name)

    def query(self) -> bool:
        self.synchronize()
        return True

    def wait_stream(self, other: Stream) -> None:
        STREAMS.wait(self.name, STREAMS.record(other.name))

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event


def current_stream(*_: object) -> Stream:
    found = Stream()
    found.name = STREAMS.current
    return found


class Event:
    """``torch.cuda.Event``"""

    def __init__(self, *_: object, **__: object) -> None:
        self._mark: Mark | None = None
        self._recorded_at = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self._mark = STREAMS.record(STREAMS.current if stream is None else stream.name)
        self._recorded_at = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds of the host between both records: the device has no clock of its own."""
        return (end._recorded_at - self._recorded_at) * 1e3

    def wait(self, stream: Stream | None = None) -> None:
        STREAMS.wait(STREAMS.current if stream is None else stream.name, self._mark)

    def synchronize(self) -> None:
        if self._mark is not None:
            STREAMS.finish(mark=self._mark)

    def query(self) -> bool:
        self.synchronize()
        return True
