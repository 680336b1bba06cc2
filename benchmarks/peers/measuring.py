"""Measuring everyone in one run: once a round, in an order that changes, on the same machine at the same time."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from asyncsync.errors import AsyncSyncError
from benchmarks import layouts
from benchmarks.contenders import WARM_UP, Contender, in_turn, once, stall_of
from benchmarks.layouts import Layout
from benchmarks.peers.entries import ENGINES, FLOOR, PLACE_SETS, REFERENCE, Entry, Place

PATIENCE = 120.0
"""Seconds for a peer to connect and to bring the first weights."""

STALL_ROUNDS = 3
AT_ONCE = 5
"""Contenders of a heat, at the most, beside those that are in each: idle Ray actors take the time of others, too."""

PROCESS_MEMORY = 300 * layouts.MB
MEMORY_RESERVE = 2 * layouts.GB


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What was measured of one contender on one layout.

    Attributes:
        contender: Its name.
        layout: The layout's.
        seconds: Median of an update.
        stall_ms: Longest stall of the event loop, in rounds of their own.
        first_s: The first update, connecting included.
        ours_s: Median of the library's reference in the same rounds.
    """

    contender: str
    layout: str
    seconds: float
    stall_ms: float
    first_s: float
    ours_s: float


@dataclass(slots=True)
class Findings:
    """What came of a run.

    Attributes:
        rows: The figures.
        missing: Why there are none, by contender and layout.
    """

    rows: list[Row] = field(default_factory=list)
    missing: dict[tuple[str, str], str] = field(default_factory=dict)


class Heat:
    """Contenders that are run in turns.

    Args:
        layout: What they send.
        say: Where to say what goes on.
        reference: What the others are measured against.
    """

    def __init__(self, layout: Layout, say: Callable[[str], None], reference: str = REFERENCE) -> None:
        self._layout = layout
        self._reference = reference
        self._say = say
        self._contenders: dict[str, Contender] = {}
        self._first: dict[str, float] = {}
        self._seconds: dict[str, list[float]] = {}
        self._stalls: dict[str, float] = {}
        self._peers: set[str] = set()
        self.missing: dict[str, str] = {}

    async def run(self, entries: Sequence[Entry], *, rounds: int) -> list[Row]:
        """Measure these.

        Raises:
            Exception: The library, or what is no peer, failed or left other bytes.
        """
        self._peers = {entry.name for entry in entries if entry.kind == "peer"}
        async with Place.open(self._layout) as place, AsyncExitStack() as stack:
            for entry in entries:
                async with self._or_missing(entry.name):
                    await self._start(entry, await stack.enter_async_context(self._made(entry, place)))
            for turn in range(WARM_UP + rounds):
                for name in in_turn(self._contenders, turn):
                    async with self._or_missing(name):
                        took = await once(self._contenders[name])
                        if turn >= WARM_UP:
                            self._seconds.setdefault(name, []).append(took)
            for turn in range(STALL_ROUNDS):
                for name in in_turn(self._contenders, turn):
                    async with self._or_missing(name):
                        stall = await stall_of(self._contenders[name])
                        self._stalls[name] = max(self._stalls.get(name, 0.0), stall)
        ours = statistics.median(self._seconds[self._reference])
        return [
            Row(
                contender=name,
                layout=self._layout.name,
                seconds=round(statistics.median(self._seconds[name]), 6),
                stall_ms=round(self._stalls[name], 2),
                first_s=round(self._first[name], 6),
                ours_s=round(ours, 6),
            )
            for name in self._contenders
        ]

    @asynccontextmanager
    async def _made(self, entry: Entry, place: Place) -> AsyncIterator[Contender]:
        async with entry.make(place) as contender:
            try:
                yield contender
            finally:
                try:
                    async with asyncio.timeout(PATIENCE):
                        await contender.close()
                except Exception as error:
                    if entry.kind != "peer":
                        raise
                    self._say(f"{entry.name}, {self._layout.name}, in closing: {reason(error)}")

    async def _start(self, entry: Entry, contender: Contender) -> None:
        async with asyncio.timeout(PATIENCE):
            await contender.load()
        await contender.prepare()
        start = time.perf_counter()
        async with asyncio.timeout(PATIENCE):
            await contender.connect()
            await contender.run()
        self._first[entry.name] = time.perf_counter() - start
        await contender.check()
        self._contenders[entry.name] = contender

    @asynccontextmanager
    async def _or_missing(self, name: str) -> AsyncIterator[None]:
        """A peer that fails is out, and it is said why."""
        try:
            yield
        except Exception as error:
            if name not in self._peers or isinstance(error, AsyncSyncError):
                raise
            self._contenders.pop(name, None)
            self.missing.setdefault(name, reason(error))
            self._say(f"{name}, {self._layout.name}: {self.missing[name]}")


def reason(error: Exception) -> str:
    """Why a peer has no figures, in a line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else 'it says nothing more'}"[:300]


def heats(entries: Sequence[Entry], layout: Layout, memory: int, reference: str = REFERENCE) -> list[list[Entry]]:
    """Who runs at the same time: a few, if there is memory for them; what the others are measured against, always.

    Who is restless, and would take the others' time, has a heat of his own.

    Args:
        entries: Everyone.
        layout: What they send.
        memory: Bytes that there are.
        reference: What the others are measured against.
    """

    def wanted(entry: Entry) -> int:
        return entry.sets * layout.nbytes + entry.processes * PROCESS_MEMORY

    always = [entry for entry in entries if entry.name in (FLOOR, reference)]
    place = PLACE_SETS * layout.nbytes + (ENGINES + 1) * PROCESS_MEMORY
    room = memory - MEMORY_RESERVE - place - sum(map(wanted, always))
    found: list[list[Entry]] = []
    left = 0
    others = [entry for entry in entries if entry not in always]
    for entry in [entry for entry in others if not entry.is_restless]:
        if not found or wanted(entry) > left or len(found[-1]) == len(always) + AT_ONCE:
            found.append([*always])
            left = room
        found[-1].append(entry)
        left -= wanted(entry)
    found += [[*always, entry] for entry in others if entry.is_restless]
    return found or [always]


async def measure(
    layout: Layout,
    entries: Sequence[Entry],
    *,
    rounds: int,
    memory: int,
    say: Callable[[str], None],
    reference: str = REFERENCE,
) -> Findings:
    """Measure one layout.

    Args:
        layout: What to send.
        entries: By whom.
        rounds: How many rounds count.
        memory: Bytes that may be used.
        say: Where to say what goes on.
        reference: What the others are measured against.
    """
    findings = Findings()
    several = heats(entries, layout, memory, reference)
    for number, heat_entries in enumerate(several, start=1):
        names = ", ".join(entry.name for entry in heat_entries)
        say(f"{layout.name}, {number} of {len(several)}: {names}")
        heat = Heat(layout, say, reference)
        for row in await heat.run(heat_entries, rounds=rounds):
            if number == 1 or row.contender not in (FLOOR, reference):
                findings.rows.append(row)
        findings.missing |= {(name, layout.name): why for name, why in heat.missing.items()}
    return findings
