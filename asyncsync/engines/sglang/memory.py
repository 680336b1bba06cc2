"""Which of an SGLang engine's memory is released: exact books, since SGLang tells of none.

To release memory twice, or to resume it twice, ends SGLang's process (its books of tags raise in its scheduler, and
torch_memory_saver ends the process; read in 0.5.23, where a CPU has no memory to release). So no call is made that the
books do not allow, and one that has begun is never cut off. If a call was not answered, nobody knows: then nothing more
is asked of that memory.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection

import anyio

from asyncsync.buckets import list_names
from asyncsync.engines.sglang.calls import SGLangClient, SGLangRefusalError
from asyncsync.engines.waking import WAKE_TIMEOUT
from asyncsync.errors import EngineError
from asyncsync.shield import shielded

ALL_TAGS = frozenset({"weights", "kv_cache", "cuda_graph"})


class Memory:
    """The memory of one engine.

    Args:
        client: Calls it.

    Attributes:
        released: The tags that are released.
    """

    def __init__(self, client: SGLangClient) -> None:
        self._client = client
        self._calls = anyio.Lock()
        self._unanswered: frozenset[str] = frozenset()
        self.released: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        return f"<Memory {', '.join(sorted(self.missing))} released>" if self.missing else "<Memory awake>"

    @property
    def missing(self) -> frozenset[str]:
        """The tags that are released, or may be."""
        return self.released | self._unanswered

    def check(self) -> None:
        """See that the books are right.

        Raises:
            EngineError: A call was not answered.
        """
        if self._unanswered:
            raise EngineError(
                f"whether its {' and '.join(sorted(self._unanswered))} memory is released is not known, since a call "
                "for that was not answered, and a wrong one would end SGLang: restart the engine, and give the "
                "synchronizer a new SGLangEngine of it"
            )

    async def release(self, tags: Collection[str] | None, timeout: float = WAKE_TIMEOUT) -> None:
        """Release memory; None: all that is not released.

        Raises:
            EngineError: Some of it is released already, or that is not known.
        """

        async def release() -> None:
            async with self._calls:
                self.check()
                chosen = _known(tags) if tags else ALL_TAGS - self.released
                if not chosen or chosen & self.released:
                    raise EngineError(f"released already: {list_names(set(chosen & self.released)) or 'all'}")
                await self._answered(chosen, self._client.release_memory_occupation)
                self.released |= chosen

        await shielded(release(), timeout)

    async def resume(self, tags: Collection[str] | None, timeout: float = WAKE_TIMEOUT) -> None:
        """Get memory back; None: all that is released.

        Raises:
            EngineError: Some of it is not released, or that is not known.
        """

        async def resume() -> None:
            async with self._calls:
                self.check()
                chosen = _known(tags) if tags else self.released
                if not chosen or chosen - self.released:
                    raise EngineError(f"not released: {list_names(set(chosen - self.released)) or 'anything'}")
                await self._answered(chosen, self._client.resume_memory_occupation)
                self.released -= chosen

        await shielded(resume(), timeout)

    async def _answered(self, tags: frozenset[str], call: Callable[[list[str]], Awaitable[None]]) -> None:
        self._unanswered = tags
        try:
            await call(sorted(tags))
        except SGLangRefusalError:  # before its scheduler was asked: an error there is the end of it
            self._unanswered = frozenset()
            raise
        self._unanswered = frozenset()


def _known(tags: Collection[str]) -> frozenset[str]:
    """Tags that SGLang has: what it does not know it passes over, and these books would be wrong."""
    chosen = frozenset([tags] if isinstance(tags, str) else tags)
    if unknown := chosen - ALL_TAGS:
        raise EngineError(f"SGLang has no memory of these tags: {list_names(set(unknown))}")
    return chosen
