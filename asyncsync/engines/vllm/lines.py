"""The ``asyncsync`` backend inside vLLM's workers, as its conductor sees it: a line to each worker.

Over the lines the workers receive, into host memory beside the weights that are served, while requests run. vLLM's own
calls are needed twice: to have the workers connect, and to have them load.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping

from asyncsync.engines.base import EngineReceipt
from asyncsync.engines.channel import Exchange, Line
from asyncsync.engines.ranks import ReceivingRanks
from asyncsync.engines.vllm.clients import PauseMode, VLLMClient, asked, asked_to_connect
from asyncsync.errors import EngineError, OutOfStepError
from asyncsync.messages import Contacts, EngineStatus, Layout, Rendezvous, UpdateOrder

LINE_TIMEOUT = 20.0
"""Seconds within which the engine's workers must connect."""

_log = logging.getLogger("asyncsync")


class LinedWorkers:
    """Satisfies :class:`~asyncsync.engines.vllm.engine.Workers` for workers with asyncsync's backend.

    Args:
        client: Calls the engine.
        address: Where the workers reach this process; found out if None.
    """

    warning = ""

    def __init__(self, client: VLLMClient, address: str | None) -> None:
        self._client = client
        self._address = address
        self._exchange: Exchange | None = None
        self._ranks: ReceivingRanks[WorkerLine] = ReceivingRanks(())
        self._groups: dict[int, str] = {}  # by source, of which it is in one group at a time
        self._reaching = asyncio.Lock()
        self._unlabelled: int | None = None  # the version that was loaded, and may be labelled as the last still

    def __repr__(self) -> str:
        return f"{len(self._ranks.engines)} ranks"

    @property
    def connected(self) -> bool:
        """Whether they are in a group."""
        return bool(self._groups)

    async def describe_engine(self) -> EngineStatus:
        """See :meth:`asyncsync.RolloutEngine.describe_engine`."""
        await self._reach()
        return await self._ranks.describe_engine()

    async def look(self) -> tuple[int, str | None]:
        """See :class:`~asyncsync.engines.vllm.engine.Workers`."""
        status = await self._ranks.describe_engine()
        return status.epoch, status.tainted

    async def note_pause(self, epoch: int, paused: bool) -> None:
        """See :class:`~asyncsync.engines.vllm.engine.Workers`."""
        await self._ranks.ask_all(lambda _, rank: rank.note_pause(epoch, paused))

    async def check_pause(self, epoch: int) -> None:
        """See :class:`~asyncsync.engines.vllm.engine.Workers`."""
        await self._ranks.ask_all(lambda _, rank: rank.check_pause(epoch))

    async def released_memory(self, *, everywhere: bool = False) -> Mapping[str, bool]:
        """See :class:`~asyncsync.engines.vllm.engine.Workers`."""
        released = await self._ranks.ask_race(lambda _, rank: rank.released_memory())
        tags = {tag for each in released for tag in each if not everywhere or all(tag in other for other in released)}
        return {tag: all(each.get(tag, True) for each in released) for tag in tags}

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
        """See :meth:`asyncsync.RolloutEngine.leave_group`."""
        if connection in self._groups.values():
            try:
                await self._ranks.leave_group(connection)
            finally:
                self._groups = {source: each for source, each in self._groups.items() if each != connection}

    async def receive_weights(self, order: UpdateOrder) -> EngineReceipt:
        """See :meth:`asyncsync.RolloutEngine.receive_weights`."""
        if not self._is_reached:
            # Before anything has begun: whoever conducts asks everyone anew, and finds a new process, or new lines.
            raise OutOfStepError("the connections to the engine's workers broke since the last update")
        return await self._ranks.receive_weights(order)

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """See :class:`~asyncsync.engines.vllm.engine.Workers`."""
        for tries_left in reversed(range(max(1, len(self._ranks.engines)))):
            try:
                await asked("pause", self._client.pause(mode, clear_cache=clear_cache))
                break
            except EngineError as error:  # maybe what a worker answered to an earlier call
                if not tries_left or "Worker failed" not in str(error):
                    raise

    async def load(self, order: UpdateOrder) -> None:
        """Have every worker load what it has received, and tell itself what became of that.

        vLLM's own answers are not believed: of several workers they may be those to earlier calls
        (:mod:`~asyncsync.engines.vllm.sessions`). And to our backend its session means nothing.
        """
        failed = await self._try("start_weight_update", self._client.start_update())
        self._unlabelled = order.version
        failed = await self._try("update_weights", self._client.update({"epoch": order.epoch})) or failed
        # Over now: a load that has begun comes to its end, and none that comes late does anything.
        status = await self._ranks.abort_weight_update(order.epoch, None)
        if status.weight_version != order.version:
            raise failed or EngineError(f"update {order.version} was not loaded: {status.tainted or 'nobody says why'}")
        if await self._try("finish_weight_update", self._client.finish_update(str(order.version))) is not None:
            await asked("update_weight_version", self._client.label(str(order.version)))
        self._unlabelled = None

    async def _try(self, what: str, call: Awaitable[None]) -> EngineError | None:
        try:
            await asked(what, call)
        except EngineError as error:
            _log.info("%s", error)
            return error
        return None

    async def abort_weight_update(self, epoch: int, published: int | None) -> EngineStatus:
        """See :meth:`asyncsync.RolloutEngine.abort_weight_update`."""
        status = await self._ranks.abort_weight_update(epoch, published)
        if self._unlabelled is not None and status.weight_version == self._unlabelled:
            await asked("update_weight_version", self._client.label(str(self._unlabelled)))
        self._unlabelled = None
        return status

    async def aclose(self) -> None:
        """Hang up."""
        self._hang_up()
        self._groups.clear()

    async def _reach(self) -> None:
        """Have every worker connect, unless all are connected."""
        async with self._reaching:  # by one call at a time: the others find the lines
            if self._is_reached:
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

    @property
    def _is_reached(self) -> bool:
        return self._exchange is not None and bool(self._exchange.lines)

    async def _lines_to(self, exchange: Exchange) -> list[Line]:
        port = await exchange.open()
        info = {"address": exchange.address, "port": port, "token": exchange.token}
        await asked_to_connect("asyncsync", self._client.init_transfer(info))
        return await exchange.all_lines(LINE_TIMEOUT)

    def _hang_up(self) -> None:
        if self._exchange is not None:
            self._exchange.close()
        self._exchange = None


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

    async def released_memory(self) -> Mapping[str, bool]:
        """Ask which of the engine's memory this worker has lost to sleep mode."""
        released: dict[str, bool] = await self._line.call("released_memory")
        return released
