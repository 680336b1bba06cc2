"""Several ranks, conducted as one rollout engine: tensor parallel engines, or any whose ranks compute together.

The first rank is the *front*. A generation enters its gate, and no other; the front tells the others what to compute.
So a group is paused from the front: its gate is shut first, and while generations leave it the others go on computing
for them; then theirs are shut. It is resumed the other way round. Staged ranks switch while the front is paused, so no
generation ever runs on two versions.

A group is whole or it does not serve. Once a rank is tainted or lost, or has switched where another has not, every
rank is told so, and all are tainted until a whole update repairs them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

from asyncsync import cluster
from asyncsync.engines.base import EngineReceipt, RolloutEngine
from asyncsync.engines.remote import as_rank
from asyncsync.errors import (
    AsyncSyncError,
    ConnectError,
    EngineError,
    MembershipError,
    OutOfStepError,
    PlanError,
    TaintedEngineError,
    TransferError,
)
from asyncsync.fanout import is_ours, race, settle
from asyncsync.messages import Contacts, EngineStatus, Layout, Policy, Rendezvous, UpdateOrder
from asyncsync.shards import Block, owners_of
from asyncsync.shield import CLEANUP_TIMEOUT, shielded

T = TypeVar("T")
_Call: TypeAlias = Callable[[int, RolloutEngine], Awaitable[T]]

ABORT_TIMEOUT = CLEANUP_TIMEOUT / 2.5
"""Seconds that a rank may take to abort; all may have to be told twice within the time of one step of clean-up."""


class EngineGroup:
    """Satisfies :class:`asyncsync.RolloutEngine` for an engine of several ranks.

    Each rank is an engine for itself that holds all of the weights, or its shards of them. Give it to a synchronizer in
    place of an engine; a plain list of the ranks does as well.

    Example:
        >>> asyncsync.WeightSynchronizer(trainer, [asyncsync.EngineGroup([front, second]), another_engine])

    Args:
        ranks: Ray actors that include :class:`asyncsync.ModuleEngine`, or objects with the protocol. The first is the
            front: rollouts enter its ``generating()``, and it tells the others what to compute. Those may enter
            their own meanwhile, but for its sake only.

    Raises:
        MembershipError: There are none, or one is given twice.
        TypeError: One is no rollout engine.

    Attributes:
        ranks: The ranks, as they were given.
    """

    def __init__(self, ranks: Sequence[Any]) -> None:
        self.ranks = tuple(ranks)
        keys = rank_keys(self.ranks)
        for rank, key in enumerate(keys):
            if key in keys[:rank]:
                raise MembershipError(f"rank {rank} of the engine is given twice: it is rank {keys.index(key)} too")
        self._engines = tuple(as_rank(rank) for rank in self.ranks)
        self._sizes: tuple[int, ...] = ()
        self._version = 0  # what the newest update was to become
        self._paused_for: int | None = None  # the epoch of the update it is paused for

    def __repr__(self) -> str:
        return f"<EngineGroup of {', '.join(cluster.actor_class_name(rank) for rank in self.ranks)}>"

    async def describe_engine(self) -> EngineStatus:
        """See :meth:`asyncsync.RolloutEngine.describe_engine`.

        What the ranks do not agree on counts as not so: a group is staged if all are, in a connection if all are, has
        accepted a layout if all have accepted the same. Ranks at different versions are a tainted engine.
        """
        statuses = await self._race(lambda _, engine: engine.describe_engine())
        self._sizes = tuple(status.world_size for status in statuses)
        return _join(statuses)

    async def accept_layout(self, layout: Layout) -> None:
        """See :meth:`asyncsync.RolloutEngine.accept_layout`."""
        await self._all(lambda _, engine: engine.accept_layout(layout))

    async def open_group(self, rendezvous: Rendezvous) -> Contacts:
        """See :meth:`asyncsync.RolloutEngine.open_group`. The ranks' places follow each other."""
        if not self._sizes:
            await self.describe_engine()
        firsts = list(itertools.accumulate(self._sizes, initial=rendezvous.rank))
        contacts: Contacts = {}
        try:
            for said in await self._race(
                lambda rank, engine: engine.open_group(replace(rendezvous, rank=firsts[rank])),
            ):
                contacts |= said
        except BaseException as error:
            await _also(error, self.leave_group(rendezvous.connection))
            raise
        return contacts

    async def join_group(self, connection: str, contacts: Contacts) -> None:
        """See :meth:`asyncsync.RolloutEngine.join_group`."""
        try:
            await self._race(lambda _, engine: engine.join_group(connection, contacts))
        except BaseException as error:
            await _also(error, self.leave_group(connection))
            raise

    async def leave_group(self, connection: str) -> None:
        """See :meth:`asyncsync.RolloutEngine.leave_group`."""
        await self._all(lambda _, engine: engine.leave_group(connection))

    async def pause_generation(self, epoch: int, policy: Policy) -> None:
        """See :meth:`asyncsync.RolloutEngine.pause_generation`."""
        self._paused_for = epoch
        await self._front(lambda _, front: front.pause_generation(epoch, policy))
        await self._others(lambda _, engine: engine.pause_generation(epoch, policy))

    async def receive_weights(self, order: UpdateOrder) -> EngineReceipt:
        """See :meth:`asyncsync.RolloutEngine.receive_weights`. The first rank that fails ends it for all."""
        self._version = order.version
        receipts = await self._race(lambda _, engine: engine.receive_weights(order))
        for rank, receipt in enumerate(receipts):
            if receipt.digest != receipts[0].digest:
                raise TransferError(
                    f"rank {rank} received other bytes than rank 0: digest {receipt.digest}, not {receipts[0].digest}"
                )
        return receipts[0]

    async def finish_weight_update(self, order: UpdateOrder) -> None:
        """See :meth:`asyncsync.RolloutEngine.finish_weight_update`. The front is paused until all have switched."""
        if self._paused_for == order.epoch:
            await self._all(lambda _, engine: engine.finish_weight_update(order))
            return
        try:
            await self._front(lambda _, front: front.pause_generation(order.epoch, order.policy))
            await self._all(lambda _, engine: engine.finish_weight_update(order))
            await shielded(self._front(lambda _, front: front.resume_generation(order.epoch)))
        except BaseException as error:
            await _also(error, self._give_up(order.epoch))
            raise

    async def _give_up(self, epoch: int) -> None:
        """End a commit that failed: serve what all ranks hold, if they hold the same."""
        status = await self.abort_weight_update(epoch, None)
        if status.tainted is None:
            await self._front(lambda _, front: front.resume_generation(epoch))

    async def abort_weight_update(self, epoch: int, published: int | None) -> EngineStatus:
        """See :meth:`asyncsync.RolloutEngine.abort_weight_update`. Ranks that differ are all tainted."""
        results = await self._abort(epoch, dict.fromkeys(range(len(self._engines)), published))
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
        return _join(list(_raise_first(results)))

    async def _abort(self, epoch: int, published: Mapping[int, int | None]) -> dict[int, EngineStatus | Exception]:
        def abort(rank: int, engine: RolloutEngine) -> Awaitable[EngineStatus]:
            return engine.abort_weight_update(epoch, published[rank])

        return await settle({rank: self._call(rank, abort, ABORT_TIMEOUT) for rank in published})

    async def resume_generation(self, epoch: int) -> None:
        """See :meth:`asyncsync.RolloutEngine.resume_generation`."""
        try:
            await self._others(lambda _, engine: engine.resume_generation(epoch))
            await self._front(lambda _, front: front.resume_generation(epoch))
        except OutOfStepError:
            raise
        except Exception as error:
            await _also(error, self.abort_weight_update(epoch, None))  # if one is tainted, all are
            raise

    # -- calls ----------------------------------------------------------------------------------------------------

    async def _race(self, call: _Call[T]) -> list[T]:
        """Call every rank; the first failure ends the other calls."""
        results = await race({rank: self._call(rank, call) for rank in range(len(self._engines))})
        return [results[rank] for rank in range(len(self._engines))]

    async def _all(self, call: _Call[None]) -> None:
        """Call every rank, and hear all of them; the first one's error is raised."""
        _raise_first(await settle({rank: self._call(rank, call) for rank in range(len(self._engines))}))

    async def _front(self, call: _Call[None]) -> None:
        await self._call(0, call)

    async def _others(self, call: _Call[None]) -> None:
        _raise_first(await settle({rank: self._call(rank, call) for rank in range(1, len(self._engines))}))

    async def _call(self, rank: int, call: _Call[T], timeout: float | None = None) -> T:
        """Call one rank; its errors say which it was."""
        try:
            async with asyncio.timeout(timeout) as limit:
                return await call(rank, self._engines[rank])
        except PlanError as error:
            raise PlanError(f"rank {rank}: {error}", names=error.names) from error
        except TransferError as error:
            raise error.named(f"rank {rank}") from error
        except (ConnectError, OutOfStepError, TaintedEngineError) as error:
            kinds = (ConnectError, OutOfStepError, TaintedEngineError)
            kind = next(kind for kind in kinds if isinstance(error, kind))
            raise kind(f"rank {rank}: {error}") from error
        except cluster.ActorLostError as error:
            raise EngineError(f"rank {rank} is gone: {cluster.how_it_was_lost(error)}") from error
        except BaseException as error:
            if is_ours(error):
                raise
            if limit.expired():
                raise EngineError(f"rank {rank} did not answer within {timeout} s") from error
            raise EngineError(f"rank {rank} failed: {type(error).__name__}: {error}") from error


