"""Several trainer ranks, conducted as one trainer.

The first rank is the *source*: it sends to the engines. The others bring it the shards that it lacks, bucket by bucket,
each through a group of its own with the source. These groups are the library's: the training step's own groups are
never used, so nothing that is sent can get between two of its collectives. A rank whose shards others hold too brings
nothing, and takes no part in updates.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from asyncsync import cluster
from asyncsync.buckets import TensorSpec, list_names
from asyncsync.errors import AsyncSyncError, ConnectError, OutOfStepError, PlanError, TrainerError
from asyncsync.fanout import race, settle
from asyncsync.messages import Contacts, ReadOptions, Rendezvous, SendReceipt, TrainerStatus, UpdateOrder
from asyncsync.shards import Holding
from asyncsync.shield import shielded
from asyncsync.trainer import Rank, RemoteTrainer, Trainer, TrainerRank, shard_connection

T = TypeVar("T")


class TrainerGroup:
    """Satisfies :class:`~asyncsync.trainer.Trainer` for several ranks.

    Args:
        ranks: All ranks of the trainer; the first is the source.
    """

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self._ranks = tuple(ranks)
        self._agreed: tuple[object, ...] | None = None
        self._bringers: tuple[int, ...] = ()
        self._shards: str | None = None

    def __repr__(self) -> str:
        return f"<TrainerGroup of {len(self._ranks)} ranks, {len(self._bringers)} of them bring shards>"

    async def describe_weights(self, options: ReadOptions, known_digest: str | None) -> TrainerStatus:
        """See :class:`~asyncsync.trainer.Trainer`.

        Raises:
            PlanError: The ranks disagree on a tensor, by name; or shards do not tile their tensor.
            TrainerError: A rank failed, by number.
        """
        everyone = range(len(self._ranks))
        statuses = await self._all(everyone, lambda _, rank: rank.describe_weights(options, known_digest))
        if len({status.plan_digest for status in statuses}) > 1:
            statuses = await self._all(everyone, lambda _, rank: rank.describe_weights(options, None))
            _refuse_disagreement([status.specs or () for status in statuses])
        source = statuses[0]
        instances = tuple(status.instance for status in statuses)
        holdings = tuple(status.holding for status in statuses)
        agreed = (instances, source.plan_digest, holdings)
        if agreed != self._agreed:
            self._agreed = None
            await self._share(holdings)
            self._agreed = agreed
        return replace(
            source,
            instance="+".join(instances),
            connection=source.connection if self._is_connected(statuses) else None,
            epoch=max(status.epoch for status in statuses),
            control_group=all(status.control_group for status in statuses),
            holding=None,
        )

    async def _share(self, holdings: tuple[Holding | None, ...]) -> None:
        self._bringers = ()
        found = await self._all(range(len(self._ranks)), lambda number, rank: rank.share_holdings(number, holdings))
        self._bringers = found[0]

    def _is_connected(self, statuses: Sequence[TrainerStatus]) -> bool:
        if not self._bringers:
            return True
        return self._shards is not None and all(
            shard_connection(self._shards, rank) in statuses[end].shard_connections
            for rank in self._bringers
            for end in (0, rank)
        )

    async def open_trainer_group(self, rendezvous: Rendezvous) -> Contacts:
        """See :class:`~asyncsync.trainer.Trainer`. Connects the ranks with each other first."""
        shards = secrets.token_hex(16)
        self._shards = None  # until all are connected (R13)
        try:
            for rank in self._bringers:
                await self._connect_shards(rank, replace(rendezvous, connection=shard_connection(shards, rank)))
        except BaseException:
            await shielded(self._leave(shards=shards))
            raise
        self._shards = shards
        return await self._call(0, lambda _, source: source.open_trainer_group(rendezvous))

    async def _connect_shards(self, bringer: int, rendezvous: Rendezvous) -> None:
        ends = (bringer, 0)  # whoever sends is rank 0 of a group
        seats = {
            end: replace(rendezvous, shards_of=bringer, rank=position, world_size=2)
            for position, end in enumerate(ends)
        }
        opened = await self._all(ends, lambda end, rank: rank.open_trainer_group(seats[end]))
        contacts = opened[0] | opened[1]
        await self._all(ends, lambda _, rank: rank.join_trainer_group(rendezvous.connection, contacts))

    async def join_trainer_group(self, connection: str, contacts: Contacts) -> None:
        """See :class:`~asyncsync.trainer.Trainer`."""
        await self._call(0, lambda _, source: source.join_trainer_group(connection, contacts))

    async def leave_trainer_group(self, connection: str) -> None:
        """See :class:`~asyncsync.trainer.Trainer`. The ranks leave each other, too."""
        shards, self._shards = self._shards, None
        await self._leave(connection, shards=shards)

    async def _leave(self, connection: str | None = None, *, shards: str | None) -> None:
        """Leave groups, at every end; all are tried, and the first error is raised."""
        groups = [] if connection is None else [(0, connection)]
        if shards is not None:
            groups += [(end, shard_connection(shards, rank)) for rank in self._bringers for end in (0, rank)]

        def leave(end: int, group: str) -> Awaitable[None]:
            return self._call(end, lambda _, rank: rank.leave_trainer_group(group))

        _raise_first(await settle({(end, group): leave(end, group) for end, group in groups}))

    async def send_weights(self, order: UpdateOrder) -> SendReceipt | None:
        """See :class:`~asyncsync.trainer.Trainer`.

        Raises:
            OutOfStepError: The ranks are not connected with each other (any more). Nothing was sent.
        """
        if self._bringers:
            if self._shards is None:
                raise OutOfStepError("the trainer's ranks are not connected with each other")
            order = replace(order, shards=self._shards)
        receipts = await self._all((0, *self._bringers), lambda _, rank: rank.send_weights(order))
        return receipts[0]

    async def abort_send(self, epoch: int) -> None:
        """See :class:`~asyncsync.trainer.Trainer`."""
        ranks = (0, *self._bringers)
        _raise_first(await settle({rank: self._call(rank, lambda _, one: one.abort_send(epoch)) for rank in ranks}))

    async def _all(self, ranks: Sequence[int], call: Callable[[int, Rank], Awaitable[T]]) -> list[T]:
        """Call ranks together, each with its number; the first failure ends the other calls."""
        results = await race({rank: self._call(rank, call) for rank in ranks})
        return [results[rank] for rank in ranks]

    async def _call(self, rank: int, call: Callable[[int, Rank], Awaitable[T]]) -> T:
        """Call one rank; its errors say which it was."""
        try:
            return await call(rank, self._ranks[rank])
        except cluster.ActorLostError as error:
            raise TrainerError(f"trainer rank {rank} is gone: {cluster.how_it_was_lost(error)}") from error
        except (PlanError, ConnectError) as error:
            named = f"trainer rank {rank}: {error}"
            if isinstance(error, PlanError):
                raise PlanError(named, names=error.names) from error
            raise ConnectError(named) from error
        except AsyncSyncError:
            raise
        except Exception as error:
            raise TrainerError(f"trainer rank {rank} failed: {type(error).__name__}: {error}") from error


def _raise_first(results: Mapping[Any, object]) -> None:
    for result in results.values():
        if isinstance(result, Exception):
            raise result


def _refuse_disagreement(specs: Sequence[tuple[TensorSpec, ...]]) -> None:
    first = {spec.name: spec for spec in specs[0]}
    for rank, others in enumerate(specs[1:], start=1):
        theirs = {spec.name: spec for spec in others}
        problems = {
            "holds tensors that rank 0 does not": theirs.keys() - first.keys(),
            "lacks tensors that rank 0 holds": first.keys() - theirs.keys(),
            "holds in another shape, in another dtype or tied otherwise": {
                name for name in first.keys() & theirs.keys() if first[name] != theirs[name]
            },
        }
        found = [f"{what}: {list_names(names)}" for what, names in problems.items() if names]
        if found or list(first) != list(theirs):
            names = sorted(set().union(*problems.values()))
            what = "; ".join(found) or "holds the same tensors in another order"
            raise PlanError(f"the trainer's ranks disagree: rank {rank} {what}", names=names)


def as_trainer(candidate: Any, *, offload: bool | None) -> tuple[Trainer, TrainerRank | None]:
    """The trainer behind whatever a user may pass as one; and the rank made for it here, if one was.

    Raises:
        TypeError: It is neither a trainer nor weights.
        ValueError: A rank is given twice.
    """
    if isinstance(candidate, list | tuple) and candidate and _is_rank(candidate[0]):
        keys = [cluster.actor_key(rank) for rank in candidate]
        for index, key in enumerate(keys):
            if key in keys[:index]:
                raise ValueError(f"trainer rank {index} is given twice: it is rank {keys.index(key)} too")
        ranks = [_as_rank(rank) for rank in candidate]
        return (TrainerGroup(ranks) if len(ranks) > 1 else ranks[0]), None
    if cluster.is_actor_class(candidate):
        raise TypeError(f"{cluster.actor_class_name(candidate)} is an actor class, no actor: call its .remote(…) first")
    if _is_rank(candidate):
        return _as_rank(candidate), None
    rank = TrainerRank(candidate, offload=offload)
    return rank, rank


def _as_rank(candidate: Any) -> Rank:
    return candidate if isinstance(candidate, TrainerRank) else RemoteTrainer(candidate)


def _is_rank(candidate: Any) -> bool:
    return (
        isinstance(candidate, TrainerRank)
        or cluster.is_actor(candidate)
        or hasattr(getattr(candidate, "describe_weights", None), "remote")
    )
