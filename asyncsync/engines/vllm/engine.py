"""The adapter for vLLM: an engine whose workers receive by themselves, and load in the pause.

The bytes go straight to vLLM's worker processes, into host memory beside the weights that are served, while requests
run: :mod:`asyncsync.engines.vllm.worker` does that there, and is called over lines of its own. vLLM's API is used for
what only it can do: to hold requests, to have the workers load, to label the weights.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar

from asyncsync import cluster
from asyncsync.engines.base import EngineReceipt
from asyncsync.engines.channel import Exchange, Line
from asyncsync.engines.ranks import ReceivingRanks, also
from asyncsync.engines.vllm.clients import PauseMode, VLLMClient, client_for
from asyncsync.errors import AsyncSyncError, EngineError, OutOfStepError, TaintedEngineError
from asyncsync.fanout import is_ours, race
from asyncsync.messages import Contacts, EngineStatus, Layout, Policy, Rendezvous, UpdateOrder
from asyncsync.shield import shielded

T = TypeVar("T")

_log = logging.getLogger("asyncsync")

LINE_TIMEOUT = 20.0
"""Seconds within which the engine's workers must connect."""

CALL_TIMEOUT = 600.0
"""Seconds, by default, that one call to an HTTP server may take."""

PAUSES: Mapping[Policy, tuple[PauseMode, bool]] = {
    "drain": ("wait", True),
    "abort": ("abort", True),
    "recompute": ("keep", True),
    "continue": ("keep", False),
}
"""How vLLM is paused for each policy: its mode, and whether its caches are cleared."""


