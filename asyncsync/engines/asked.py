"""Whatever an engine's own API raises comes back as the engine's error."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from asyncsync import cluster
from asyncsync.errors import AsyncSyncError, EngineError
from asyncsync.fanout import is_ours

T = TypeVar("T")


async def as_engine_error(call: Awaitable[T], told: Callable[[BaseException], str]) -> T:
    """Await a call of an engine's API.

    Args:
        call: The call.
        told: What to say of its error.

    Raises:
        EngineError: It failed.
        AsyncSyncError: It failed with an error of this library's: that one.
        cluster.ActorLostError: The actor is gone that it was a call to.
    """
    try:
        return await call
    except (AsyncSyncError, cluster.ActorLostError):
        raise
    except BaseException as error:
        if is_ours(error):
            raise
        raise EngineError(told(error)) from error
