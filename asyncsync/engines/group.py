"""Several ranks, conducted as one rollout engine: tensor parallel engines, or any whose ranks compute together.

The first rank is the *front*. A generation enters its gate, and no other; the front tells the others what to compute.
So a group is paused from the front: its gate is shut first, and while generations leave it the others go on computing
for them; then theirs are shut. It is resumed the other way round. Staged ranks switch while the front is paused, so no
generation ever runs on two versions.

A group is whole or it does not serve. Once a rank is tainted or lost, or has switched where another has not, every
rank is told so, and all are tainted until a whole update repairs them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import anyio

from asyncsync import cluster
from asyncsync.engines.base import RolloutEngine
from asyncsync.engines.ranks import ReceivingRanks, also, raise_first
from asyncsync.engines.remote import as_rank
from asyncsync.errors import MembershipError, OutOfStepError
from asyncsync.fanout import settle
from asyncsync.messages import Policy, UpdateOrder
from asyncsync.shield import shielded

_Call: TypeAlias = Callable[[int, RolloutEngine], Awaitable[object]]


class EngineGroup(ReceivingRanks[RolloutEngine]):
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
        super().__init__([as_rank(rank) for rank in self.ranks])
        self._paused_for: int | None = None  # the epoch of the update it is paused for

    def __repr__(self) -> str:
        return f"<EngineGroup of {', '.join(cluster.actor_class_name(rank) for rank in self.ranks)}>"

    async def pause_generation(self, epoch: int, policy: Policy) -> None:
        """See :meth:`asyncsync.RolloutEngine.pause_generation`."""
        self._paused_for = epoch
        await self._front(lambda _, front: front.pause_generation(epoch, policy))
        await self._others(lambda _, engine: engine.pause_generation(epoch, policy))

    async def finish_weight_update(self, order: UpdateOrder) -> float | None:
        """See :meth:`asyncsync.RolloutEngine.finish_weight_update`. The front is paused until all have switched."""
        if self._paused_for == order.epoch:
            await self.ask_all(lambda _, engine: engine.finish_weight_update(order))
            return None
        try:
            await self._front(lambda _, front: front.pause_generation(order.epoch, order.policy))
            held = anyio.current_time()
            await self.ask_all(lambda _, engine: engine.finish_weight_update(order))
            await shielded(self._front(lambda _, front: front.resume_generation(order.epoch)))
        except BaseException as error:
            await also(error, self._give_up(order.epoch))
            raise
        return anyio.current_time() - held

    async def _give_up(self, epoch: int) -> None:
        """End a commit that failed: serve what all ranks hold, if they hold the same."""
        status = await self.abort_weight_update(epoch, None)
        if status.tainted is None:
            await self._front(lambda _, front: front.resume_generation(epoch))

    async def resume_generation(self, epoch: int) -> None:
        """See :meth:`asyncsync.RolloutEngine.resume_generation`."""
        try:
            await self._others(lambda _, engine: engine.resume_generation(epoch))
            await self._front(lambda _, front: front.resume_generation(epoch))
        except OutOfStepError:
            raise
        except Exception as error:
            await also(error, self.abort_weight_update(epoch, None))  # if one is tainted, all are
            raise

    async def _front(self, call: _Call) -> None:
        await self.ask(0, call)

    async def _others(self, call: _Call) -> None:
        raise_first(await settle({rank: self.ask(rank, call) for rank in range(1, len(self.engines))}))


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
