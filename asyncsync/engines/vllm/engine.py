"""The adapter for vLLM: an engine whose worker processes receive by themselves.

vLLM's API is used for what only it can do: to hold requests, to have the workers load, to label the weights. How the
bytes come to the workers is another matter, of which there are two kinds. With the ``asyncsync`` backend
(:mod:`asyncsync.engines.vllm.worker`, called over :mod:`~asyncsync.engines.vllm.lines`) they arrive in host memory
while requests run, and are loaded in the pause. With vLLM's own ``nccl`` (:mod:`asyncsync.engines.vllm.nccl`) they
arrive and are loaded in the pause.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol

from asyncsync.buckets import list_names
from asyncsync.engines.base import EngineReceipt, WeightReceiver
from asyncsync.engines.ranks import WITHIN_CLEANUP, also
from asyncsync.engines.vllm.clients import PauseMode, VLLMClient, asked, client_for
from asyncsync.engines.vllm.lines import LinedWorkers
from asyncsync.engines.vllm.nccl import NCCLWorkers
from asyncsync.engines.waking import Woken, asleep_and_refused, time_to_wake
from asyncsync.errors import AsyncSyncError, EngineError, OutOfStepError, TaintedEngineError
from asyncsync.fanout import race
from asyncsync.messages import WEIGHTS, Contacts, EngineStatus, Layout, Policy, Rendezvous, UpdateOrder
from asyncsync.shield import shielded

_log = logging.getLogger("asyncsync")

CALL_TIMEOUT = 600.0
"""Seconds, by default, that one call to an HTTP server may take."""

PAUSES: Mapping[Policy, tuple[PauseMode, bool]] = {
    "drain": ("wait", True),
    "abort": ("abort", True),
    "recompute": ("keep", True),
    "continue": ("keep", False),
}
"""How vLLM is paused for each policy: its mode, and whether its caches are cleared."""


class Workers(WeightReceiver, Protocol):
    """An engine's worker processes, with one of the backends."""

    @property
    def connected(self) -> bool:
        """Whether they are in a group, or may be joining one still."""
        ...

    @property
    def warning(self) -> str:
        """What else to tell whoever finds the engine paused and is to resume it."""
        ...

    async def look(self) -> tuple[int, str | None]:
        """The newest epoch they have seen, and why the engine must not serve, or None."""
        ...

    async def note_pause(self, epoch: int, paused: bool) -> None:
        """See :class:`~asyncsync.engines.vllm.pauses.PauseNote`."""
        ...

    async def check_pause(self, epoch: int) -> None:
        """See :class:`~asyncsync.engines.vllm.pauses.PauseNote`."""
        ...

    async def released_memory(self, *, everywhere: bool = False) -> Mapping[str, bool]:
        """What sleep mode has taken away from any of them, or from all; empty if they do not tell.

        Returns:
            By vLLM's tag, whether a copy is kept in host memory.
        """
        ...

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Have the engine pause, with nothing on its workers' devices under way."""
        ...

    async def load(self, order: UpdateOrder) -> None:
        """Make what was received the weights that are served, and end vLLM's session. The engine is paused."""
        ...

    async def aclose(self) -> None:
        """Hang up."""
        ...


