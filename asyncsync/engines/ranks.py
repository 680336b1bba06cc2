"""Several ranks that receive as one: whatever an update asks of an engine, asked of each of its ranks.

Ranks are whole together or not at all. Once one is tainted or lost, or has switched where another has not, every one is
told so, and all are tainted until a whole update repairs them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from asyncsync import cluster
from asyncsync.engines.base import EngineReceipt, WeightReceiver
from asyncsync.engines.waking import asleep_and_refused
from asyncsync.errors import (
    AsyncSyncError,
    ConnectError,
    EngineError,
    OutOfStepError,
    PlanError,
    TaintedEngineError,
    TransferError,
)
from asyncsync.fanout import is_ours, race, settle
from asyncsync.messages import Contacts, EngineStatus, Layout, Rendezvous, UpdateOrder
from asyncsync.shards import Block, owners_of
from asyncsync.shield import CLEANUP_TIMEOUT, shielded

WITHIN_CLEANUP = 0.9 * CLEANUP_TIMEOUT
"""Seconds for clean-up that is shielded within a step of clean-up: it must end before that is given up."""

T = TypeVar("T")
R = TypeVar("R", bound=WeightReceiver)

ABORT_TIMEOUT = CLEANUP_TIMEOUT / 2.5
"""Seconds that a rank may take to abort; all may have to be told twice within the time of one step of clean-up."""


class ReceivingRanks(Generic[R]):
    """Satisfies :class:`~asyncsync.engines.base.WeightReceiver` for several of them.

    Args:
        engines: The ranks, in order.

    Attributes:
        engines: The ranks, in order.
    """

    def __init__(self, engines: Sequence[R]) -> None:
        self.engines = tuple(engines)
        self._sizes: tuple[int, ...] = ()
        self._version = 0  # what the newest update was to become

    async def describe_engine(self) -> EngineStatus:
        """See :meth:`asyncsync.RolloutEngine.describe_engine`.

        What the ranks do not agree on counts as not so: a group is staged if all are, in a connection if all are, has
        accepted a layout if all have accepted the same. Ranks at different versions are a tainted engine.
        """
        statuses = await self.ask_race(lambda _, engine: engine.describe_engine())
        self._sizes = tuple(status.world_size for status in statuses)
        return _join(statuses)

    async def accept_layout(self, layout: Layout) -> None:
        """See :meth:`asyncsync.RolloutEngine.accept_layout`."""
        await self.ask_all(lambda _, engine: engine.accept_layout(layout))

    async def open_group(self, rendezvous: Rendezvous) -> Contacts:
        """See :meth:`asyncsync.RolloutEngine.open_group`. The ranks' places follow each other."""
        if not self._sizes:
            await self.describe_engine()
        firsts = list(itertools.accumulate(self._sizes, initial=rendezvous.rank))
        contacts: Contacts = {}
        try:
            for said in await self.ask_race(
                lambda rank, engine: engine.open_group(replace(rendezvous, rank=firsts[rank])),
            ):
                contacts |= said
        except BaseException as error:
            await also(error, self.leave_group(rendezvous.connection))
            raise
        return contacts

    async def join_group(self, connection: str, contacts: Contacts) -> None:
        """See :meth:`asyncsync.RolloutEngine.join_group`."""
        try:
            await self.ask_race(lambda _, engine: engine.join_group(connection, contacts))
        except BaseException as error:
            await also(error, self.leave_group(connection))
            raise

    async def leave_group(self, connection: str) -> None:
        """See :meth:`asyncsync.RolloutEngine.leave_group`."""
        await self.ask_all(lambda _, engine: engine.leave_group(connection))

    async def receive_weights(self, order: UpdateOrder) -> EngineReceipt:
        """See :meth:`asyncsync.RolloutEngine.receive_weights`. The first rank that fails ends it for all."""
        self._version = order.version
        if not order.wake:  # asked before any rank begins: where one sleeps, none is to be overwritten
            statuses = await self.ask_race(lambda _, engine: engine.describe_engine())
            if released := {tag for status in statuses for tag in status.released}:
                raise EngineError(asleep_and_refused(released))
        receipts = await self.ask_race(lambda _, engine: engine.receive_weights(order))
        for rank, receipt in enumerate(receipts):
            if receipt.digest != receipts[0].digest:
                raise EngineError(
                    f"rank {rank} received other bytes than rank 0: digest {receipt.digest}, not {receipts[0].digest}"
                )
        return replace(receipts[0], slept=any(receipt.slept for receipt in receipts))

    async def abort_weight_update(self, epoch: int, published: int | None) -> EngineStatus:
        """See :meth:`asyncsync.RolloutEngine.abort_weight_update`. Ranks that differ are all tainted."""
        results = await self._abort(epoch, dict.fromkeys(range(len(self.engines)), published))
        statuses = {rank: result for rank, result in results.items() if isinstance(result, EngineStatus)}
        for result in results.values():
            if isinstance(result, OutOfStepError):
                raise result  # a newer update is under way, and will say what becomes of the ranks
        if len(statuses) < len(results) or _why_tainted(list(statuses.values())) is not None:
            # None may serve: each is told the version that it does not hold.
            version = max(self._version, *(status.newest_version for status in statuses.values()), 0)
            results |= await self._abort(
                epoch,
                {
                    rank: version - 1 if status.weight_version == version else version
                    for rank, status in statuses.items()
                    if status.tainted is None
                },
            )
        return _join(list(raise_first(results)))

    async def _abort(self, epoch: int, published: Mapping[int, int | None]) -> dict[int, EngineStatus | Exception]:
        def abort(rank: int, engine: R) -> Awaitable[EngineStatus]:
            return engine.abort_weight_update(epoch, published[rank])

        return await settle({rank: self.ask(rank, abort, ABORT_TIMEOUT) for rank in published})

    async def ask_race(self, call: Callable[[int, R], Awaitable[T]]) -> list[T]:
        """Call every rank; the first failure ends the other calls."""
        results = await race({rank: self.ask(rank, call) for rank in range(len(self.engines))})
        return [results[rank] for rank in range(len(self.engines))]

    async def ask_all(self, call: Callable[[int, R], Awaitable[object]]) -> None:
        """Call every rank, and hear all of them; the first one's error is raised."""
        raise_first(await settle({rank: self.ask(rank, call) for rank in range(len(self.engines))}))

    async def ask(self, rank: int, call: Callable[[int, R], Awaitable[T]], timeout: float | None = None) -> T:
        """Call one rank; its errors say which it was."""
        try:
            async with asyncio.timeout(timeout) as limit:
                return await call(rank, self.engines[rank])
        except (PlanError, ConnectError, TransferError) as error:
            raise error.named(f"rank {rank}") from error
        except (OutOfStepError, TaintedEngineError) as error:
            kind = OutOfStepError if isinstance(error, OutOfStepError) else TaintedEngineError
            raise kind(f"rank {rank}: {error}") from error
        except BaseException as error:
            if is_ours(error):
                raise
            waited = timeout if limit.expired() else None
            raise EngineError(cluster.how_it_failed(f"rank {rank}", error, waited)) from error


