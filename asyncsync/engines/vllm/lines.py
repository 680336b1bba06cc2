"""The ``asyncsync`` backend inside vLLM's workers, as its conductor sees it: a line to each worker.

Over the lines the workers receive, into host memory beside the weights that are served, while requests run. vLLM's own
calls are needed twice: to have the workers connect, and to have them load.
"""

from __future__ import annotations

import asyncio
import logging

from asyncsync.engines.base import EngineReceipt
from asyncsync.engines.channel import Exchange, Line
from asyncsync.engines.ranks import ReceivingRanks
from asyncsync.engines.vllm.clients import VLLMClient, asked, asked_to_connect
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
        self._in_session = False
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

    async def load(self, order: UpdateOrder) -> None:
        """Have every worker load what it has received."""
        await self._start_session()
        self._unlabelled = order.version
        await asked("update_weights", self._client.update({"epoch": order.epoch}))
        await asked("finish_weight_update", self._client.finish_update(str(order.version)))
        self._in_session, self._unlabelled = False, None

    async def abort_weight_update(self, epoch: int, published: int | None) -> EngineStatus:
        """See :meth:`asyncsync.RolloutEngine.abort_weight_update`."""
        status = await self._ranks.abort_weight_update(epoch, published)
        await self._end_session()
        if self._unlabelled is not None and status.weight_version == self._unlabelled:
            await asked("update_weight_version", self._client.label(str(self._unlabelled)))
        self._unlabelled = None
        return status

    async def aclose(self) -> None:
        """Hang up."""
        self._hang_up()
        self._groups.clear()

    async def _start_session(self) -> None:
        """Begin vLLM's session; one that was left open, by a conductor that died, is ended first."""
        self._in_session = True
        try:
            await asked("start_weight_update", self._client.start_update())
        except EngineError as error:
            if "already active" not in str(error):
                raise
            await asked("finish_weight_update", self._client.finish_update(None))
            await asked("start_weight_update", self._client.start_update())

    async def _end_session(self) -> None:
        """End vLLM's session, which may be open still; mostly vLLM has ended it. Our backend does nothing in that."""
        if self._in_session:
            try:
                await asked("finish_weight_update", self._client.finish_update(None))
            except EngineError as error:
                _log.debug("vLLM's session was ended before: %s", error)
            self._in_session = False

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
