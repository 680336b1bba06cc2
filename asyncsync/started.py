"""An update that was started: its weights are copied, and its outcome is still to come."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from asyncsync.coalesce import Share
from asyncsync.report import WeightUpdate


class StartedUpdate:
    """What :meth:`asyncsync.WeightSynchronizer.start_update` returns: await it for the outcome.

    It may be awaited more than once, or never: the update goes on all the same, and the next one waits for its end. Who
    is cancelled while awaiting it takes part in it no more, as in :meth:`update_weights`: if nobody else waits for the
    same update, it is undone before the cancellation goes on.
    """

    def __init__(self, share: Share[WeightUpdate], check: Callable[[], None]) -> None:
        self._share = share
        self._check = check

    def __repr__(self) -> str:
        return f"<StartedUpdate {'done' if self.done() else 'under way'}>"

    def __await__(self) -> Generator[Any, None, WeightUpdate]:
        """Wait for the outcome.

        Raises:
            WeightUpdateError: The update failed, or some engines did; see :meth:`update_weights`.
            LockError: Awaited inside :meth:`generation`, it might wait for itself.
            asyncio.CancelledError: It was cancelled.
        """
        return self._outcome().__await__()

    async def _outcome(self) -> WeightUpdate:
        if not self.done():
            self._check()
        return await self._share.outcome()

    def done(self) -> bool:
        """Whether there is an outcome: awaiting it does not wait."""
        return self._share.done

    async def cancel(self) -> None:
        """Take part in it no more: if nobody else waits for the same update, it is undone before this returns."""
        await self._share.leave()