class VLLMEngine:
    """Satisfies :class:`asyncsync.RolloutEngine` for an engine of vLLM's; give it to a synchronizer.

    The engine must have been started with ``weight_transfer_config={"backend": "asyncsync"}``, and where asyncsync is
    installed for its processes. It is always staged: each worker keeps a whole set of weights in host memory. Every
    tensor parallel rank receives all of them, and vLLM slices them as it loads.

    Example:
        >>> llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model, weight_transfer_config={"backend": "asyncsync"}))
        >>> asyncsync.WeightSynchronizer(trainer, [asyncsync.VLLMEngine(llm), asyncsync.VLLMEngine("http://host:8000")])

    Args:
        engine: An ``AsyncLLM`` of this process; or a Ray actor that holds one and has methods of its names, such as one
            whose class includes :class:`asyncsync.VLLMActor`; or the address of an HTTP server that was started with
            ``VLLM_SERVER_DEV_MODE=1``.
        api_key: The server's API key.
        address: Where the engine's workers reach this process; found out if None.
        timeout: Seconds that one call to a server may take.

    Raises:
        TypeError: The engine is none of these.
    """

    def __init__(
        self,
        engine: Any,
        *,
        api_key: str | None = None,
        address: str | None = None,
        timeout: float = CALL_TIMEOUT,
    ) -> None:
        self._client: VLLMClient = client_for(engine, api_key=api_key, timeout=timeout)
        self._address = address
        self._exchange: Exchange | None = None
        self._ranks: ReceivingRanks[WorkerLine] = ReceivingRanks(())
        self._groups: dict[int, str] = {}  # by source, of which it is in one group at a time
        self._reaching = asyncio.Lock()
        self._epoch = 0
        self._paused_for: int | None = None  # the epoch of the update it is paused for
        self._paused = False  # by an update, maybe another conductor's
        self._tainted = False
        self._in_session = False

    def __repr__(self) -> str:
        return f"<VLLMEngine {self._client!r}: {len(self._ranks.engines)} ranks>"

    async def weights_checksum(self) -> dict[str, str]:
        """Checksums by vLLM, of each parameter as it holds it, on each worker.

        Two engines that are set up alike and hold the same weights have the same.
        """
        return await self._asked("checksums", self._client.checksums())

    async def aclose(self) -> None:
        """Hang up. The engine itself goes on; used again, it is connected anew."""
        self._hang_up()
        self._groups.clear()
        await self._client.aclose()

    # -- the RolloutEngine protocol -------------------------------------------------------------------------------

    async def describe_engine(self) -> EngineStatus:
        """See :meth:`asyncsync.RolloutEngine.describe_engine`.

        Raises:
            EngineError: It is asleep, or has no backend of ours.
            ConnectError: Its workers cannot reach this process.
        """
        await self._reach()
        status = await self._ranks.describe_engine()
        self._paused, self._tainted = status.paused, status.tainted is not None
        await self._check_awake()
        self._epoch = max(self._epoch, status.epoch)
        return status

    async def accept_layout(self, layout: Layout) -> None:
        """See :meth:`asyncsync.RolloutEngine.accept_layout`."""
        try:
            await self._ranks.accept_layout(layout)
        except BaseException:
            if not self._groups:
                self._hang_up()
            raise

    async def open_group(self, rendezvous: Rendezvous) -> Contacts:
        """See :meth:`asyncsync.RolloutEngine.open_group`."""
        self._groups[rendezvous.source] = rendezvous.connection
        return await self._ranks.open_group(rendezvous)

    async def join_group(self, connection: str, contacts: Contacts) -> None:
        """See :meth:`asyncsync.RolloutEngine.join_group`."""
        await self._ranks.join_group(connection, contacts)

    async def leave_group(self, connection: str) -> None:
        """See :meth:`asyncsync.RolloutEngine.leave_group`. Without a group, the lines to the workers are not kept."""
        if connection in self._groups.values():
            try:
                await self._ranks.leave_group(connection)
            finally:
                self._groups = {source: each for source, each in self._groups.items() if each != connection}
                if not self._groups:
                    await self.aclose()

    async def pause_generation(self, epoch: int, policy: Policy) -> None:
        """See :meth:`asyncsync.RolloutEngine.pause_generation`."""
        self._see(epoch)
        self._paused_for = epoch
        await self._pause(epoch, policy)

    async def receive_weights(self, order: UpdateOrder) -> EngineReceipt:
        """See :meth:`asyncsync.RolloutEngine.receive_weights`."""
        self._see(order.epoch)
        if not self._is_reached():
            # Before anything has begun: whoever conducts asks everyone anew, and finds a new process, or new lines.
            raise OutOfStepError("the connections to the engine's workers broke since the last update")
        steps: dict[str, Awaitable[Any]] = {
            "receive": self._ranks.receive_weights(order),
            "awake": self._check_awake(),
        }
        receipt: EngineReceipt = (await race(steps))["receive"]
        return receipt

    async def finish_weight_update(self, order: UpdateOrder) -> None:
        """See :meth:`asyncsync.RolloutEngine.finish_weight_update`."""
        self._see(order.epoch)
        if self._paused_for == order.epoch:
            await self._commit(order)
            return
        try:
            await self._pause(order.epoch, order.policy)
            await self._commit(order)
        except BaseException as error:
            await also(error, self._give_up(order.epoch))
            raise
        await shielded(self._resume(order.epoch))

    async def abort_weight_update(self, epoch: int, published: int | None) -> EngineStatus:
        """See :meth:`asyncsync.RolloutEngine.abort_weight_update`.

        vLLM itself does not know that it must not serve: it is paused, and what is in flight ends.
        """
        try:
            status = await self._ranks.abort_weight_update(epoch, published)
        except OutOfStepError:
            raise
        except AsyncSyncError as error:
            if published is not None:  # others serve that, and nobody knows whether it does
                await also(error, self._pause(epoch, "abort"))
            raise
        await self._end_session()
        self._tainted = status.tainted is not None
        if self._tainted and not self._paused:
            await self._pause(epoch, "abort")
        return status

    async def resume_generation(self, epoch: int) -> None:
        """See :meth:`asyncsync.RolloutEngine.resume_generation`."""
        self._see(epoch)
        status = await self._ranks.describe_engine()
        self._see_newest(epoch, status.epoch)
        if status.tainted is not None:
            raise TaintedEngineError(status.tainted)
        await shielded(self._resume(epoch))

    # -- what it does itself --------------------------------------------------------------------------------------

    def _see(self, epoch: int) -> None:
        self._see_newest(epoch, self._epoch)
        self._epoch = epoch

    def _see_newest(self, epoch: int, newest: int) -> None:
        if epoch < newest:
            raise OutOfStepError(f"a call of epoch {epoch} is out of date: this engine has seen epoch {newest}")

    async def _pause(self, epoch: int, policy: Policy) -> None:
        # Drained, requests that an earlier pause has kept would go on over what is torn.
        mode, clear_cache = PAUSES["recompute" if policy == "drain" and self._tainted else policy]
        await self._ranks.ask_all(lambda _, rank: rank.note_pause(epoch, True))  # which refuses an old epoch
        self._paused = True
        await self._asked("pause", self._client.pause(mode, clear_cache=clear_cache))

    async def _commit(self, order: UpdateOrder) -> None:
        """Have every worker load what it has received."""
        await self._start_session()
        await self._asked("update_weights", self._client.update({"epoch": order.epoch}))
        await self._asked("finish_weight_update", self._client.finish_update(str(order.version)))
        self._in_session = self._tainted = False

    async def _start_session(self) -> None:
        """Begin vLLM's session; one that was left open, by a conductor that died, is ended first."""
        self._in_session = True
        try:
            await self._asked("start_weight_update", self._client.start_update())
        except EngineError as error:
            if "already active" not in str(error):
                raise
            await self._asked("finish_weight_update", self._client.finish_update(None))
            await self._asked("start_weight_update", self._client.start_update())

    async def _end_session(self) -> None:
        """End vLLM's session, which may be open still; mostly vLLM has ended it. Our backend does nothing in that."""
        if self._in_session:
            try:
                await self._asked("finish_weight_update", self._client.finish_update(None))
            except EngineError as error:
                _log.debug("vLLM's session was ended before: %s", error)
            self._in_session = False

    async def _give_up(self, epoch: int) -> None:
        """End a commit that failed: go on, if what every worker holds is whole."""
        status = await self.abort_weight_update(epoch, None)
        if status.tainted is None:
            await self._resume(epoch)

    async def _resume(self, epoch: int) -> None:
        try:
            await self._ranks.ask_all(lambda _, rank: rank.check_pause(epoch))
        except OutOfStepError as error:  # another conductor's update, maybe, which will resume it
            _log.info("not resumed: %s", error)
            return
        await self._asked("resume", self._client.resume())
        self._paused_for, self._paused = None, False
        try:
            await self._ranks.ask_all(lambda _, rank: rank.note_pause(epoch, False))
        except OutOfStepError as error:  # the same, but it has not paused it yet
            _log.info("not noted as resumed: %s", error)

    async def _check_awake(self) -> None:
        """Refuse an engine that sleeps. To vLLM, one that is paused does so, too; an update's own pause is none."""
        if not self._paused and await self._asked("is_sleeping", self._client.is_sleeping()):
            raise EngineError(
                "the engine is asleep, or somebody else has paused it: wake it up, or resume it, before the update"
            )

    async def _reach(self) -> None:
        """Have every worker connect, unless all are connected."""
        async with self._reaching:  # by one call at a time: the others find the lines
            if self._is_reached():
                return
            self._hang_up()
            address = self._address
            if address is None:
                address = await asyncio.to_thread(self._client.address)  # a name may have to be looked up
            exchange = Exchange(address)
            try:
                self._ranks = ReceivingRanks([WorkerLine(line) for line in await self._lines_to(exchange)])
            except BaseException:
                exchange.close()
                raise
            self._exchange = exchange

    def _is_reached(self) -> bool:
        return self._exchange is not None and bool(self._exchange.lines)

    async def _lines_to(self, exchange: Exchange) -> list[Line]:
        port = await exchange.open()
        info = {"address": exchange.address, "port": port, "token": exchange.token}
        try:
            await self._asked("init_weight_transfer_engine", self._client.init_transfer(info))
        except EngineError as error:
            text = str(error)
            if "not configured" in text or "Invalid init_info" in text:
                raise EngineError(
                    'the engine has no backend of asyncsync: start it with weight_transfer_config={"backend": '
                    f'"asyncsync"}} ({text})'
                ) from error
            raise
        return await exchange.all_lines(LINE_TIMEOUT)

    def _hang_up(self) -> None:
        if self._exchange is not None:
            self._exchange.close()
        self._exchange = None

    async def _asked(self, what: str, call: Awaitable[T]) -> T:
        """Await a call of vLLM's API; its errors, of whatever kind, come back as the engine's."""
        try:
            return await call
        except (AsyncSyncError, cluster.ActorLostError):
            raise
        except BaseException as error:
            if is_ours(error):
                raise
            raise EngineError(f"{what} failed: {type(error).__name__}: {error}") from error


