"""vLLM's own ``nccl`` backend in an engine's workers, as its conductor sees it: it receives in place, bucket by bucket.

Nothing of asyncsync runs there. What an update needs to know of the engine from one call to the next is kept here.
vLLM's session (:mod:`~asyncsync.engines.vllm.sessions`) spans the transfer, in the pause. One step of the engine in
that time would end its process: so from the first bucket on the engine is torn until a whole update was finished, and
is not resumed.

What this relies on in vLLM (read in 0.32.0, and never run on a GPU):

- Packed, one ``update_weights`` receives its tensors in one broadcast each time their bytes *exceed*
  ``packed_buffer_size_bytes``, and the rest in a last one. Nothing of that size is allocated. So with a size that is
  never exceeded, one call is one broadcast of all its tensors' bytes, in order, with nothing in between.
- A broadcast is read as uint8 and cut into views: of one dtype, each tensor is aligned to it. No tensors, no broadcast.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from asyncsync.buckets import Bucket, Plan, list_names
from asyncsync.engines.base import EngineReceipt
from asyncsync.engines.record import ANOTHER, WeightRecord, all_names
from asyncsync.engines.vllm.clients import PauseMode, VLLMClient, asked, asked_to_connect
from asyncsync.engines.vllm.pauses import PauseNote
from asyncsync.engines.vllm.sessions import CALL_TIMEOUT, OUT_OF_STEP, Session
from asyncsync.errors import AsyncSyncError, ConnectError, EngineError, OutOfStepError, PlanError, TransferError
from asyncsync.messages import PROTOCOL_VERSION, Contacts, EngineStatus, Layout, Policy, Rendezvous, UpdateOrder
from asyncsync.shield import shielded
from asyncsync.transports.pynccl import COUNT, STORE, endpoint
from asyncsync.transports.sent_count import SentWatch, watch_source

_Shapes: TypeAlias = Mapping[str, tuple[int, ...]]

NEVER_EXCEEDED = 2**62
"""For ``packed_buffer_size_bytes``: whatever is asked for in one call comes in one broadcast."""

FORM_TIMEOUT = 60.0
"""Seconds, beside those for all to come, within which the engine must have made its communicator."""

_log = logging.getLogger("asyncsync")


@dataclass(eq=False, slots=True)
class _Group:
    """The group the engine is in, or is joining."""

    rendezvous: Rendezvous
    watch: SentWatch | None = None
    received: int = 0  # buckets
    stands: bool = False  # joined, and at the same bucket as its source


@dataclass(eq=False, slots=True)
class _Update:
    order: UpdateOrder
    plan: Plan
    limit: asyncio.Timeout
    touched: bool = False  # whether vLLM was asked to load anything of it
    received: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class NCCLWorkers:
    """Satisfies :class:`~asyncsync.engines.vllm.engine.Workers` for workers with vLLM's ``nccl`` backend.

    Args:
        client: Calls the engine.
    """

    warning = "; but if an update was broken off since its driver died, that would end it: restart it instead"

    def __init__(self, client: VLLMClient) -> None:
        self._client = client
        self._record = WeightRecord()
        self._pause = PauseNote(self._record)
        self._ranks: int | None = None
        self._labels: frozenset[str] = frozenset()  # that its weights may have, as far as is known
        self._plan: Plan | None = None
        self._loaded: _Shapes | None = None  # what fits: it was loaded
        self._group: _Group | None = None
        self._update: _Update | None = None
        self._session = Session(client)

    def __repr__(self) -> str:
        return f"{self._ranks or 'no'} ranks, nccl, {self._record!r}"

    @property
    def connected(self) -> bool:
        """Whether they are in a group, or may be joining one still."""
        return self._group is not None or not self._session.answered

    async def describe_engine(self) -> EngineStatus:
        """See :meth:`asyncsync.RolloutEngine.describe_engine`."""
        await self._session.settle()
        status = await self._describe()
        await self._session.refuse_out_of_step()
        return status

    async def _describe(self) -> EngineStatus:
        await self._look_whether_same()
        if self._ranks is None:
            self._ranks = await asked("get_world_size", self._client.ranks())
        if self._ranks is None:
            raise ConnectError("this engine does not tell how many workers it has: include asyncsync.VLLMActor in it")
        self._session.ranks = self._ranks
        policies: tuple[Policy, ...] = ("drain", "abort", "recompute", "continue")
        cannot: dict[Policy, str] = {}
        if await asked("prefix_caching", self._client.prefix_caching()) is not False:
            cannot = {"continue": "it keeps a prefix cache, or does not tell: enable_prefix_caching=False"}
        group = self._group
        status = self._record.status(
            device="cuda",
            staged=False,
            whole_tensors=True,
            transport="pynccl",
            policies=tuple(policy for policy in policies if policy not in cannot),
            cannot=cannot,
            world_size=self._ranks,
            connections=(group.rendezvous.connection,) if group and group.stands else (),
            plan_digest=self._plan.digest if self._plan else None,
            paused=self._pause.paused,
        )
        # The label is a version, if a synchronizer before this one has set it; the next is to be newer.
        labelled = max((int(label) for label in self._labels if label.isdecimal()), default=0)
        return replace(status, newest_version=max(status.newest_version, labelled))

    async def look(self) -> tuple[int, str | None]:
        """See :class:`~asyncsync.engines.vllm.engine.Workers`."""
        under_way = "an update of it is not over" if self._update or self._session.open else None
        return self._record.epoch, self._record.tainted or under_way

    async def note_pause(self, epoch: int, paused: bool) -> None:
        """See :class:`~asyncsync.engines.vllm.engine.Workers`."""
        self._pause.note(epoch, paused)

    async def check_pause(self, epoch: int) -> None:
        """See :class:`~asyncsync.engines.vllm.engine.Workers`."""
        self._pause.check(epoch)

    async def released_memory(self, *, everywhere: bool = False) -> Mapping[str, bool]:
        """See :class:`~asyncsync.engines.vllm.engine.Workers`. Here nobody tells: one that sleeps is refused."""
        return {}

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """See :class:`~asyncsync.engines.vllm.engine.Workers`."""
        call = asked("pause", self._client.pause(mode, clear_cache=clear_cache))
        await self._session.hear(call, sign="Worker failed")  # else it has not come to the workers

    async def accept_layout(self, layout: Layout) -> None:
        """See :meth:`asyncsync.RolloutEngine.accept_layout`.

        vLLM does not tell its names. So they are compared with those that it has loaded before, if it has.
        """
        backend = 'with vLLM\'s "nccl" backend (with the "asyncsync" one it can)'
        if layout.partial:
            raise PlanError(f"an engine cannot tell whether a part of its weights can be loaded alone, {backend}")
        if len(layout.parts) > 1:
            raise PlanError(f"an engine cannot take weights from several sources, {backend}")
        if not layout.whole_tensors:
            raise PlanError(f"an engine cannot take parts of tensors, {backend}")
        plan = await asyncio.to_thread(layout.agreed_plan)
        if self._loaded is not None:
            _compare(_shapes(plan), self._loaded)
        self._plan = plan

    async def open_group(self, rendezvous: Rendezvous) -> Contacts:
        """See :meth:`asyncsync.RolloutEngine.open_group`."""
        if rendezvous.protocol != PROTOCOL_VERSION:
            raise ConnectError("the two ends speak different protocols: install the same version of asyncsync at both")
        while self._group is not None:  # another may have opened one meanwhile
            await self.leave_group(self._group.rendezvous.connection)
        self._group = _Group(rendezvous)
        return {}

    async def join_group(self, connection: str, contacts: Contacts) -> None:
        """See :meth:`asyncsync.RolloutEngine.join_group`."""
        group = self._group
        if group is None or group.rendezvous.connection != connection:
            raise ConnectError(f"the group to join was closed meanwhile {ANOTHER}")
        address, port = endpoint(contacts, STORE)
        rendezvous = group.rendezvous
        info = {
            "master_address": address,
            "master_port": port,
            "rank_offset": rendezvous.rank,
            "world_size": rendezvous.world_size,
            "packed": True,
            "packed_buffer_size_bytes": NEVER_EXCEEDED,
        }
        try:
            async with asyncio.timeout(rendezvous.join_timeout + FORM_TIMEOUT):
                await self._session.ask(lambda: asked_to_connect("nccl", self._client.init_transfer(info)))
                group.watch = await watch_source(*endpoint(contacts, COUNT))
        except BaseException as error:
            # First: if all come, they have joined in a moment. Their source is told next, and would send them away with
            # an error, after which several could not be believed.
            await shielded(self._leave(group))
            if isinstance(error, TimeoutError):
                raise ConnectError("the engine has not joined vLLM's group in time") from error
            raise
        if self._group is not group:
            raise ConnectError(f"the group to join was closed meanwhile {ANOTHER}")
        group.stands = True

    async def leave_group(self, connection: str) -> None:
        """See :meth:`asyncsync.RolloutEngine.leave_group`."""
        if self._group is not None and self._group.rendezvous.connection == connection:
            await shielded(self._leave(self._group))

    async def receive_weights(self, order: UpdateOrder) -> EngineReceipt:
        """See :meth:`asyncsync.RolloutEngine.receive_weights`."""
        self._record.check_new(order)
        await self._look_whether_same()  # a new process would fail, and of several workers not be believed any more
        await self._give_up()
        plan, group = self._plan, self._group
        if plan is None or plan.digest != order.plan_digest:
            raise OutOfStepError(f"the layout of this update was not agreed on with this engine {ANOTHER}")
        if group is None or not group.stands or order.connections != (group.rendezvous.connection,):
            raise OutOfStepError(f"this engine is not in the group that the order names {ANOTHER}")
        if not self._pause.paused:
            raise EngineError("an engine whose weights are overwritten in place must be paused for that")
        self._record.see(order.epoch)
        update: _Update | None = None
        try:
            async with asyncio.timeout(order.timeout) as limit:
                update = self._update = _Update(order, plan, limit)
                await self._session.begin()
                for bucket in plan.buckets:
                    await self._receive(update, group, bucket)
                update.received = True
        except TimeoutError as error:
            raise TransferError(f"the weights of update {order.version} did not come in time") from error
        finally:
            if update is not None:
                if not update.received:
                    group.stands = False  # its source may be ahead
                    self._taint_if_touched(update)
                update.ended.set()
        return EngineReceipt(digest=None)

    async def _receive(self, update: _Update, group: _Group, bucket: Bucket) -> None:
        """Have the workers receive and load a bucket, once its source has begun to send it: nothing else would come."""
        specs = [update.plan.specs[index] for index in bucket.whole]
        info = {
            "names": [spec.name for spec in specs],
            "dtype_names": [str(spec.dtype).removeprefix("torch.") for spec in specs],
            "shapes": [list(spec.shape) for spec in specs],
        }
        assert group.watch is not None
        try:
            await group.watch.wait_for(group.received + 1)
            group.received += 1
            update.touched = True
            await self._session.update(info)
        except TransferError as error:
            error.bucket = bucket.index
            raise
        except EngineError as error:
            raise TransferError(str(error), bucket=bucket.index) from error

    async def load(self, order: UpdateOrder) -> None:
        """See :class:`~asyncsync.engines.vllm.engine.Workers`: all is loaded already, and only the session is ended."""
        update = self._update
        if update is None or update.order.epoch != order.epoch or not update.received:
            raise EngineError(f"there is no received update of epoch {order.epoch} to finish")
        self._labels |= {str(order.version)}  # until it is known which of them it has
        try:
            await self._session.finish(order.version)
        except BaseException:
            self._record.taint(f"update {order.version} could not be finished")
            raise
        self._labels = frozenset({str(order.version)})
        self._update, self._loaded = None, _shapes(update.plan)
        self._record.committed(order, all_names(update.plan), None)

    async def abort_weight_update(self, epoch: int, published: int | None) -> EngineStatus:
        """See :meth:`asyncsync.RolloutEngine.abort_weight_update`."""
        self._record.end(epoch)
        await self._give_up()
        self._record.compare(epoch, published, frozenset())  # whatever it lacks, the next brings all
        return await self._describe()

    async def aclose(self) -> None:
        """Leave the group."""
        if self._group is not None:
            await shielded(self._leave(self._group))

    # -- what it does itself --------------------------------------------------------------------------------------

    async def _give_up(self) -> None:
        """End an update that will not be finished. If nothing of it was loaded, vLLM puts the old weights back."""
        update = self._update
        if update is None:
            return
        if not update.ended.is_set():
            update.limit.reschedule(asyncio.get_running_loop().time())
            await update.ended.wait()
        self._taint_if_touched(update)
        await self._session.settle()
        if not await self._session.give_up() and not update.touched:
            self._record.taint(f"vLLM's session for update {update.order.version} could not be ended")
        if self._update is update:
            self._update = None

    def _taint_if_touched(self, update: _Update) -> None:
        if update.touched:
            what = "finished" if update.received else "received whole"
            self._record.taint(f"update {update.order.version} was not {what}")

    async def _leave(self, group: _Group) -> None:
        """Leave a group, whatever becomes of the engine."""
        if self._group is group:
            self._group = None
        if group.watch is not None:
            group.watch.close()
        try:
            async with asyncio.timeout(CALL_TIMEOUT):
                label = await asked("get_weight_version", self._client.weight_version())
                if label is None or label in self._labels:  # else they have left it already, and may be in another's
                    await self._session.leave()
        except (AsyncSyncError, TimeoutError) as error:
            _log.info("leaving vLLM's group: %s", error)

    async def _look_whether_same(self) -> None:
        """Compare the label of the engine's weights with what was set here."""
        label = await asked("get_weight_version", self._client.weight_version())
        if label is None:
            return
        if label == OUT_OF_STEP:  # whoever has found it so
            self._session.out_of_step = self._session.labelled = True
            return
        if not self._session.labelled and (not self._labels or label in self._labels):
            self._labels = self._labels or frozenset({label})
            return
        self._labels, self._ranks = frozenset({label}), None
        self._record.instance = uuid.uuid4().hex
        # The pause that is noted may have been the old process's.
        self._pause.paused = self._pause.paused and await asked("is_sleeping", self._client.is_sleeping())
        if self._group is not None and self._group.watch is not None:
            self._group.watch.close()
        self._plan, self._loaded, self._group = None, None, None
        self._session.forget()
        if self._record.version is not None:
            self._record.taint("it was restarted, or updated by another")


def _shapes(plan: Plan) -> _Shapes:
    return {spec.name: spec.shape for spec in plan.specs if spec.nbytes}


def _compare(sent: _Shapes, loaded: _Shapes) -> None:
    """Compare what is to be sent with what was loaded before.

    Raises:
        PlanError: Names or shapes differ.
    """
    others = sent.keys() ^ loaded.keys()
    others |= {name for name in sent.keys() & loaded.keys() if sent[name] != loaded[name]}
    if others:
        raise PlanError(
            f"these are not the weights that the engine has loaded before: {list_names(others)} are missing, new, or "
            "of another shape (if they fit nevertheless, make a new VLLMEngine)",
            names=sorted(others),
        )
