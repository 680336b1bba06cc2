"""vLLM's session of an update, that must be finished before the engine runs again; and calls that all workers answer.

Between a session's start and its finish the layers lie on the meta device. Each counts what was loaded into it, and is
completed when all is there, or at the finish. After an error vLLM takes the session for ended, but an incomplete layer
keeps what it has got, and the next start does not begin it anew: a whole set of weights would be mixed with the rest of
the last. So after any session whose end is not known, one is begun and finished for nothing
(``model_loader/reload/layerwise.py``, 0.32.0; ``test_a_session_that_vllm_has_broken_off…``).

If one of several workers fails, vLLM raises its error and leaves the answers of those after it where they are. From
then on, whatever it is asked, it takes an older answer for theirs: a failure may be heard one call later, after the
update was published, or never. No call takes away more answers than it adds, so this never ends (``collective_rpc`` in
``v1/executor/multiproc_executor.py``, 0.32.0). Such an engine is *out of step*: it is asked for nothing more, and has
to be restarted. Its label says so to whoever comes next, and tells when it was.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from asyncsync.engines.vllm.clients import VLLMClient, asked
from asyncsync.errors import EngineError
from asyncsync.shield import CLEANUP_TIMEOUT

CALL_TIMEOUT = CLEANUP_TIMEOUT / 2
"""Seconds that clean-up waits for a call that vLLM has not answered."""

OUT_OF_STEP = "out of step: restart"
"""The label of an engine whose workers' answers cannot be believed any more."""

_RESTART = "a call to several workers failed, and vLLM may take old answers for theirs: the engine has to be restarted"

_log = logging.getLogger("asyncsync")


class Session:
    """The session of one engine.

    Args:
        client: Calls the engine.

    Attributes:
        ranks: How many workers the engine has.
        open: Whether it may be open.
        out_of_step: Whether vLLM's answers cannot be believed.
        labelled: Whether the engine's label is known to say so.
    """

    def __init__(self, client: VLLMClient) -> None:
        self._client = client
        self._call: asyncio.Task[None] | None = None
        self._given_up = False  # whether nobody waits for that call
        self._clean = False  # whether layers are known to hold nothing of a session that was not finished
        self.ranks = 1
        self.open = False
        self.out_of_step = self.labelled = False

    def __repr__(self) -> str:
        return f"<Session {'open' if self.open else 'ended'}{'' if self.answered else ', waiting'}>"

    @property
    def answered(self) -> bool:
        """Whether vLLM has answered the last call."""
        return self._call is None or self._call.done()

    async def ask(self, call: Callable[[], Awaitable[None]]) -> None:
        """Make a call that all workers answer, after the last one. It cannot be taken back: given up here, it goes on.

        Raises:
            EngineError: It failed; or the engine does not answer, or is out of step.
        """
        while not self.answered:
            await self._wait()
        if self.out_of_step:
            raise EngineError(_RESTART)
        made = self._call = asyncio.ensure_future(self.hear(call()))
        made.add_done_callback(lambda _: made.cancelled() or made.exception())  # looked at, if nobody else does
        self._given_up = False
        try:
            await asyncio.shield(made)
        finally:
            if self._call is made:
                self._given_up = True

    async def hear(self, call: Awaitable[None], sign: str = "") -> None:
        """Await a call's answer. If it failed with that sign, several workers are out of step.

        Raises:
            EngineError: It failed.
        """
        try:
            await call
        except EngineError as error:
            if self.ranks == 1 or sign not in str(error):
                raise
            self.out_of_step = True
            await self._label()
            raise EngineError(f"{error}; {_RESTART}") from error

    async def settle(self) -> None:
        """Wait until vLLM has answered a call that was given up.

        Raises:
            EngineError: It does not.
        """
        while self._given_up and not self.answered:
            await self._wait()

    async def _wait(self) -> None:
        call = self._call
        assert call is not None
        await asyncio.wait([call], timeout=CALL_TIMEOUT)
        if not call.done():
            raise EngineError(
                "vLLM does not answer. If it waits for bytes that do not come, it waits for ever, "
                "since NCCL has no timeout there: the engine has to be restarted"
            )

    async def update(self, info: Mapping[str, Any]) -> None:
        """Have the workers receive and load. If that fails in the only one, vLLM has ended the session."""

        async def update() -> None:
            try:
                await asked("update_weights", self._client.update(info))
            except EngineError as error:
                self.open = "Worker failed" not in str(error)
                raise

        await self.ask(update)

    async def begin(self) -> None:
        """Begin, on layers that hold nothing of an earlier session.

        Raises:
            EngineError: It could not be begun, or what is left of an earlier one cannot be cleared.
        """
        self.open = True
        if not self._clean:
            try:
                await self.ask(self._start)
            except EngineError as error:
                if "already active" not in str(error):
                    raise
            try:
                await self.ask(self._finish)
            except EngineError as error:
                if "Worker failed" not in str(error):
                    raise
                # A tensor that does not fit stays in its layer, and fails whenever that is completed.
                raise EngineError(f"vLLM cannot complete its layers any more: restart the engine ({error})") from error
        self._clean = False
        await self.ask(self._start)

    async def _start(self) -> None:
        self.open = True
        await asked("start_weight_update", self._client.start_update())

    async def _finish(self) -> None:
        try:
            await asked("finish_weight_update", self._client.finish_update(None))
        except EngineError as error:
            self.open = "without a matching" not in str(error)
            raise
        self.open, self._clean = False, True

    async def finish(self, version: int) -> None:
        """Finish, all being loaded, and label the weights."""
        await self.ask(self._finish)
        await asked("update_weight_version", self._client.label(str(version)))

    async def give_up(self) -> bool:
        """End it, if it is open. Layers of which nothing was loaded get back what they had.

        Returns:
            Whether all layers are complete again.
        """
        if self.open and not self.out_of_step:
            try:
                await self.ask(self._finish)
            except EngineError as error:
                _log.info("vLLM's session could not be ended: %s", error)
        return self._clean

    async def leave(self) -> None:
        """Have the workers leave what they have joined.

        Raises:
            EngineError: vLLM could not.
        """

        async def end() -> None:
            try:
                await asked("shutdown_weight_transfer_engine", self._client.end_transfer())
            except EngineError as error:
                self.open = "during a weight update" in str(error)
                raise

        while not self.answered:
            await self._wait()
        if not self.open and not self.out_of_step:  # else vLLM would refuse; the next group takes this one's place
            await self.ask(end)

    async def refuse_out_of_step(self) -> None:
        """Refuse an engine whose answers cannot be believed.

        Raises:
            EngineError: It is such a one.
        """
        if self.out_of_step:
            if not self.labelled:
                await self._label()
            raise EngineError(_RESTART)

    async def _label(self) -> None:
        try:
            await asked("update_weight_version", self._client.label(OUT_OF_STEP))
            self.labelled = True
        except EngineError as error:
            _log.warning("an engine that has to be restarted could not be labelled as such: %s", error)

    def forget(self) -> None:
        """The engine is another one now."""
        self._clean = self.open = self.out_of_step = self.labelled = False