class WorkerLine:
    """Satisfies :class:`~asyncsync.engines.base.WeightReceiver` over a line to one of the engine's workers.

    Args:
        line: The line.
    """

    def __init__(self, line: Line) -> None:
        self._line = line

    def __repr__(self) -> str:
        return f"<WorkerLine {self._line!r}>"

    async def describe_engine(self) -> EngineStatus:
        """See :meth:`asyncsync.RolloutEngine.describe_engine`."""
        status: EngineStatus = await self._line.call("describe_engine")
        return status

    async def accept_layout(self, layout: Layout) -> None:
        """See :meth:`asyncsync.RolloutEngine.accept_layout`."""
        await self._line.call("accept_layout", layout)

    async def open_group(self, rendezvous: Rendezvous) -> Contacts:
        """See :meth:`asyncsync.RolloutEngine.open_group`."""
        contacts: Contacts = await self._line.call("open_group", rendezvous)
        return contacts

    async def join_group(self, connection: str, contacts: Contacts) -> None:
        """See :meth:`asyncsync.RolloutEngine.join_group`."""
        await self._line.call("join_group", connection, contacts)

    async def leave_group(self, connection: str) -> None:
        """See :meth:`asyncsync.RolloutEngine.leave_group`."""
        await self._line.call("leave_group", connection)

    async def receive_weights(self, order: UpdateOrder) -> EngineReceipt:
        """See :meth:`asyncsync.RolloutEngine.receive_weights`."""
        receipt: EngineReceipt = await self._line.call("receive_weights", order)
        return receipt

    async def abort_weight_update(self, epoch: int, published: int | None) -> EngineStatus:
        """See :meth:`asyncsync.RolloutEngine.abort_weight_update`."""
        status: EngineStatus = await self._line.call("abort_weight_update", epoch, published)
        return status

    async def note_pause(self, epoch: int, paused: bool) -> None:
        """Have the worker note that the engine is being paused, or was resumed."""
        await self._line.call("note_pause", epoch, paused)

    async def check_pause(self, epoch: int) -> None:
        """Have the worker see whether nobody has paused the engine since."""
        await self._line.call("check_pause", epoch)
