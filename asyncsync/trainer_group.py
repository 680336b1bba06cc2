"""Several trainer ranks, conducted as one trainer.

The first rank is the *source*: it sends to the engines. The others bring it the shards that it lacks, bucket by bucket,
each through a group of its own with the source. These groups are the library's: the training step's own groups are
never used, so nothing that is sent can get between two of its collectives. A rank whose shards others hold too brings
nothing, and takes no part in sending. If the tensors are put together by a gathering of the trainer's own, all ranks
take part in that, and none brings anything.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

from asyncsync import cluster
from asyncsync.buckets import TensorSpec, list_names
from asyncsync.errors import AsyncSyncError, ConnectError, OutOfStepError, PlanError, TrainerError
from asyncsync.fanout import race, settle
from asyncsync.messages import Contacts, ReadOptions, Rendezvous, SendReceipt, TrainerStatus, UpdateOrder
from asyncsync.rank_worker import RankWorker, shard_connection
from asyncsync.shards import Holding
from asyncsync.shield import shielded
from asyncsync.trainer import TRAINER_METHODS, Rank, RemoteTrainer, Trainer
from asyncsync.transports.forming import End, form_group

T = TypeVar("T")


class TrainerGroup:
    """Satisfies :class:`~asyncsync.trainer.Trainer` for several ranks.

    Args:
        ranks: All ranks of the trainer, or of one pipeline stage of it; the first is the source.
        first: The first one's number, in what errors call them.
    """

    def __init__(self, ranks: Sequence[Rank], first: int = 0) -> None:
        self._ranks = tuple(ranks)
        self._first = first
        self._agreed: tuple[object, ...] | None = None
        self._bringers: tuple[int, ...] = ()
        self._gathers = False
        self._shards: str | None = None
        self._statuses: Sequence[TrainerStatus] = ()
        self._groups: set[str] = set()

    def __repr__(self) -> str:
        return f"<TrainerGroup of {len(self._ranks)} ranks, {len(self._bringers)} of them bring shards>"

    async def begin_update(self) -> bool:
        """See :class:`~asyncsync.trainer.Trainer`. All ranks have hooks, or none should: they are called together."""
        return any(await self._all(self._everyone, lambda _, rank: rank.begin_update()))

    async def end_update(self) -> None:
        """See :class:`~asyncsync.trainer.Trainer`. Every rank is heard; the first error is raised."""
        ended = {rank: self._call(rank, lambda _, one: one.end_update()) for rank in self._everyone}
        _raise_first(await settle(ended))

    @property
    def _everyone(self) -> range:
        return range(len(self._ranks))

    @property
    def _senders(self) -> Sequence[int]:
        """The ranks that have a part in sending, the source first."""
        return self._everyone if self._gathers else (0, *self._bringers)

    async def describe_weights(self, options: ReadOptions, known_digest: str | None) -> TrainerStatus:
        """See :class:`~asyncsync.trainer.Trainer`.

        Raises:
            PlanError: The ranks disagree on a tensor, by name; or shards do not tile their tensor.
            TrainerError: A rank failed, by number.
        """
        # Of a snapshot only those know who have a part in sending it; the others are as they were when it was taken.
        asked = self._everyone if options.snapshot is None else self._senders
        said = await self._all(asked, lambda _, rank: rank.describe_weights(options, known_digest))
        known = dict(enumerate(self._statuses)) | dict(zip(asked, said, strict=True))
        statuses = self._statuses = [known[rank] for rank in self._everyone]
        if len({status.plan_digest for status in statuses}) > 1:
            statuses = await self._all(self._everyone, lambda _, rank: rank.describe_weights(options, None))
            _refuse_disagreement([status.specs or () for status in statuses], self._first)
        if len({status.gathers for status in statuses}) > 1:
            raise PlanError("the trainer's ranks disagree: some give GatheredWeights, and some do not")
        source = statuses[0]
        instances = tuple(status.instance for status in statuses)
        holdings = tuple(status.holding for status in statuses)
        self._gathers = source.gathers
        agreed = (instances, source.plan_digest, holdings)
        told = [(source.plan_digest, number, len(statuses)) for number in self._everyone]
        if agreed != self._agreed or [status.shared for status in statuses] != told:  # another may have told them since
            self._agreed = None
            await self._share(holdings)
            self._agreed = agreed
        if not self._is_connected(statuses):
            self._shards = None
        return replace(
            source,
            instance="+".join(instances),
            connections=() if self._bringers and self._shards is None else source.connections,
            epoch=max(status.epoch for status in statuses),
            control_group=all(status.control_group for status in statuses),
            holding=None,
        )

    async def _share(self, holdings: tuple[Holding | None, ...]) -> None:
        self._bringers = ()
        found = await self._all(self._everyone, lambda number, rank: rank.share_holdings(number, holdings))
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
        """See :class:`~asyncsync.trainer.Trainer`. Connects the ranks with each other first, if they are not."""
        if self._bringers and self._shards is None:
            await self._connect_ranks(rendezvous)
        self._groups.add(rendezvous.connection)
        return await self._call(0, lambda _, source: source.open_trainer_group(rendezvous))

    async def _connect_ranks(self, rendezvous: Rendezvous) -> None:
        shards = secrets.token_hex(16)
        rendezvous = replace(rendezvous, transport="broadcast")  # however the engines are reached
        try:
            for rank in self._bringers:
                await self._connect_shards(rank, replace(rendezvous, connection=shard_connection(shards, rank)))
        except BaseException:
            await shielded(self._leave_each_other(shards))
            raise
        self._shards = shards  # now that all are connected (R13)

    async def _connect_shards(self, bringer: int, rendezvous: Rendezvous) -> None:
        ranks = (bringer, 0)  # whoever sends is rank 0 of a group
        seats = {
            rank: replace(rendezvous, shards_of=bringer, rank=position, world_size=2)
            for position, rank in enumerate(ranks)
        }

        def end(rank: int) -> End:
            return End(
                open=lambda: self._call(rank, lambda _, one: one.open_trainer_group(seats[rank])),
                join=lambda contacts: self._call(
                    rank, lambda _, one: one.join_trainer_group(rendezvous.connection, contacts)
                ),
            )

        await form_group({rank: end(rank) for rank in ranks})

    async def join_trainer_group(self, connection: str, contacts: Contacts) -> None:
        """See :class:`~asyncsync.trainer.Trainer`."""
        await self._call(0, lambda _, source: source.join_trainer_group(connection, contacts))

    async def leave_trainer_group(self, connection: str) -> None:
        """See :class:`~asyncsync.trainer.Trainer`. With the last group the ranks leave each other, too."""
        self._groups.discard(connection)
        left = {"engines": self._call(0, lambda _, source: source.leave_trainer_group(connection))}
        if not self._groups and self._shards is not None:
            left["ranks"] = self._leave_each_other(self._shards)
            self._shards = None
        _raise_first(await settle(left))

    async def _leave_each_other(self, shards: str) -> None:
        """Leave the groups that shards come through, at both ends; all are tried, and the first error is raised."""

        def leave(end: int, group: str) -> Awaitable[None]:
            return self._call(end, lambda _, rank: rank.leave_trainer_group(group))

        groups = [(end, shard_connection(shards, rank)) for rank in self._bringers for end in (0, rank)]
        _raise_first(await settle({(end, group): leave(end, group) for end, group in groups}))

    async def send_weights(self, order: UpdateOrder) -> SendReceipt | None:
        """See :class:`~asyncsync.trainer.Trainer`.

        Raises:
            OutOfStepError: The ranks are not connected with each other (any more). Nothing was sent.
        """
        orders = self._orders(order)
        receipts = await self._all(self._senders, lambda number, rank: rank.send_weights(orders[number]))
        return receipts[0]

    async def snapshot_weights(self, order: UpdateOrder) -> None:
        """See :class:`~asyncsync.trainer.Trainer`. Each rank copies what it holds.

        Raises:
            OutOfStepError: The ranks are not connected with each other (any more). Nothing was copied.
        """
        orders = self._orders(order)
        await self._all(self._senders, lambda number, rank: rank.snapshot_weights(orders[number]))

    async def drop_snapshot(self, snapshot: str) -> None:
        """See :class:`~asyncsync.trainer.Trainer`."""
        dropped = {rank: self._call(rank, lambda _, one: one.drop_snapshot(snapshot)) for rank in self._everyone}
        _raise_first(await settle(dropped))

    def _orders(self, order: UpdateOrder) -> list[UpdateOrder]:
        """What is ordered to each rank: only the source's order names groups of engines."""
        if self._bringers:
            if self._shards is None:
                raise OutOfStepError("the trainer's ranks are not connected with each other")
            order = replace(order, shards=self._shards)
        return [order if rank == 0 else replace(order, connections=()) for rank in self._everyone]

    async def publish_weights(self, epoch: int, digest: str, sources: int) -> None:
        """See :class:`~asyncsync.trainer.Trainer`."""
        await self._call(0, lambda _, source: source.publish_weights(epoch, digest, sources))

    async def abort_send(self, epoch: int) -> None:
        """See :class:`~asyncsync.trainer.Trainer`."""
        aborted = {rank: self._call(rank, lambda _, one: one.abort_send(epoch)) for rank in self._senders}
        _raise_first(await settle(aborted))

    async def _all(self, ranks: Sequence[int], call: Callable[[int, Rank], Awaitable[T]]) -> list[T]:
        """Call ranks together, each with its number; the first failure ends the other calls."""
        results = await race({rank: self._call(rank, call) for rank in ranks})
        return [results[rank] for rank in ranks]

    async def _call(self, rank: int, call: Callable[[int, Rank], Awaitable[T]]) -> T:
        """Call one rank; its errors say which it was."""
        name = f"trainer rank {self._first + rank}"
        try:
            return await call(rank, self._ranks[rank])
        except (PlanError, ConnectError) as error:
            raise error.named(name) from error
        except AsyncSyncError:
            raise
        except Exception as error:
            raise TrainerError(cluster.how_it_failed(name, error)) from error


