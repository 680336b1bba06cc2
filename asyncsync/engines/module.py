"""An engine of plain torch: a class to include in a Ray actor that serves any ``nn.Module``."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from types import TracebackType
from typing import Any

from torch import nn

from asyncsync import cluster
from asyncsync.engines.base import EngineReceipt
from asyncsync.engines.gate import GenerationGate
from asyncsync.engines.serving import ServedModule
from asyncsync.engines.waking import OwnMemory
from asyncsync.errors import EngineError
from asyncsync.messages import Contacts, EngineStatus, Layout, Policy, Rendezvous, UpdateOrder


class ModuleEngine:
    """A rollout engine that serves a module; include it in an actor's class.

    Example:
        >>> @asyncsync.remote(num_cpus=1)
        ... class Engine(asyncsync.ModuleEngine):
        ...     def __init__(self):
        ...         super().__init__(build_model())
        ...
        ...     async def generate(self, prompt):
        ...         async with self.generating() as version:
        ...             return version, sample(self.module, prompt)

    A staged engine's parameters are views of one memory, and pickling one pickles all: clone what leaves the process.

    Args:
        module: What it serves. All its parameters and persistent buffers take part. Of a DTensor, the part that lies
            here is updated: such a module is one rank of an engine (see :class:`asyncsync.EngineGroup`).
        staged: True: new weights are held beside the old and swapped in, generation goes on meanwhile; costs the
            weights' size in extra memory, twice from the second update on. The swap points each parameter's ``.data``
            elsewhere. False: weights are overwritten where they lie while generation is paused (what CUDA graphs and
            raw pointers into the weights need).

    Attributes:
        module: The module.
    """

    control_group: str | None = None
    keeps_released_weights: bool = False
    """Whether :meth:`resume_memory` brings weights back as they were, from a copy: for you to set."""

    def __init__(self, module: nn.Module, *, staged: bool = True) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(f"a ModuleEngine serves an nn.Module, not {type(module).__name__}")
        self.module = module
        # All that the library keeps lies in here, so that a class which includes this one may name its own as it likes.
        self._asyncsync = ServedModule(
            lambda: self.module,
            staged=staged,
            generations=GenerationGate(),
            flush=lambda: self.flush_cache(),
            memory=memory_of(self),
            keeps_weights=lambda: self.keeps_released_weights,
        )

    def __getattr__(self, name: str) -> Any:
        """What is missing; mostly it is the call of this class's constructor."""
        hint = "" if "_asyncsync" in self.__dict__ else ": call super().__init__(module) in its __init__"
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{hint}")

    @property
    def weight_version(self) -> int | None:
        """The version it serves; None before the first update, and while it holds part of one."""
        return self._asyncsync.weight_version

    def generating(self) -> Generation:
        """Read the weights: ``async with`` or ``with`` around every use of the module.

        Entering waits while the engine is paused, and gives the version that is read. The weights do not change until
        it is left.

        Raises:
            TaintedEngineError: On entering: the engine holds part of an update.
            EngineError: On entering: it is asleep.
        """
        assert isinstance(self._asyncsync.generations, GenerationGate)
        return Generation(self._asyncsync, self._asyncsync.generations)

    async def flush_cache(self) -> None:
        """Drop what was computed from older weights: for you to override; called before generation resumes."""

    def released_memory(self) -> Collection[str]:
        """Tags of the memory that is released now: for you to override, with the two below, if the engine can sleep.

        ``"weights"`` is what the module's parameters and buffers lie in; other names are yours. The tensors must stay
        those that they are: their bytes are gone, their shapes are not. An update wakes ``"weights"`` before it writes
        them (a staged engine, when it switches) and all else after, before generation resumes; if it fails, what it
        has woken is released again. Put the engine to sleep with :meth:`sleep`, while nobody generates: its weights
        count as lost from then on, unless ``keeps_released_weights`` is set, and nobody generates until it is awake.

        Over torch_memory_saver, serve in place: a staged engine's weights move to memory of the library's with the
        first update, and no region releases that.

        Example:
            >>> from torch_memory_saver import torch_memory_saver
            >>> @asyncsync.remote(num_gpus=1)
            ... class Engine(asyncsync.ModuleEngine):
            ...     def __init__(self):
            ...         self.released = set()
            ...         with torch_memory_saver.region(tag="weights"):
            ...             super().__init__(build_model(), staged=False)
            ...         with torch_memory_saver.region(tag="kv_cache"):
            ...             self.cache = build_cache()
            ...
            ...     def released_memory(self):
            ...         return self.released
            ...
            ...     async def release_memory(self, tags):
            ...         for tag in tags:
            ...             await asyncio.to_thread(torch_memory_saver.pause, tag)
            ...             self.released.add(tag)
            ...
            ...     async def resume_memory(self, tags):
            ...         for tag in tags:
            ...             await asyncio.to_thread(torch_memory_saver.resume, tag)
            ...             self.released.discard(tag)
        """
        return ()

    async def resume_memory(self, tags: Collection[str]) -> None:
        """Get memory back; what lies in it does not matter, but for weights that no update brings (``partial=True``).

        Args:
            tags: Of it; all of them are released.
        """
        raise EngineError(f"{type(self).__name__} has memory released, and does not override resume_memory()")

    async def release_memory(self, tags: Collection[str]) -> None:
        """Release memory.

        Args:
            tags: Of it; none of them is released.
        """
        raise EngineError(f"{type(self).__name__} was woken by an update, and does not override release_memory()")

    @cluster.control
    async def sleep(self, tags: Collection[str]) -> None:
        """Release memory, by :meth:`release_memory`, whichever of it is not released.

        Args:
            tags: Of it.

        Raises:
            EngineError: An update is under way, or it could not.
        """
        await self._asyncsync.sleep(tags)

    @cluster.control
    async def wake_up(self, tags: Collection[str]) -> None:
        """Get memory back, by :meth:`resume_memory`, whichever of it is released. An update does so by itself.

        Args:
            tags: Of it.

        Raises:
            EngineError: It could not.
        """
        await self._asyncsync.wake_up(tags)

    @cluster.control
    async def weights_digest(self) -> str:
        """Digest of the weights as they lie in memory now (32 hex digits), in the layout of the last update.

        A rank that holds only shards has none: the digest is that of whole tensors, of which an update confirms every
        byte as it arrives. Compare their ``full_tensor()`` with the trainer's.

        Raises:
            EngineError: No layout was accepted yet, or the module holds shards.
        """
        return await self._asyncsync.weights_digest()

    # -- the RolloutEngine protocol -------------------------------------------------------------------------------

    @cluster.control
    async def describe_engine(self) -> EngineStatus:
        """See :meth:`asyncsync.RolloutEngine.describe_engine`."""
        status = await self._asyncsync.describe_engine()
        return replace(status, control_group=self.control_group is not None or not cluster.in_actor())

    @cluster.control
    async def accept_layout(self, layout: Layout) -> None:
        """See :meth:`asyncsync.RolloutEngine.accept_layout`."""
        await self._asyncsync.accept_layout(layout)

    @cluster.control
    async def open_group(self, rendezvous: Rendezvous) -> Contacts:
        """See :meth:`asyncsync.RolloutEngine.open_group`."""
        return await self._asyncsync.open_group(rendezvous)

    @cluster.control
    async def join_group(self, connection: str, contacts: Contacts) -> None:
        """See :meth:`asyncsync.RolloutEngine.join_group`."""
        await self._asyncsync.join_group(connection, contacts)

    @cluster.control
    async def leave_group(self, connection: str) -> None:
        """See :meth:`asyncsync.RolloutEngine.leave_group`."""
        await self._asyncsync.leave_group(connection)

    @cluster.control
    async def pause_generation(self, epoch: int, policy: Policy) -> None:
        """See :meth:`asyncsync.RolloutEngine.pause_generation`."""
        await self._asyncsync.pause_generation(epoch, policy)

    @cluster.control
    async def receive_weights(self, order: UpdateOrder) -> EngineReceipt:
        """See :meth:`asyncsync.RolloutEngine.receive_weights`."""
        return await self._asyncsync.receive_weights(order)

    @cluster.control
    async def finish_weight_update(self, order: UpdateOrder) -> float | None:
        """See :meth:`asyncsync.RolloutEngine.finish_weight_update`."""
        return await self._asyncsync.finish_weight_update(order)

    @cluster.control
    async def abort_weight_update(self, epoch: int, published: int | None) -> EngineStatus:
        """See :meth:`asyncsync.RolloutEngine.abort_weight_update`."""
        return await self._asyncsync.abort_weight_update(epoch, published)

    @cluster.control
    async def resume_generation(self, epoch: int) -> None:
        """See :meth:`asyncsync.RolloutEngine.resume_generation`."""
        await self._asyncsync.resume_generation(epoch)

    @cluster.once
    @cluster.control
    async def open_control_line(self, token: str, secret: str, port: int) -> bool:
        """Answer a conductor's calls over a connection, too, until it hangs up. See :mod:`asyncsync.engines.line`."""
        return await self._asyncsync.lines.open(self, token, secret, port)

    @cluster.control
    async def repeat_control_error(self, token: str, number: int) -> None:
        """Raise what a call over such a connection has raised. See :mod:`asyncsync.engines.line`."""
        self._asyncsync.lines.repeat_error(token, number)

    @cluster.control
    async def give_weights(self, order: UpdateOrder) -> EngineReceipt:
        """See :meth:`asyncsync.GivingEngine.give_weights`."""
        return await self._asyncsync.give_weights(order)


def memory_of(engine: ModuleEngine) -> OwnMemory:
    """An engine's memory, by the methods that its class may override."""
    return OwnMemory(
        lambda: engine.released_memory(),
        lambda tags: engine.resume_memory(tags),
        lambda tags: engine.release_memory(tags),
    )


class Generation:
    """A reading of an engine's weights, as a context: see :meth:`ModuleEngine.generating`."""

    def __init__(self, served: ServedModule, gate: GenerationGate) -> None:
        self._served, self._gate = served, gate

    async def __aenter__(self) -> int | None:
        await self._gate.enter()
        self._check_awake()
        return self._served.weight_version

    def _check_awake(self) -> None:
        try:
            self._served.check_awake()
        except BaseException:
            self._gate.leave()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._gate.leave()

    def __enter__(self) -> int | None:
        self._gate.enter_blocking()
        self._check_awake()
        return self._served.weight_version

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._gate.leave()
