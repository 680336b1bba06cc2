"""An engine that is a Ray actor: the protocol, a remote call a step; or one over a line, if it is on this node."""

from __future__ import annotations

from typing import Any

from asyncsync import cluster
from asyncsync.engines.base import EngineReceipt, RolloutEngine, WeightReceiver
from asyncsync.engines.channel import LineBrokenError
from asyncsync.engines.line import ActorLine
from asyncsync.messages import NO_GROUP, Contacts, EngineStatus, Layout, Policy, Rendezvous, UpdateOrder
from asyncsync.transports.memory_files import this_node

ENGINE_METHODS = tuple(
    name for protocol in (WeightReceiver, RolloutEngine) for name in vars(protocol) if not name.startswith("_")
)
"""The names of the protocol's methods."""

LINE_METHODS = ("open_control_line", "repeat_control_error")
"""The names of those that a line needs, too."""


class RemoteEngine:
    """Satisfies :class:`RolloutEngine` for a handle whose methods have ``.remote(…)``.

    Args:
        handle: A Ray actor that includes :class:`asyncsync.ModuleEngine`, or anything called the same way.

    Raises:
        TypeError: The handle lacks methods of the protocol; they are named.
    """

    def __init__(self, handle: Any) -> None:
        missing = cluster.missing_methods(handle, ENGINE_METHODS)
        if missing:
            raise TypeError(
                f"{cluster.actor_class_name(handle)} is no rollout engine: it lacks {', '.join(missing)}; "
                "include asyncsync.ModuleEngine in its class, or write an adapter with the RolloutEngine protocol; "
                "if there is vLLM or SGLang in it, give asyncsync.VLLMEngine(actor) or asyncsync.SGLangEngine(actor)"
            )
        self.handle = handle
        self._node = ""
        self._groups: dict[int, str] = {}  # by source, of which it is in one group at a time
        self._line = ActorLine(handle) if not cluster.missing_methods(handle, LINE_METHODS) else None

    def __repr__(self) -> str:
        return f"<RemoteEngine {cluster.actor_class_name(self.handle)} {cluster.actor_key(self.handle)[:8]}>"

    async def describe_engine(self) -> EngineStatus:
        status: EngineStatus = await cluster.call(self.handle, "describe_engine")
        self._node = status.node
        return status

    async def accept_layout(self, layout: Layout) -> None:
        await cluster.call(self.handle, "accept_layout", layout)

    async def open_group(self, rendezvous: Rendezvous) -> Contacts:
        contacts: Contacts = await cluster.call(self.handle, "open_group", rendezvous)
        self._groups[rendezvous.source] = rendezvous.connection
        if self._line is not None and self._node and self._node == this_node():
            try:
                await self._line.open()
            finally:
                self._hang_up_if_unused()  # it may have left meanwhile
        return contacts

    async def join_group(self, connection: str, contacts: Contacts) -> None:
        await cluster.call(self.handle, "join_group", connection, contacts)

    async def leave_group(self, connection: str) -> None:
        try:
            await cluster.call(self.handle, "leave_group", connection)
            left = [source for source, each in self._groups.items() if connection in (each, NO_GROUP)]
        except BaseException:
            left = list(self._groups)  # who knows: what comes next comes through Ray
            raise
        finally:
            for source in left:
                del self._groups[source]
            self._hang_up_if_unused()

    async def pause_generation(self, epoch: int, policy: Policy) -> None:
        await self._call("pause_generation", epoch, policy)

    async def receive_weights(self, order: UpdateOrder) -> EngineReceipt:
        receipt: EngineReceipt
        if order.stored:  # references to objects are for Ray to hand over
            receipt = await cluster.call(self.handle, "receive_weights", order)
        else:
            receipt = await self._call("receive_weights", order)
        return receipt

    async def finish_weight_update(self, order: UpdateOrder) -> float | None:
        held: float | None = await self._call("finish_weight_update", order)
        return held

    async def abort_weight_update(self, epoch: int, published: int | None) -> EngineStatus:
        status: EngineStatus = await cluster.call(self.handle, "abort_weight_update", epoch, published)
        return status

    async def resume_generation(self, epoch: int) -> None:
        try:
            await self._call("resume_generation", epoch)
        except LineBrokenError:  # it may go on resuming, and asking twice does no harm
            await cluster.call(self.handle, "resume_generation", epoch)

    async def give_weights(self, order: UpdateOrder) -> EngineReceipt:
        receipt: EngineReceipt = await cluster.call(self.handle, "give_weights", order)
        return receipt

    def _hang_up_if_unused(self) -> None:
        if self._line is not None and not self._groups:
            self._line.close()

    async def _call(self, method: str, *arguments: Any) -> Any:
        if self._line is not None and self._line.is_open:
            return await self._line.call(method, *arguments)
        return await cluster.call(self.handle, method, *arguments)


def as_rank(candidate: Any) -> RolloutEngine:
    """One engine, or one rank of an engine, behind whatever a user may pass as one.

    Raises:
        TypeError: It is none.
    """
    if cluster.is_actor_class(candidate):
        raise TypeError(f"{cluster.actor_class_name(candidate)} is an actor class, no actor: call its .remote(…) first")
    if cluster.is_actor(candidate) or hasattr(getattr(candidate, "describe_engine", None), "remote"):
        return RemoteEngine(candidate)
    if isinstance(candidate, RolloutEngine) and not isinstance(candidate, type):
        return candidate
    what = repr(candidate) if isinstance(candidate, str | type) else cluster.actor_class_name(candidate)
    raise TypeError(
        f"{what} is no rollout engine: give asyncsync.VLLMEngine(…) or asyncsync.SGLangEngine(…) with an engine, an "
        "actor or the address of a server; a Ray actor that includes asyncsync.ModuleEngine, or ModuleEngine(module) "
        "itself; an object with the RolloutEngine protocol; or a list of these, one a rank"
    )
