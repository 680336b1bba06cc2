"""vLLM's session of an update, that must be finished before the engine runs again; and calls that wait for others.

Between a session's start and its finish the layers lie on the meta device. Each counts what was loaded into it, and is
completed when all is there, or at the finish. After an error vLLM takes the session for ended, but an incomplete layer
keeps what it has got, and the next start does not begin it anew: a whole set of weights would be mixed with the rest of
the last. So after any session whose end is not known, one is begun and finished for nothing
(``model_loader/reload/layerwise.py``, 0.32.0; ``test_a_session_that_vllm_has_broken_off…``).

If workers of one engine fail together, vLLM raises what the first has answered, and leaves the others' answers for the
calls that come next: each of those raises one, until all are taken (``collective_rpc`` in
``v1/executor/multiproc_executor.py``, 0.32.0). So no error is provoked that can be helped, and after one a call that
does no harm is repeated until it succeeds (:meth:`Session.leave`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping
from typing import Any

from asyncsync.engines.vllm.clients import VLLMClient, asked
from asyncsync.errors import EngineError
from asyncsync.shield import CLEANUP_TIMEOUT

CALL_TIMEOUT = CLEANUP_TIMEOUT / 2
"""Seconds that clean-up waits for a call that vLLM has not answered."""

_log = logging.getLogger("asyncsync")


class Session:
    """The session of one engine.

    Args:
        client: Calls the engine.

    Attributes:
        open: Whether it may be open.
        unheard: Whether workers may have answered what nobody has taken.
    """

    def __init__(self, client: VLLMClient) -> None:
        self._client = client
        self._call: asyncio.Task[None] | None = None
        self._clean = False  # whether layers are known to hold nothing of a session that was not finished
        self.open = False
        self.unheard = False

    def __repr__(self) -> str:
        return f"<Session {'open' if self.open else 'ended'}{'' if self.answered else ', waiting'}>"

    @property
    def answered(self) -> bool:
        """Whether vLLM has answered the last call that waits for others."""
        return self._call is None or self._call.done()

    async def ask(self, call: Awaitable[None]) -> None:
        """Await a call that waits for others. It cannot be taken back: given up here, it goes on at the engine."""
        self._call = asyncio.ensure_future(call)
        self._call.add_done_callback(self._answered)
        await asyncio.shield(self._call)

    async def update(self, info: Mapping[str, Any]) -> None:
        """Have the workers receive and load. If that fails in one, vLLM has ended the session."""
        await self.ask(self._update(info))

    async def _update(self, info: Mapping[str, Any]) -> None:
        try:
            await asked("update_weights", self._client.update(info))
        except EngineError as error:
            if "Worker failed" in str(error):
                self.open = False
            raise

    async def settle(self) -> None:
        """Wait until vLLM has answered the last such call.

        Raises:
            EngineError: It does not.
        """
        if self._call is not None:
            await asyncio.wait([self._call], timeout=CALL_TIMEOUT)
        if not self.answered:
            raise EngineError(
                "vLLM waits for bytes that do not come, and NCCL has no timeout there: the engine has to be restarted"
            )

    async def begin(self) -> None:
        """Begin, on layers that hold nothing of an earlier session.

        Raises:
            EngineError: It could not be begun, or what is left of an earlier one cannot be cleared.
        """
        self.open = True
        if not self._clean:
            try:
                await asked("start_weight_update", self._client.start_update())
            except EngineError as error:
                if "already active" not in str(error):
                    raise
            try:
                await asked("finish_weight_update", self._client.finish_update(None))
            except EngineError as error:
                if "already active" in str(error):
                    raise  # another worker's answer to the call before; the next update finds it cleared
                # A tensor that does not fit stays in its layer, and fails whenever that is completed.
                raise EngineError(f"vLLM cannot complete its layers any more: restart the engine ({error})") from error
        self._clean = False
        await asked("start_weight_update", self._client.start_update())

    async def finish(self, version: int) -> None:
        """Finish, all being loaded, and label the weights."""
        await asked("finish_weight_update", self._client.finish_update(None))
        self.open, self._clean = False, True
        await asked("update_weight_version", self._client.label(str(version)))

    async def give_up(self) -> bool:
        """End it, if it is open. Layers of which nothing was loaded get back what they had.

        Returns:
            Whether all layers are complete again.
        """
        if self.open:
            try:
                await asked("finish_weight_update", self._client.finish_update(None))
                self._clean = True
            except EngineError as error:
                _log.debug("vLLM's session was ended before: %s", error)
            self.open = False
        return self._clean

    async def leave(self, ranks: int) -> None:
        """Have the workers leave what they have joined, and take the answers of calls that have failed.

        Args:
            ranks: How many workers there are.

        Raises:
            EngineError: vLLM could not.
        """
        await self.settle()
        if self.open:
            return  # vLLM would refuse; the next group takes this one's place
        for tries_left in reversed(range(ranks)):
            try:
                async with asyncio.timeout(CALL_TIMEOUT):
                    await self.ask(asked("shutdown_weight_transfer_engine", self._client.end_transfer()))
                self.unheard = False
                return
            except EngineError:
                if not tries_left:
                    raise

    def forget(self) -> None:
        """The engine is another one now."""
        self._clean = self.open = self.unheard = False

    def _answered(self, call: asyncio.Future[None]) -> None:
        if not call.cancelled() and "Worker failed" in str(call.exception()):
            self.unheard = True
