"""torchrl's weight sync over Ray: ``RayWeightSyncScheme``, called from the event loop, as a training loop would.

https://docs.pytorch.org/rl/stable/reference/collectors_weightsync.html
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from benchmarks import layouts
from benchmarks.contenders import ToFleet
from benchmarks.fleets import Fleet
from benchmarks.layouts import Layout
from benchmarks.peers.held import Holder, imported

_MODULE = "torchrl.weight_update"


class SchemeReceiver(Holder):
    """An engine's end: include it in an actor's class."""

    _scheme: Any

    def join_scheme(self, scheme: Any, index: int) -> None:
        """Meet the sender, and get the first weights."""
        scheme.init_on_receiver(model_id="policy", worker_idx=index, model=self.module)
        scheme.connect(worker_idx=index)
        self._scheme = scheme

    def _receive_weights_scheme(self, **_: Any) -> None:
        """What the sender calls: torchrl's name for it."""
        self._scheme.receive()


class Torchrl(ToFleet):
    """torchrl's scheme, with a module in this process.

    Args:
        fleet: The engines.
        weights: The module's weights.
        layout: Their layout.
    """

    def __init__(self, fleet: Fleet, weights: Mapping[str, Tensor], layout: Layout) -> None:
        super().__init__(fleet, list(weights.values()))
        self._torchrl: Any = None
        self._scheme: Any = None
        self._module = layouts.make_module(layout)
        for name, parameter in self._module.named_parameters():
            parameter.data = weights[name]

    async def load(self) -> None:
        """Import torchrl.

        Raises:
            NotInstalledError: It is not there.
        """
        self._torchrl = imported(_MODULE)
        await self.fleet.all("load", _MODULE)

    async def connect(self) -> None:
        """Meet the engines, and send them the first weights."""
        engines = self.fleet.engines
        self._scheme = self._torchrl.RayWeightSyncScheme()
        self._scheme.init_on_sender(
            model_id="policy", remote_collectors=engines, num_workers=len(engines), model=self._module
        )
        joining = [engine.join_scheme.remote(self._scheme, index) for index, engine in enumerate(engines)]
        await asyncio.to_thread(self._scheme.connect)
        await asyncio.gather(*joining)

    async def run(self) -> float:
        """See :meth:`benchmarks.contenders.Contender.run`."""
        start = time.perf_counter()
        self._scheme.send(self._module)
        return time.perf_counter() - start

    async def close(self) -> None:
        """Let go of the group."""
        if self._scheme is not None:
            self._scheme.shutdown()
