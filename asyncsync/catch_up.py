"""Bringing an engine that joins, or was restarted, to the version that the others serve: from one of them.

The trainer is not asked. Its weights may have moved on since that version was published, and it may be in the middle of
a step, or asleep. An engine that serves the version has it whole, and goes on serving while it gives it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from typing import cast

from asyncsync.connection import JOIN_TIMEOUT, OPERATION_TIMEOUT, Connection, engine_ends, is_acquainted
from asyncsync.engines.base import EngineReceipt, GivingEngine
from asyncsync.errors import EngineError, TransferError, WeightUpdateError, WeightUpdateTimeoutError
from asyncsync.fanout import race, settle
from asyncsync.fleet import LATE_TIMEOUT, Fleet, Member
from asyncsync.messages import PEER, EngineStatus, Policy, Rendezvous, Store, UpdateOrder
from asyncsync.shield import CLEANUP_TIMEOUT, shielded
from asyncsync.transports.forming import form_group

_log = logging.getLogger("asyncsync")


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The version that engines serve.

    Attributes:
        version: Its number.
        digest: Digest of its weights.
        plan_digest: The layout it came in.
    """

    version: int
    digest: str
    plan_digest: str


async def catch_up(
    joiner: Member,
    givers: Sequence[Member],
    published: Published,
    connection: Connection,
    policy: Policy,
    timeout: float,
) -> bool:
    """Bring an engine to the published version.

    Args:
        joiner: The engine that is behind.
        givers: Engines that serve the version; the first one that can gives it.
        published: The version.
        connection: Knows the layout.
        policy: What is done with requests in flight at the joiner.
        timeout: Seconds for the whole.

    Returns:
        Whether it holds the version now; False if nobody could give it.

    Raises:
        EngineError: The joiner failed.
        PlanError: The weights do not fit it.
        WeightUpdateError: Every giver failed; the last one's error.
    """
    layout = connection.layout
    if layout is None or layout.digest != published.plan_digest:
        return False  # the next update comes in another layout
    status = (await Fleet([joiner]).describe(policy))[joiner]
    if holds(status, published):
        await joiner.call(lambda engine: engine.resume_generation(connection.next_epoch([status])), CLEANUP_TIMEOUT)
        return True
    if status.released:
        return False  # only an update wakes an engine
    if status.newest_version >= published.version:
        return False  # it has seen this number, of another synchronizer's or in part: it needs a whole update
    if status.whole_tensors and not status.staged:
        return False  # it receives by itself, and does not confirm what: an update can compare that
    if not is_acquainted(status, layout):
        await joiner.call(lambda engine: engine.accept_layout(layout))
    failure: WeightUpdateError | None = None
    for giver in givers:
        try:
            giving = await giver.call(lambda engine: engine.describe_engine(), min(CLEANUP_TIMEOUT, timeout / 4))
            if not giving.gives or giving.world_size > 1 or not holds(giving, published):
                continue
            if (store := connection.store_of(joiner, status)) is not None and store not in giving.stores:
                continue
            share = timeout / 2  # if it hangs, there is time for another
            try:
                async with asyncio.timeout(share) as limit:
                    await _give(giver, giving, joiner, status, published, connection, policy, share, store)
            except TimeoutError as error:
                if not limit.expired():
                    raise
                late = f"{giver.name} did not give its weights to {joiner.name} within {share:.3g} s"
                raise WeightUpdateTimeoutError(late) from error
        except WeightUpdateError as error:
            if isinstance(error, EngineError) and error.engine == joiner.name:
                raise
            _log.warning("%s could not give its weights to %s: %s", giver.name, joiner.name, error)
            failure = error
        else:
            _log.info("%s holds version %d now, from %s", joiner.name, published.version, giver.name)
            return True
    if failure is not None:
        raise failure
    return False