def _join(statuses: Sequence[EngineStatus]) -> EngineStatus:
    front = statuses[0]
    tainted = _why_tainted(statuses)
    agreed = len({(status.plan_digest, status.partial) for status in statuses}) == 1
    return replace(
        front,
        instance="+".join(status.instance for status in statuses),
        device="+".join(sorted({status.device for status in statuses})),
        gpus=tuple(gpu for status in statuses for gpu in status.gpus),
        staged=all(status.staged for status in statuses),
        node=front.node if all(status.node == front.node for status in statuses) else "",
        stores=tuple(each for each in front.stores if all(each in status.stores for status in statuses)),
        policies=tuple(each for each in front.policies if all(each in status.policies for status in statuses)),
        world_size=sum(status.world_size for status in statuses),
        epoch=max(status.epoch for status in statuses),
        weight_version=front.weight_version if tainted is None else None,
        newest_version=max(status.newest_version for status in statuses),
        tainted=tainted,
        received=min((each.received for each in statuses if each.received is not None), default=None),
        connections=tuple(each for each in front.connections if all(each in status.connections for status in statuses)),
        plan_digest=front.plan_digest if agreed else None,
        partial=front.partial and agreed,
        shards=_lacking(statuses),
        holds={
            layout: digest
            for layout, digest in front.holds.items()
            if tainted is None and all(status.holds.get(layout) == digest for status in statuses)
        },
        gives=False,
        control_group=all(status.control_group for status in statuses),
        released=tuple(sorted({tag for status in statuses for tag in status.released})),
        base_epoch=front.base_epoch if len({status.base_epoch for status in statuses}) == 1 else None,
        no_deltas=next((status.no_deltas for status in statuses if status.no_deltas is not None), None),
        no_ipc=next((status.no_ipc for status in statuses if status.no_ipc is not None), None),
        sees=tuple(gpu for gpu in front.sees if all(gpu in status.sees for status in statuses)),
        processes=tuple(process for status in statuses for process in status.processes),
    )


def _why_tainted(statuses: Sequence[EngineStatus]) -> str | None:
    reasons = [f"rank {rank}: {status.tainted}" for rank, status in enumerate(statuses) if status.tainted is not None]
    if reasons:
        return "; ".join(reasons)
    if len({status.weight_version for status in statuses}) > 1:
        held = (f"rank {rank} holds {status.weight_version or 'none'}" for rank, status in enumerate(statuses))
        return f"its ranks hold different versions: {', '.join(held)}"
    return None


def _lacking(statuses: Sequence[EngineStatus]) -> dict[str, tuple[tuple[int, ...], Block]]:
    """The tensors of which the ranks together do not hold each element once."""
    sharded = {name: shard for status in statuses for name, shard in status.shards.items()}
    held = {
        name: [status.shards[name][1] if name in status.shards else None for status in statuses] for name in sharded
    }
    return {name: shard for name, shard in sharded.items() if owners_of(shard[0], held[name]) is None}


def raise_first(results: Mapping[int, T | Exception]) -> Sequence[T]:
    """The ranks' results, in order; or the first rank's error."""
    found: list[T] = []
    for rank in sorted(results):
        result = results[rank]
        if isinstance(result, Exception):
            raise result
        found.append(result)
    return found


async def also(error: BaseException, cleanup: Any) -> None:
    """Clean up after an error; what fails in that is noted on it."""
    try:
        await shielded(cleanup, WITHIN_CLEANUP)
    except (AsyncSyncError, TimeoutError) as failure:
        error.add_note(f"clean-up failed too: {failure}")