def _raise_first(results: Mapping[Any, object]) -> None:
    for result in results.values():
        if isinstance(result, Exception):
            raise result


def _refuse_disagreement(specs: Sequence[tuple[TensorSpec, ...]], number: int) -> None:
    first = {spec.name: spec for spec in specs[0]}
    for rank, others in enumerate(specs[1:], start=number + 1):
        theirs = {spec.name: spec for spec in others}
        problems = {
            f"holds tensors that rank {number} does not": theirs.keys() - first.keys(),
            f"lacks tensors that rank {number} holds": first.keys() - theirs.keys(),
            "holds in another shape, in another dtype or tied otherwise": {
                name for name in first.keys() & theirs.keys() if first[name] != theirs[name]
            },
        }
        found = [f"{what}: {list_names(names)}" for what, names in problems.items() if names]
        if found or list(first) != list(theirs):
            names = sorted(set().union(*problems.values()))
            what = "; ".join(found) or "holds the same tensors in another order"
            stages = "" if first.keys() & theirs.keys() else " (give each stage of a pipeline as a list of its own)"
            raise PlanError(f"the trainer's ranks disagree: rank {rank} {what}{stages}", names=names)


def as_sources(candidate: Any, *, offload: bool | None) -> tuple[tuple[Trainer, ...], RankWorker | None]:
    """The sources behind whatever a user may pass as a trainer; and the rank made for it here, if one was.

    Raises:
        TypeError: It is neither a trainer nor weights.
        ValueError: A rank is given twice, or there are none.
    """
    if candidate == []:
        raise ValueError("the trainer is an empty list: give its ranks, or the weights")
    if isinstance(candidate, list | tuple) and any(_is_rank(each) or _is_stage(each) for each in candidate):
        staged = any(_is_stage(each) for each in candidate)
        stages = [list(each) if _is_stage(each) else [each] for each in candidate] if staged else [list(candidate)]
        everyone = [rank for stage in stages for rank in stage]
        keys = [cluster.actor_key(rank) for rank in everyone]
        for index, key in enumerate(keys):
            if key in keys[:index]:
                raise ValueError(f"trainer rank {index} is given twice: it is rank {keys.index(key)} too")
        if len(everyone) == 1:
            return (_as_rank(everyone[0]),), None
        firsts = itertools.accumulate((len(stage) for stage in stages), initial=0)
        return tuple(
            TrainerGroup([_as_rank(rank) for rank in stage], first)
            for stage, first in zip(stages, firsts, strict=False)
        ), None
    if cluster.is_actor_class(candidate):
        raise TypeError(f"{cluster.actor_class_name(candidate)} is an actor class, no actor: call its .remote(…) first")
    if _is_rank(candidate):
        return (_as_rank(candidate),), None
    rank = RankWorker(candidate, offload=offload)
    return (rank,), rank


def _is_stage(candidate: Any) -> bool:
    return isinstance(candidate, list | tuple) and bool(candidate) and all(_is_rank(each) for each in candidate)


def _as_rank(candidate: Any) -> Rank:
    return RemoteTrainer(candidate) if _is_remote(candidate) else cast("Rank", candidate)


def _is_rank(candidate: Any) -> bool:
    here = not isinstance(candidate, type) and all(hasattr(candidate, name) for name in TRAINER_METHODS)
    return here or _is_remote(candidate)


def _is_remote(candidate: Any) -> bool:
    return cluster.is_actor(candidate) or hasattr(getattr(candidate, "describe_weights", None), "remote")