def holds(status: EngineStatus, published: Published) -> bool:
    """Whether an engine holds the published weights, under whatever number."""
    return status.tainted is None and status.holds.get(published.plan_digest) == published.digest


async def _give(
    giver: Member,
    giving: EngineStatus,
    joiner: Member,
    taking: EngineStatus,
    published: Published,
    connection: Connection,
    policy: Policy,
    timeout: float,
    store: Store | None,
) -> None:
    members = {giver: giving} if store is not None else {giver: giving, joiner: taking}
    rendezvous = Rendezvous(
        connection=secrets.token_hex(16),
        backend=connection.choose_backend([giving, taking]),
        transport=store or "broadcast",
        folder=connection.folder or "" if store == "folder" else "",
        rank=0,
        world_size=sum(status.world_size for status in members.values()),
        join_timeout=min(JOIN_TIMEOUT, timeout),
        operation_timeout=min(OPERATION_TIMEOUT, timeout),
        source=PEER,
    )
    order = UpdateOrder(
        epoch=connection.next_epoch([giving, taking]),
        version=published.version,
        connections=(rendezvous.connection,),
        plan_digest=published.plan_digest,
        policy=policy,
        base_epoch=None,
        timeout=timeout,
        lease=timeout,
    )
    given = replace(order, version=giving.weight_version or 0)  # the number that it knows them by
    done = False
    try:
        ends = engine_ends(members, rendezvous, first_rank=0, timeout=rendezvous.join_timeout)
        await form_group(ends)
        await joiner.call(lambda engine: engine.pause_generation(order.epoch, policy))
        giving_away = giver.call(lambda engine: cast("GivingEngine", engine).give_weights(given))
        if store is not None:
            receipts = await _fetched(giver, giving_away, joiner, order)
        else:
            receipts = await race(
                {giver: giving_away, joiner: joiner.call(lambda engine: engine.receive_weights(order))}
            )
        _compare(receipts, published)
        await joiner.call(lambda engine: engine.finish_weight_update(order))
        await joiner.call(lambda engine: engine.resume_generation(order.epoch))
        done = True
    finally:
        await shielded(_part(giver, joiner, order, done=done))


async def _fetched(
    giver: Member, giving_away: Awaitable[EngineReceipt], joiner: Member, order: UpdateOrder
) -> dict[Member, EngineReceipt]:
    """One after the other: what the joiner fetches must be there."""
    given = await giving_away
    order = replace(order, stored=tuple(given.stored[name] for name in order.connections))
    try:
        return {giver: given, joiner: await joiner.call(lambda engine: engine.receive_weights(order))}
    finally:
        for stored in order.stored:
            stored.objects.clear()


def _compare(receipts: dict[Member, EngineReceipt], published: Published) -> None:
    for member, receipt in receipts.items():
        if receipt.digest != published.digest:
            raise TransferError(
                f"{member.name} does not hold what was published as version {published.version}: "
                f"digest {receipt.digest}, published {published.digest}"
            )


async def _part(giver: Member, joiner: Member, order: UpdateOrder, *, done: bool) -> None:
    """Undo what is left of it at both ends."""
    (group,) = order.connections
    if not done:
        behind = {giver: None, joiner: order.version}  # the joiner must not serve what it was to be brought from

        def abort(member: Member) -> Awaitable[EngineStatus]:
            return member.call(lambda engine: engine.abort_weight_update(order.epoch, behind[member]), LATE_TIMEOUT)

        status = (await settle({member: abort(member) for member in behind}))[joiner]
        if isinstance(status, EngineStatus) and status.weight_version == order.version:  # it came as far as that
            await settle({joiner: joiner.call(lambda one: one.resume_generation(order.epoch), CLEANUP_TIMEOUT)})
    ends = (giver, joiner)
    timeout = CLEANUP_TIMEOUT if done else LATE_TIMEOUT
    await settle({member: member.call(lambda engine: engine.leave_group(group), timeout) for member in ends})
