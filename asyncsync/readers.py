"""Who generates on which engine, so that a generation ends with its engine.

An update waits for generations. One on an engine that does not answer any more would not end by itself, and hold the
update of all others off.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import anyio

from asyncsync.errors import EngineError
from asyncsync.fleet import Member


class Readers:
    """Those who said on which engine they generate."""

    def __init__(self) -> None:
        self._scopes: dict[Member, set[anyio.CancelScope]] = {}

    def __repr__(self) -> str:
        return f"<Readers on {', '.join(member.name for member in self._scopes) or 'none'}>"

    @contextmanager
    def reading(self, member: Member) -> Iterator[None]:
        """Generate on an engine.

        Raises:
            EngineError: It was given up meanwhile.
        """
        scope = anyio.CancelScope()
        scopes = self._scopes.setdefault(member, set())
        scopes.add(scope)
        try:
            with scope:
                yield
        finally:
            scopes.discard(scope)
            if not scopes:
                self._scopes.pop(member, None)
        if scope.cancelled_caught:
            raise EngineError(f"{member.name} does not answer, and was given up while it generated", engine=member.name)

    def end(self, members: Iterable[Member]) -> None:
        """End all generations on some engines."""
        for member in members:
            for scope in self._scopes.get(member, ()):
                scope.cancel()