class VLLMEngine:
    """Satisfies :class:`asyncsync.RolloutEngine` for an engine of vLLM's; give it to a synchronizer.

    The engine must have been started with ``weight_transfer_config={"backend": "asyncsync"}``, and where asyncsync is
    installed for its processes. It is always staged: each worker keeps a whole set of weights in host memory. Every
    tensor parallel rank receives all of them, and vLLM slices them as it loads.

    An engine that sleeps (``sleep()``, at level 1 or 2) receives while it does. An update with ``asleep="wake"`` wakes
    its weights right before they are loaded, and all else right after; with that vLLM lets requests go on by itself, so
    it is the last step. If the update fails in between, the engine is put back to sleep, at the level at which it
    slept; at level 2 its weights are gone, and it holds no version until it was updated. After a failed update let the
    next one wake it: woken by hand, it would serve whatever it holds. The workers see for themselves whether their
    memory is there; an engine that vLLM calls sleeping while all is there was paused by somebody else, and is refused.
    An actor needs ``sleep`` and ``wake_up`` for this. Nobody puts the engine back to sleep if the process with this
    adapter dies in between. (Sleep mode is for GPUs, and was never run here: what vLLM does was read, in 0.32.0.)

    ``backend="nccl"`` is for an engine on GPUs that was started with ``{"backend": "nccl"}``: vLLM receives by itself,
    asyncsync need not be installed there, and vLLM must be in the trainer's process. *This was never run on a GPU*; it
    is tested over a communicator that is none of NCCL's. And it promises less:

    - Weights are overwritten in place, while the engine is paused, and a failed update leaves it so until the next.
    - The first update must be right: its names and shapes cannot be compared with vLLM's before they are sent. What it
      knows no place for is an error in the transfer, or ignored without a word, as in loading a checkpoint; what is
      missing keeps its old values; and after a tensor of a wrong shape it may have to be restarted. Later updates must
      be of the same names and shapes, all of them (``partial=True`` is refused). Of tied ones the first name alone is
      told. What was received is confirmed by no digest.
    - They come from one source: a trainer that is a pipeline of several is refused.
    - Once a call to several workers has failed, the engine has to be restarted: vLLM may take what they have answered
      for answers to later calls. The errors say so, and the label of the engine's weights (``"out of step: restart"``).
      A restart is known by the label; an actor that does not tell it (``get_weight_version``) needs a new VLLMEngine.
    - An engine that sleeps is refused, whatever ``asleep`` says: vLLM does not tell sleep from a pause. One that is put
      to sleep while a failed update has left it paused is not known to be asleep.
    - NCCL waits without a timeout in vLLM. If the trainer's process dies with a bucket on its way, the engine hangs,
      and has to be restarted; the error says so. So that no engine hangs since another has failed, each gets its
      weights over a group of its own: the trainer sends them once for each.
    - Connecting holds generation up while the communicator is made.
    - ``continue`` needs an engine that tells that it keeps no prefix cache; a server does not tell.

    Example:
        >>> llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model, weight_transfer_config={"backend": "asyncsync"}))
        >>> asyncsync.WeightSynchronizer(trainer, [asyncsync.VLLMEngine(llm), asyncsync.VLLMEngine("http://host:8000")])

    Args:
        engine: An ``AsyncLLM`` of this process; or a Ray actor that holds one and has methods of its names, such as one
            whose class includes :class:`asyncsync.VLLMActor`; or the address of an HTTP server that was started with
            ``VLLM_SERVER_DEV_MODE=1``.
        backend: The weight-transfer backend that the engine was started with: ``"asyncsync"`` or ``"nccl"``.
        api_key: The server's API key. vLLM asks for it where requests are made, not at its calls for weights (0.32.0):
            a wrong one is not noticed here, and who can reach the server can change its weights.
        address: Where the engine's workers reach this process; found out if None. Not needed with ``"nccl"``.
        timeout: Seconds that one call to a server may take.

    Raises:
        TypeError: The engine is none of these.
        ValueError: The backend is neither of them, or the address does not begin with ``http://`` or ``https://``.
    """

    def __init__(
        self,
        engine: Any,
        *,
        backend: Literal["asyncsync", "nccl"] = "asyncsync",
        api_key: str | None = None,
        address: str | None = None,
        timeout: float = CALL_TIMEOUT,
    ) -> None:
        self._client: VLLMClient = client_for(engine, api_key=api_key, timeout=timeout)
        backends: Mapping[str, Callable[[], Workers]] = {
            "asyncsync": lambda: LinedWorkers(self._client, address),
            "nccl": lambda: NCCLWorkers(self._client),
        }
        if backend not in backends:
            raise ValueError(f"backend must be one of {', '.join(backends)}, not {backend!r}")
        self._workers = backends[backend]()
        self._epoch = 0
        self._paused_for: int | None = None  # the epoch of the update it is paused for
        self._paused = False  # by an update, maybe another conductor's
        self._tainted = False
        self._asleep = False  # when it was looked at last
        self._woken = Woken()
        self._level = 1  # at which it slept
        self._loading = 0, 0  # the epoch and the version of the update that was to be loaded last
        self._loaded = 0  # the epoch of the one that was

    def __repr__(self) -> str:
        return f"<VLLMEngine {self._client!r}: {self._workers!r}>"

    async def weights_checksum(self) -> dict[str, str]:
        """Checksums by vLLM, of each parameter as it holds it, on each worker.

        Two engines that are set up alike and hold the same weights have the same.
        """
        return await asked("checksums", self._client.checksums())

    async def aclose(self) -> None:
        """Hang up. The engine itself goes on; used again, it is connected anew."""
        await self._workers.aclose()
        await self._client.aclose()

    # -- the RolloutEngine protocol -------------------------------------------------------------------------------

    async def describe_engine(self) -> EngineStatus:
        """See :meth:`asyncsync.RolloutEngine.describe_engine`.

        Raises:
            EngineError: Somebody else has paused it, or it was started with another backend.
            ConnectError: Its workers cannot reach this process.
        """
        try:
            status = await self._workers.describe_engine()
            self._paused, self._tainted = status.paused, status.tainted is not None
            self._asleep = bool(status.released)
            if not self._asleep:
                await self._refuse_others_pause()
        except BaseException:
            if not self._workers.connected:
                await self.aclose()
            raise
        self._epoch = max(self._epoch, status.epoch)
        return status

    async def accept_layout(self, layout: Layout) -> None:
        """See :meth:`asyncsync.RolloutEngine.accept_layout`."""
        await self._workers.accept_layout(layout)

    async def open_group(self, rendezvous: Rendezvous) -> Contacts:
        """See :meth:`asyncsync.RolloutEngine.open_group`."""
        return await self._workers.open_group(rendezvous)

    async def join_group(self, connection: str, contacts: Contacts) -> None:
        """See :meth:`asyncsync.RolloutEngine.join_group`."""
        await self._workers.join_group(connection, contacts)

    async def leave_group(self, connection: str) -> None:
        """See :meth:`asyncsync.RolloutEngine.leave_group`. Without a group, nothing is kept open."""
        try:
            await self._workers.leave_group(connection)
        finally:
            if not self._workers.connected:
                await self.aclose()

    async def pause_generation(self, epoch: int, policy: Policy) -> None:
        """See :meth:`asyncsync.RolloutEngine.pause_generation`."""
        self._see(epoch)
        await self._look_at_memory()
        self._paused_for = epoch
        await self._pause(epoch, policy)

    async def receive_weights(self, order: UpdateOrder) -> EngineReceipt:
        """See :meth:`asyncsync.RolloutEngine.receive_weights`."""
        self._see(order.epoch)
        self._woken.begin(order.epoch, self._loaded)
        steps: dict[str, Awaitable[Any]] = {
            "receive": self._workers.receive_weights(order),
            "may wake": self._refuse_asleep(order),
        }
        receipt: EngineReceipt = (await race(steps))["receive"]
        return replace(receipt, slept=self._asleep)

    async def finish_weight_update(self, order: UpdateOrder) -> None:
        """See :meth:`asyncsync.RolloutEngine.finish_weight_update`."""
        self._see(order.epoch)
        released = await self._refuse_asleep(order)
        if self._paused_for == order.epoch:
            await self._load(order, released)
            return
        try:
            await self._pause(order.epoch, order.policy)
            await self._load(order, released)
        except BaseException as error:
            await also(error, self._give_up(order.epoch))
            raise
        await shielded(self._resume(order.epoch), time_to_wake(order) if released else WITHIN_CLEANUP)

    async def abort_weight_update(self, epoch: int, published: int | None) -> EngineStatus:
        """See :meth:`asyncsync.RolloutEngine.abort_weight_update`.

        vLLM itself does not know that it must not serve: it is paused, and what is in flight ends. If the update has
        woken it, it is put back to sleep.
        """
        try:
            status = await self._workers.abort_weight_update(epoch, published)
        except OutOfStepError:
            raise
        except AsyncSyncError as error:
            if published is not None:  # others serve that, and nobody knows whether it does
                try:  # not shielded: this may wait for long, as a call that whoever makes it may end
                    await self._pause(epoch, "abort")
                except AsyncSyncError as failure:
                    error.add_note(f"nor could it be paused: {failure}")
            raise
        self._paused, self._tainted = self._paused or status.paused, status.tainted is not None
        if self._loading == (epoch, status.weight_version):
            self._loaded = epoch  # whoever had it loaded was cancelled
        if self._woken.to_put_back(epoch, self._loaded, whole=not self._tainted):
            status = await self._put_back(status)
        if self._tainted and not self._paused and not status.released:
            await self._pause(epoch, "abort")
        return status

    async def resume_generation(self, epoch: int) -> None:
        """See :meth:`asyncsync.RolloutEngine.resume_generation`."""
        self._see(epoch)
        newest, tainted = await self._workers.look()
        self._see_newest(epoch, newest)
        if tainted is not None:
            raise TaintedEngineError(tainted)
        await shielded(self._resume(epoch), WITHIN_CLEANUP)

    # -- what it does itself --------------------------------------------------------------------------------------

    def _see(self, epoch: int) -> None:
        self._see_newest(epoch, self._epoch)
        self._epoch = epoch

    def _see_newest(self, epoch: int, newest: int) -> None:
        if epoch < newest:
            raise OutOfStepError(f"a call of epoch {epoch} is out of date: this engine has seen epoch {newest}")

    async def _pause(self, epoch: int, policy: Policy) -> None:
        # Drained, requests that an earlier pause has kept would go on over what is torn, or is not there.
        nothing_goes_on = self._tainted or self._asleep
        mode, clear_cache = PAUSES["recompute" if policy == "drain" and nothing_goes_on else policy]
        await self._workers.note_pause(epoch, True)
        self._paused = True
        await self._workers.pause(mode, clear_cache=clear_cache)

    async def _load(self, order: UpdateOrder, released: Mapping[str, bool]) -> None:
        if WEIGHTS in released:
            self._woken.note({WEIGHTS})
            self._level = 1 if released[WEIGHTS] else 2
            await shielded(self._wake([WEIGHTS]), time_to_wake(order))
        self._loading = order.epoch, order.version
        await self._workers.load(order)
        self._tainted, self._loaded = False, order.epoch

    async def _wake(self, tags: Sequence[str] | None) -> None:
        """Get back what the workers say is gone; None: all of it."""
        failed: EngineError | None = None
        try:
            await asked("wake_up", self._client.wake_up(tags))
        except EngineError as error:  # maybe what a worker answered to an earlier call
            failed = error
        released = await self._workers.released_memory()
        if left := released.keys() & set(released if tags is None else tags):
            raise failed or EngineError(f"vLLM did not wake up all of it: {list_names(left)} released still")

    async def _put_back(self, status: EngineStatus) -> EngineStatus:
        """After an update that has woken it, and failed: let it sleep again, as it did.

        vLLM can do so when only the weights are awake (read in 0.32.0): what sleeps already is passed over.
        """
        try:
            await shielded(self._sleep(), WITHIN_CLEANUP)
            self._woken.was_put_back({WEIGHTS})
            status = await self._workers.describe_engine()
        except (EngineError, TimeoutError) as error:
            _log.warning("after a failed update: %s", error)
            status = replace(status, weight_version=None, tainted=f"it could not be put back to sleep: {error}")
        self._tainted = status.tainted is not None
        return status

    async def _sleep(self) -> None:
        await asked("sleep", self._client.sleep(self._level))
        if WEIGHTS not in await self._workers.released_memory(everywhere=True):
            # Some were woken when others failed: vLLM takes them all for asleep still, and has ignored this.
            await self._wake([WEIGHTS])
            await asked("sleep", self._client.sleep(self._level))
        if WEIGHTS not in await self._workers.released_memory(everywhere=True):
            raise EngineError("vLLM did not release its weights")

    async def _give_up(self, epoch: int) -> None:
        """End a commit that failed: go on, if what every worker holds is whole."""
        status = await self.abort_weight_update(epoch, None)
        if status.tainted is None:
            await self._resume(epoch)

    async def _resume(self, epoch: int) -> None:
        if not self._paused:
            return  # by an update, at least
        try:
            await self._workers.check_pause(epoch)
        except OutOfStepError as error:  # another conductor's update, maybe, which will resume it
            _log.info("not resumed: %s", error)
            return
        if self._asleep and await self._workers.released_memory():
            if self._loaded != epoch:  # it was not updated, and sleeps on: who waits has no memory to go on with
                await self._note_resumed(epoch)
                return
            await self._wake_all()
        await asked("resume", self._client.resume())
        await self._note_resumed(epoch)

    async def _wake_all(self) -> None:
        """The last step of an update that has loaded: with all memory there, vLLM lets requests go on by itself."""
        try:
            await self._wake(None)
        except EngineError as error:
            if self._woken.tags:
                await also(error, self._sleep())
            raise

    async def _note_resumed(self, epoch: int) -> None:
        self._paused_for, self._paused = None, False
        try:
            await self._workers.note_pause(epoch, False)
        except OutOfStepError as error:  # the same, but it has not paused it yet
            _log.info("not noted as resumed: %s", error)

    async def _look_at_memory(self) -> Mapping[str, bool]:
        """What the engine has released.

        Raises:
            EngineError: Nothing, and yet it sleeps: somebody else has paused it, or its workers do not tell.
        """
        released = await self._workers.released_memory()
        self._asleep = bool(released)
        if not released:
            await self._refuse_others_pause()
        return released

    async def _refuse_asleep(self, order: UpdateOrder) -> Mapping[str, bool]:
        released = await self._look_at_memory()
        if released and not order.wake:
            raise EngineError(asleep_and_refused(released))
        return released

    async def _refuse_others_pause(self) -> None:
        """To vLLM, an engine that is paused sleeps, too; an update's own pause is none."""
        if not self._paused and await asked("is_sleeping", self._client.is_sleeping()):
            raise EngineError(
                "the engine is asleep, or somebody else has paused it: wake it up, or resume it, before the update"
                f"{self._workers.warning}"
            )
