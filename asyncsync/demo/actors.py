"""Starting a demo's actors, and ending them with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from asyncsync import cluster
from asyncsync.shield import shielded


@asynccontextmanager
async def running(*wanted: tuple[Any, Any]) -> AsyncIterator[list[Any]]:
    """Start actors; their processes end with the context.

    Args:
        wanted: Pairs of a Ray actor class and the tuple of its arguments.
    """
    actors: list[Any] = []
    try:
        for actor_class, arguments in wanted:
            # Declaring an actor talks to Ray's control store: not on the event loop.
            actors.append(await asyncio.to_thread(actor_class.remote, *arguments))
        yield actors
    finally:
        await shielded(_end(actors))


async def _end(actors: list[Any]) -> None:
    for actor in actors:
        await cluster.kill_actor(actor)
