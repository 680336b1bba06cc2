"""torchstore: the trainer puts a state dict into the store, the engines get it from there, in place.

Its processes are Monarch's, so the engines are, too. https://github.com/meta-pytorch/torchstore
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from benchmarks.contenders import Contender
from benchmarks.layouts import Layout
from benchmarks.peers.held import imported

_KEY = "policy"


class Torchstore(Contender):
    """A store with one volume, in a process of its own.

    Args:
        weights: What is sent.
        layout: Their layout.
        engines: How many engines.
    """

    def __init__(self, weights: Mapping[str, Tensor], layout: Layout, engines: int) -> None:
        super().__init__(list(weights.values()))
        self._weights = dict(weights)
        self._layout = layout
        self._count = engines
        self._store: Any = None
        self._processes: Any = None
        self._engines: Any = None

    async def load(self) -> None:
        """Import torchstore and Monarch, and start the engines.

        Raises:
            NotInstalledError: One of them is not there.
        """
        monarch, engine = imported("monarch.actor"), imported("benchmarks.peers.torchstore_engine").TorchstoreEngine
        self._processes = monarch.this_host().spawn_procs(per_host={"gpus": self._count})
        self._engines = await imported("torchstore.utils").spawn_actors(
            self._count, engine, "engines", mesh=self._processes, layout=self._layout
        )
        await self._engines.fingerprint.call()

    async def connect(self) -> None:
        """Start the store."""
        store = imported("torchstore")
        await store.initialize()
        self._store = store

    async def run(self) -> float:
        """See :meth:`benchmarks.contenders.Contender.run`."""
        start = time.perf_counter()
        await self._store.put_state_dict(state_dict=self._weights, key=_KEY)
        await self._engines.fetch.call(_KEY)
        return time.perf_counter() - start

    async def fingerprints(self) -> Sequence[str]:
        """See :meth:`benchmarks.contenders.Contender.fingerprints`."""
        return [digest for _, digest in await self._engines.fingerprint.call()]

    async def close(self) -> None:
        """End the engines and the store."""
        if self._processes is not None:
            await self._processes.stop()
        if self._store is not None:
            await self._store.shutdown()
