"""The adapter for SGLang: an engine that receives in place, told bucket by bucket what comes next.

SGLang keeps no record of updates: it answers each call, and forgets. What an update needs to know of it from one call
to the next is kept here: which version it holds and whether that is whole, the epochs seen, the groups it is in, and
whether it sleeps. That it was restarted, or updated by somebody else, shows by the label of its weights, which is set
here last of all, when it is about to serve them.

Of a bucket it says only whether it was loaded, and not even that for every rank; so its weights count as torn from the
first bucket on until the end of its session, and their checksums are compared with the trainer's after that.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from asyncsync import cluster
from asyncsync.buckets import Plan, list_names
from asyncsync.engines.asked import as_engine_error
from asyncsync.engines.base import EngineReceipt
from asyncsync.engines.ranks import WITHIN_CLEANUP
from asyncsync.engines.record import ANOTHER, WeightRecord, all_names
from asyncsync.engines.sglang.calls import Selector, SGLangClient, SGLangError, SGLangFacts
from asyncsync.engines.sglang.clients import client_for
from asyncsync.engines.sglang.groups import Membership
from asyncsync.engines.sglang.layouts import Accepted, LayoutCheck
from asyncsync.engines.sglang.memory import Memory
from asyncsync.engines.sglang.names import ParameterNames
from asyncsync.engines.sglang.policies import Pausing, abilities
from asyncsync.engines.sglang.updates import Loading, Update
from asyncsync.engines.waking import Woken, asleep_and_refused, time_to_wake
from asyncsync.errors import (
    ConnectError,
    EngineError,
    OutOfStepError,
    TaintedEngineError,
    TransferError,
)
from asyncsync.messages import WEIGHTS, Checksums, Contacts, EngineStatus, Layout, Policy, Rendezvous, UpdateOrder
from asyncsync.shield import CLEANUP_TIMEOUT, shielded

T = TypeVar("T")

CALL_TIMEOUT = 60.0
"""Seconds, by default, that one call to an HTTP server may take."""

_log = logging.getLogger("asyncsync")


@dataclass(frozen=True, slots=True)
class _Known:
    """What was found out about an engine, and what is done with it according to that."""

    facts: SGLangFacts
    ranks: int
    pausing: Pausing
    loading: Loading
    check: LayoutCheck


class SGLangEngine:
    """Satisfies :class:`asyncsync.RolloutEngine` for an engine of SGLang's; give it to a synchronizer.

    Weights are loaded over those that are served, while generation is paused. The bytes come over gloo, through host
    memory. Every tensor parallel rank receives all of them, and SGLang slices them as it loads. After an update, where
    that can be done (on a CPU, so far), the checksums of all that each rank holds are compared with the trainer's.

    SGLang tells the names of its parameters, the dtype that it was started with (unless that is ``"auto"``), and no
    shapes. So names that do not fit, and weights of which none has that dtype, are refused before anything is sent; a
    wrong shape, or one dtype of several, is found when it was loaded. The engine is paused then until a whole update
    repairs it: a request that is sent meanwhile waits.

    Policies: all but ``continue`` need nothing of the engine; that one needs ``disable_radix_cache=True`` and
    ``disable_overlap_schedule=True``. ``drain`` waits for requests in flight; while others keep coming, it may have to
    begin anew now and then. An actor whose ``pause_generation`` takes no mode can only ``abort``.

    An actor whose ``update_weights_from_distributed`` takes no ``load_format`` receives tensors one by one: give such a
    synchronizer ``bucket_size=1``, so that each tensor is a bucket of its own. If it takes no ``weight_version`` either
    (and its ``update_weight_version`` no ``abort_all_requests``), the label that answers tell stays what it was.

    SGLang does not tell whether it sleeps: let it sleep by :meth:`release_memory_occupation` here. An update then wakes
    it (``asleep="wake"``): the weights before the first bucket, all else once they are whole, while it is paused; and
    puts it back to sleep if it fails. Once its weights were released it holds no version until it was updated, and with
    ``partial=True`` an update cannot bring what it has lost: it is refused, unless the engine was started with
    ``enable_weights_cpu_backup=True``. Requests that are sent to it while it sleeps wait once an update has paused it;
    before that they would end it. What sends it to sleep by another way must not be followed by an update. Nobody puts
    it back to sleep if the process with this adapter dies in an update. (On a CPU, where all this is tested, SGLang has
    no memory to release: what it does on a GPU was read, in 0.5.23.)

    Use one of these for an engine, and one synchronizer at a time, or several that share a lock.

    Example:
        >>> engines = [asyncsync.SGLangEngine(url) for url in ("http://10.0.0.7:30000", "http://10.0.0.8:30000")]
        >>> asyncsync.WeightSynchronizer(trainer, engines)

    Args:
        engine: An ``sglang.Engine`` of this process; or a Ray actor with SGLang's control calls, such as one whose
            class is or includes :class:`asyncsync.SGLangActor`; or the address of an HTTP server.
        selector: Which models an update is for: ``"target"``, ``"draft"`` or ``"all"``.
        api_key: The server's API key.
        admin_api_key: The server's admin key, if it has one.
        address: This node's address, as the engine's processes reach it; found out if None.
        tp_size: How many tensor parallel ranks it has; asked if None.
        parameter_names: Where SGLang's names are not those of a Llama or Qwen: gives, for a tensor's name in the
            checkpoint, that of the parameter it is loaded into. Checksums are not compared then, and of what is fused
            under other names than q_proj, k_proj, v_proj, gate_proj and up_proj it is yours to send all.
        check_names: Whether names must be known to the engine, and all of its parameters be sent (with
            ``partial=True``: of what it fuses all or nothing), in its dtype if it tells one.
        timeout: Seconds that one call to a server may take.

    Raises:
        TypeError: The engine is none of these.
    """

    def __init__(
        self,
        engine: Any,
        *,
        selector: Selector = "all",
        api_key: str | None = None,
        admin_api_key: str | None = None,
        address: str | None = None,
        tp_size: int | None = None,
        parameter_names: ParameterNames | None = None,
        check_names: bool = True,
        timeout: float = CALL_TIMEOUT,
    ) -> None:
        self._client: SGLangClient = client_for(engine, api_key=api_key, admin_api_key=admin_api_key, timeout=timeout)
        self._selector: Selector = selector
        self._address = address
        self._tp_size = tp_size
        self._parameter_names = parameter_names
        self._check_names = check_names
        self._record = WeightRecord()
        self._known: _Known | None = None
        self._labels: frozenset[str] = frozenset()  # that its weights may have, as far as is known
        self._accepted: Accepted | None = None
        self._groups: dict[int, Membership] = {}  # by source
        self._update: Update | None = None
        self._paused_for: int | None = None  # the epoch of the update it is paused for
        self._memory = Memory(self._client)
        self._woken = Woken()
        self._goes_on_awake = False  # it is to be resumed when it was woken: its weights are whole
        self._lost_weights = False  # they were released, with no copy kept, and not all were brought anew

    def __repr__(self) -> str:
        return f"<SGLangEngine {self._client!r}: {self._record!r}>"

    @property
    def weight_version(self) -> int | None:
        """The version it serves; None before the first update, and while it holds part of one."""
        return self._record.weight_version

    async def aclose(self) -> None:
        """Leave all groups, and hang up. The engine itself goes on; used again, it is connected anew."""
        for group in list(self._groups.values()):
            await self.leave_group(group.rendezvous.connection)
        await self._client.aclose()

    # -- the RolloutEngine protocol -------------------------------------------------------------------------------

    async def describe_engine(self) -> EngineStatus:
        """See :meth:`asyncsync.RolloutEngine.describe_engine`.

        Raises:
            ConnectError: It has no ranks that could receive.
            EngineError: It did not answer, or whether it sleeps is not known.
        """
        self._memory.check()
        return await self._describe()

    async def _describe(self) -> EngineStatus:
        known = await self._know()
        await self._look_whether_same()
        policies, cannot = abilities(known.facts)
        accepted = self._accepted
        status = self._record.status(
            device="cpu",  # where bytes arrive, wherever its weights are
            staged=False,
            whole_tensors=True,
            policies=policies,
            cannot=cannot,
            world_size=known.ranks,
            connections=tuple(group.rendezvous.connection for group in self._groups.values() if group.joined),
            plan_digest=accepted.plan.digest if accepted else None,
            partial=accepted is not None and accepted.partial,
            checks=known.check.checks,
            paused=self._paused_for is not None,
            released=tuple(sorted(self._memory.missing)),
        )
        # The label is a version, if a synchronizer before this one has set it; the next is to be newer.
        labelled = max((int(label) for label in self._labels if label.isdecimal()), default=0)
        return replace(status, newest_version=max(status.newest_version, labelled))

    async def accept_layout(self, layout: Layout) -> None:
        """See :meth:`asyncsync.RolloutEngine.accept_layout`."""
        known = await self._know()
        self._accepted = await self._asked(known.check.accept(layout))

    async def open_group(self, rendezvous: Rendezvous) -> Contacts:
        """See :meth:`asyncsync.RolloutEngine.open_group`."""
        known = await self._know()
        while (before := self._groups.get(rendezvous.source)) is not None:  # another may have opened one meanwhile
            await self.leave_group(before.rendezvous.connection)
        group = self._groups[rendezvous.source] = Membership(self._client, rendezvous, known.ranks)
        try:
            return await group.open(self._address or self._client.address())
        except BaseException:
            await self._leave_aside(group)
            raise

    async def join_group(self, connection: str, contacts: Contacts) -> None:
        """See :meth:`asyncsync.RolloutEngine.join_group`."""
        group = self._group(connection)
        if group is None:
            raise ConnectError(f"the group to join was closed meanwhile {ANOTHER}")
        try:
            await group.join(contacts)
        except BaseException:
            await self._leave_aside(group)
            raise

    async def leave_group(self, connection: str) -> None:
        """See :meth:`asyncsync.RolloutEngine.leave_group`."""
        group = self._group(connection)
        if group is not None:
            del self._groups[group.rendezvous.source]
            await shielded(self._asked(group.leave()), CLEANUP_TIMEOUT)

    async def pause_generation(self, epoch: int, policy: Policy) -> None:
        """See :meth:`asyncsync.RolloutEngine.pause_generation`."""
        pausing = (await self._know()).pausing
        self._record.see(epoch)
        self._memory.check()
        again = self._paused_for == epoch and policy == "abort"
        self._paused_for, self._goes_on_awake = epoch, False
        # Nor may anything go on that has no memory to go on with.
        torn = self._record.tainted is not None or self._update is not None or bool(self._memory.released)
        if again and not torn:
            await self._asked(pausing.hold_newcomers())
        else:
            await self._asked(pausing.hold(policy, torn=torn))

    async def receive_weights(self, order: UpdateOrder) -> EngineReceipt:
        """See :meth:`asyncsync.RolloutEngine.receive_weights`."""
        known = await self._know()
        self._record.check_new(order)
        await self._give_up()
        accepted = self._accepted
        if accepted is None or accepted.plan.digest != order.plan_digest:
            raise OutOfStepError(f"the layout of this update was not agreed on with this engine {ANOTHER}")
        groups = self._groups_of(order, accepted.plan)
        await self._check_memory(order, accepted)
        self._record.see(order.epoch)
        self._woken.begin(order.epoch, self._record.committed_epoch)
        slept = bool(self._memory.released)
        update: Update | None = None
        try:
            async with asyncio.timeout(order.timeout) as limit:
                update = self._update = Update(order, accepted.plan, accepted.names, limit)
                await self._wake(self._memory.released & {WEIGHTS}, time_to_wake(order))
                await self._asked(known.loading.load(update, groups))
        except OutOfStepError:
            self._renew()
            raise
        except TimeoutError as error:
            raise TransferError(f"the weights of update {order.version} did not come in time") from error
        finally:
            if update is not None:
                if not update.received:
                    self._taint_if_touched(update)
                update.ended.set()
        return EngineReceipt(digest=None, slept=slept)

    async def finish_weight_update(self, order: UpdateOrder) -> None:
        """See :meth:`asyncsync.RolloutEngine.finish_weight_update`."""
        update = self._update
        if update is None or update.order.epoch != order.epoch or not update.received:
            raise EngineError(f"there is no received update of epoch {order.epoch} to finish")
        if self._paused_for != order.epoch:
            raise EngineError("an engine whose weights are overwritten in place must be paused for that")
        names = all_names(update.plan)
        try:
            await self._asked((await self._know()).loading.finish(update))
            await self._wake(self._memory.released, time_to_wake(order))
        except BaseException:
            self._record.taint(f"update {order.version} could not be finished", names)
            raise
        self._update = None
        if self._accepted is not None and not self._accepted.partial:
            self._lost_weights = False
        self._record.committed(order, names, None)

    async def abort_weight_update(self, epoch: int, published: int | None) -> EngineStatus:
        """See :meth:`asyncsync.RolloutEngine.abort_weight_update`.

        SGLang itself does not know that it must not serve: it is paused, and what is in flight ends. What the update
        has woken is put back to sleep.
        """
        self._record.end(epoch)
        names = self._all_names()
        await self._give_up()
        self._record.compare(epoch, published, names)
        await self._put_back(epoch)
        if self._record.tainted is not None and self._paused_for is None and not self._memory.missing:
            self._paused_for = epoch
            await self._asked((await self._know()).pausing.hold("abort", torn=True))
        return await self._describe()

    async def resume_generation(self, epoch: int) -> None:
        """See :meth:`asyncsync.RolloutEngine.resume_generation`."""
        self._record.see(epoch)
        if self._record.tainted is None and self._update is None:
            await shielded(self._resume(epoch))
        else:
            raise TaintedEngineError(self._record.tainted or "an update of it is not over")

    # -- the CheckedEngine protocol -------------------------------------------------------------------------------

    async def wanted_checksums(self) -> Checksums:
        """See :meth:`asyncsync.CheckedEngine.wanted_checksums`."""
        return (await self._know()).check.wanted(self._accepted)

    async def compare_checksums(self, epoch: int, checksums: Mapping[str, str]) -> None:
        """See :meth:`asyncsync.CheckedEngine.compare_checksums`."""
        self._record.see(epoch)
        check = (await self._know()).check
        if different := await self._asked(check.differing(self._accepted, checksums)):
            what = f"it holds other weights than were sent: {list_names(different)}"
            self._record.taint(what, self._all_names())
            raise TransferError(f"{what} (is its dtype another? then give the synchronizer dtype=…)")

    # -- sleeping -------------------------------------------------------------------------------------------------

    async def release_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Let the engine sleep: release its memory. No request may run, or SGLang ends.

        Args:
            tags: ``"weights"``, ``"kv_cache"`` or ``"cuda_graph"``; None: all that is not released.

        Raises:
            EngineError: It is released already, SGLang's process would end; or an update is under way.
        """
        self._refuse_in_update()
        known = await self._know()
        if not tags or WEIGHTS in tags:
            await self._asked(known.check.learn_names())
        try:
            await self._asked(self._memory.release(tags))
        finally:
            if WEIGHTS in self._memory.missing:
                self._lose_weights()

    async def resume_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Wake the engine; an update does so by itself. If its weights were released, it must not serve before one.

        Args:
            tags: What to get back; None: all that was released.

        Raises:
            EngineError: It was not released by this adapter: SGLang's process would end; or an update is under way.
        """
        self._refuse_in_update()
        await self._asked(self._memory.resume(tags))
        if self._goes_on_awake and not self._memory.released and self._record.tainted is None:
            await self._asked(self._client.continue_generation())
            self._paused_for, self._goes_on_awake = None, False

    def _refuse_in_update(self) -> None:
        if self._update is not None:
            raise EngineError("an update of the engine is under way: let it sleep or wake before or after it")

    def _lose_weights(self) -> None:
        self._lost_weights = self._lost_weights or self._known is None or self._known.facts.weights_kept is not True
        self._record.lose(self._all_names())

    async def _check_memory(self, order: UpdateOrder, accepted: Accepted) -> None:
        """See whether an update may be written to the engine's memory, once that is awake.

        Raises:
            EngineError: It is asleep and must not be woken, or has lost more than the update brings.
            OutOfStepError: It is another process now, and all its memory is there.
        """
        self._memory.check()
        if self._lost_weights and accepted.partial:
            raise EngineError(
                "its weights were released, and this update brings only some of them (partial=True): start the engine "
                "with enable_weights_cpu_backup=True, or send all"
            )
        if not self._memory.released:
            return
        if not order.wake:
            raise EngineError(asleep_and_refused(self._memory.released))
        if self._paused_for != order.epoch:
            raise EngineError("an engine that sleeps must be paused before it is woken")
        instance = self._record.instance
        await self._look_whether_same()  # to a process that was started since, waking would be the end
        if self._record.instance != instance:
            raise OutOfStepError("the engine was restarted since the last update")

    async def _wake(self, tags: frozenset[str], timeout: float) -> None:
        if tags:
            self._woken.note(tags)
            await self._asked(self._memory.resume(tags, timeout))

    async def _put_back(self, epoch: int) -> None:
        """After an update that failed: release what it has woken. The engine is paused, and nothing runs."""
        record = self._record
        woken = self._woken.to_put_back(epoch, record.committed_epoch, whole=record.tainted is None)
        self._woken.was_put_back(self._memory.released)
        tags = woken - self._memory.released
        if not tags:
            return
        try:
            await self._asked(self._memory.release(tags, WITHIN_CLEANUP))
            self._woken.was_put_back(tags)
        except EngineError as error:
            _log.warning("after a failed update: %s", error)
            record.taint(f"it could not be put back to sleep: {error}", self._all_names())
        else:
            if WEIGHTS in tags:
                self._lose_weights()

    # -- what it does itself --------------------------------------------------------------------------------------

    async def _asked(self, call: Awaitable[T]) -> T:
        """Await calls to SGLang; their errors, of whatever kind, come back as the engine's."""
        return await as_engine_error(call, self._client.tell)

    async def _know(self) -> _Known:
        """What is known of the engine; it is asked if nothing is."""
        if self._known is None:
            facts = await self._asked(self._client.get_facts())
            self._known = _Known(
                facts,
                ranks_of(facts, self._tp_size),
                Pausing(self._client, facts),
                Loading(self._client, facts, self._selector),
                LayoutCheck(
                    self._client,
                    facts,
                    selector=self._selector,
                    check_names=self._check_names,
                    parameter_names=self._parameter_names,
                ),
            )
        return self._known

    def _all_names(self) -> frozenset[str]:
        return all_names(self._accepted.plan if self._accepted else None)

    async def _look_whether_same(self) -> None:
        """Compare the label of the engine's weights with what was set here."""
        label = await self._asked(self._client.get_weight_version())
        if not self._labels:
            self._labels = frozenset({label})
        if label in self._labels:
            return
        self._labels, names = frozenset({label}), self._all_names()
        self._renew()
        if self._record.version is not None:
            self._record.taint("it was restarted, or updated by another", names)

    def _renew(self) -> None:
        """Take the engine for another one, whose groups are gone."""
        self._record.instance = uuid.uuid4().hex
        self._known, self._accepted = None, None
        self._memory, self._woken = Memory(self._client), Woken()
        self._goes_on_awake = self._lost_weights = False
        self._groups.clear()

    def _group(self, connection: str) -> Membership | None:
        return next((group for group in self._groups.values() if group.rendezvous.connection == connection), None)

    def _groups_of(self, order: UpdateOrder, plan: Plan) -> list[Membership]:
        groups = [group for connection in order.connections if (group := self._group(connection)) and group.joined]
        if len(groups) != len(order.connections) or len(groups) not in (1, max(1, len(plan.parts))):
            raise OutOfStepError(f"this engine is not in the groups that the order names {ANOTHER}")
        return groups

    async def _leave_aside(self, group: Membership) -> None:
        """Leave a group that was not joined, whatever becomes of the engine."""
        if self._groups.get(group.rendezvous.source) is group:
            del self._groups[group.rendezvous.source]
        try:
            await shielded(group.leave(), CLEANUP_TIMEOUT)
        except (SGLangError, TimeoutError, cluster.ActorLostError) as error:
            _log.info("leaving a group: %s", error)

    async def _give_up(self) -> None:
        """End an update that will not be finished."""
        if (update := self._update) is not None:
            self._taint_if_touched(update)
            await self._asked((await self._know()).loading.give_up(update))
            if self._update is update:
                self._update = None

    def _taint_if_touched(self, update: Update) -> None:
        if update.touched:
            what = "finished" if update.received else "received whole"
            self._record.taint(f"update {update.order.version} was not {what}", all_names(update.plan))

    async def _resume(self, epoch: int) -> None:
        loading, version = (await self._know()).loading, self._record.version
        label, before = str(version), self._labels
        if version is not None and before != {label}:
            self._labels |= {label}  # until it is known which of them it has
            labelled = await self._asked(loading.label(label, self._groups.values()))
            self._labels = frozenset({label}) if labelled else before
        if epoch != self._record.epoch:
            return  # a newer update has paused it meanwhile
        self._goes_on_awake = bool(self._memory.released)
        if not self._goes_on_awake:  # else it was not updated: who waits would run into memory that is not there
            await self._asked(self._client.continue_generation())
            self._paused_for = None


def ranks_of(facts: SGLangFacts, tp_size: int | None) -> int:
    """How many ranks an engine has that receive.

    Raises:
        ConnectError: It does not tell, or has others than those of tensor parallelism.
    """
    ranks = tp_size or facts.tensor_parallel_size
    if ranks is None:
        raise ConnectError("this engine does not tell how many tensor parallel ranks it has: give tp_size")
    for many, what in ((facts.data_parallel_size, "data"), (facts.pipeline_parallel_size, "pipeline")):
        if (many or 1) > 1:
            raise ConnectError(f"SGLang takes no weights over a group with {what} parallelism (it has {many})")
    return ranks
