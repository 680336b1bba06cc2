"""What becomes of requests in flight while SGLang's weights change: our four policies, out of its three pauses.

SGLang's pauses hold new requests back before its scheduler, and ``retract`` or ``in_place`` stop the scheduler. That
leaves two gaps. No pause lets those in flight finish: :meth:`Pausing.hold` waits for that between two pauses, and
``in_place`` with a flush of the cache, which is refused while anything runs, tells whether they have. And ``abort``
polls once a second; to put requests back with ``retract`` and abort them where they wait takes milliseconds.

A prefix cache must not serve an older version's keys and values. Under ``drain``, ``abort`` and ``recompute`` nothing
that runs holds any when the weights change, so the flush that comes with the last bucket drops all there are. Under
``continue`` requests go on over theirs, and would put them into a prefix cache when they end: no flush could help.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress

from asyncsync.engines.sglang.calls import SGLangClient, SGLangError, SGLangFacts
from asyncsync.messages import Policy

_WRITERS = 12
"""Calls that wait for all requests in flight: while one of them waits or runs, SGLang holds back those that come."""

_NO_GROUP = "asyncsync-none"  # a group of this name is never joined


def abilities(facts: SGLangFacts) -> tuple[tuple[Policy, ...], Mapping[Policy, str]]:
    """Which policies an engine can follow, and why not the others."""
    cannot: dict[Policy, str] = {}
    modes = facts.pause_modes
    if "in_place" not in modes:
        cannot["drain"] = cannot["continue"] = "its pause_generation takes no mode"
    if not facts.timed_flush:
        cannot.setdefault("drain", "its flush_cache takes no timeout, and would wait while the engine is paused")
    if "retract" not in modes:
        cannot["recompute"] = "its pause_generation takes no mode"
    if facts.radix_cache is not False:
        cannot.setdefault(
            "continue",
            "requests that go on over their old cache would leave it to others that begin alike: "
            "start the engine with disable_radix_cache=True",
        )
    if facts.overlap_schedule is not False:
        cannot.setdefault(
            "continue",
            "one more token would be made by the old weights than it says: "
            "start the engine with disable_overlap_schedule=True",
        )
    every: tuple[Policy, ...] = ("drain", "abort", "recompute", "continue")
    return tuple(policy for policy in every if policy not in cannot), cannot


class Pausing:
    """Pauses one engine.

    Args:
        client: Calls it.
        facts: What it is.
    """

    def __init__(self, client: SGLangClient, facts: SGLangFacts) -> None:
        self._client = client
        self._facts = facts
        self._writers: set[asyncio.Future[None]] = set()

    async def hold(self, policy: Policy, *, torn: bool) -> None:
        """Hold back new requests, and deal with those in flight as the policy says.

        Args:
            policy: What it says.
            torn: Whether the engine holds parts of several versions: then nothing may go on, not for a moment.
        """
        if policy == "abort":
            await self._abort()
        elif policy == "continue":
            await self._client.pause_generation("in_place")
        elif policy == "recompute" or torn:
            await self._client.pause_generation("retract" if "retract" in self._facts.pause_modes else "abort")
        else:
            await self._drain()

    async def hold_newcomers(self) -> None:
        """Abort those, too, that have come since the engine was paused; its weights must be whole, and the old ones.

        They wait before its scheduler, where nothing reaches them. So they are let in first, and may make a token.
        """
        await self._client.continue_generation()
        await self._abort()

    async def _abort(self) -> None:
        can_retract = "retract" in self._facts.pause_modes
        if can_retract:
            await self._client.pause_generation("retract")  # also after in_place, where "abort" alone never returns
        if can_retract and self._facts.aborts:
            await self._client.abort_all()
        else:
            await self._client.pause_generation("abort")

    async def _drain(self) -> None:
        while not await self._nothing_runs():
            await self._client.continue_generation()
            await self._wait_for_requests()

    async def _nothing_runs(self) -> bool:
        await self._client.pause_generation("in_place")
        return await self._client.flush_cache()

    async def _wait_for_requests(self) -> None:
        """Return once those in flight have ended; those that come meanwhile wait a little longer.

        Calls that change weights wait for requests in flight, and SGLang lets no request overtake them. So several that
        change nothing are made at once: the first is answered when nothing runs any more, and while the others take
        their turns there is time to pause. If it was too short, the pause finds requests running, and all begins anew.
        """
        first = asyncio.Event()

        async def write_nothing() -> None:
            try:
                with suppress(SGLangError):  # it is refused, always: there is no such group
                    await self._client.update_weights_from_distributed([], [], [], group_name=_NO_GROUP)
            finally:
                first.set()

        for _ in range(_WRITERS):
            writer = asyncio.ensure_future(write_nothing())
            self._writers.add(writer)  # never cancelled: nobody waits for most of them
            writer.add_done_callback(self._writers.discard)
        await first.wait()