def ranks_of(engine: Any) -> Sequence[Any]:
    """The ranks of an engine that was given as several, as they were given; empty for any other."""
    if isinstance(engine, EngineGroup):
        return engine.ranks
    return engine if isinstance(engine, list | tuple) else ()


def rank_keys(engine: Any) -> list[str]:
    """What tells each rank of an engine from all others.

    Raises:
        MembershipError: The engine is an empty list.
    """
    if isinstance(engine, list | tuple) and not engine:
        raise MembershipError("an engine that is given as a list needs at least one rank")
    ranks = ranks_of(engine)
    return [key for rank in ranks for key in rank_keys(rank)] if ranks else [cluster.actor_key(engine)]


def _join(statuses: Sequence[EngineStatus]) -> EngineStatus:
    front = statuses[0]
    tainted = _why_tainted(statuses)
    agreed = len({(status.plan_digest, status.partial) for status in statuses}) == 1
    return replace(
        front,
        instance="+".join(status.instance for status in statuses),
        device="+".join(sorted({status.device for status in statuses})),
        staged=all(status.staged for status in statuses),
        policies=tuple(each for each in front.policies if all(each in status.policies for status in statuses)),
        world_size=sum(status.world_size for status in statuses),
        epoch=max(status.epoch for status in statuses),
        weight_version=front.weight_version if tainted is None else None,
        newest_version=max(status.newest_version for status in statuses),
        tainted=tainted,
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


def _raise_first(results: Mapping[int, T | Exception]) -> Sequence[T]:
    """The ranks' results, in order; or the first rank's error."""
    found: list[T] = []
    for rank in sorted(results):
        result = results[rank]
        if isinstance(result, Exception):
            raise result
        found.append(result)
    return found


async def _also(error: BaseException, cleanup: Any) -> None:
    """Clean up after an error; what fails in that is noted on it."""
    try:
        await shielded(cleanup)
    except (AsyncSyncError, TimeoutError) as failure:
        error.add_note(f"clean-up failed too: {failure}")
