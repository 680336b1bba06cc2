"""Ways to bring weights to engines, and how each is run: weights change before, and bytes are compared after."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

import ray
import torch
from torch import Tensor

import asyncsync
from benchmarks import layouts
from benchmarks.fleets import Fleet
from benchmarks.running import stalls_of_the_loop
from benchmarks.seed_loop import SeedLoop

WARM_UP = 2
"""Runs that do not count: an engine allocates memory to stage weights in during the first two updates."""


class WrongBytesError(Exception):
    """After an update, what an engine holds is not what the trainer sent: no figure counts."""


class Contender(ABC):
    """One way to bring weights to engines.

    Args:
        tensors: What it sends, if that lies in this process.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors

    async def load(self) -> None:
        """Import what it is made of, at both ends: no part of connecting."""
        return

    async def connect(self) -> None:
        """What must be done once, before the first run."""
        return

    async def prepare(self) -> None:
        """Change the tensors, and have nothing else to do in the next run."""
        layouts.change(self.tensors)
        gc.collect()

    @abstractmethod
    async def run(self) -> float:
        """Bring the tensors to every engine, once; the seconds it took."""

    async def expected(self) -> str:
        """Digest of what was sent."""
        return layouts.fingerprint(self.tensors)

    @abstractmethod
    async def fingerprints(self) -> Sequence[str]:
        """Digests of what the engines hold now."""

    async def check(self) -> None:
        """Compare the engines' bytes with the trainer's.

        Raises:
            WrongBytesError: They differ.
        """
        expected = await self.expected()
        for index, found in enumerate(await self.fingerprints()):
            if found != expected:
                raise WrongBytesError(f"{type(self).__name__}: engine {index} holds other bytes than were sent")

    async def close(self) -> None:
        """Let go of what :meth:`connect` made."""
        return


class ToFleet(Contender):
    """A way to engines that are a :class:`benchmarks.fleets.Fleet`.

    Args:
        fleet: The engines.
        tensors: What is sent.
    """

    def __init__(self, fleet: Fleet, tensors: Sequence[Tensor]) -> None:
        super().__init__(tensors)
        self.fleet = fleet

    async def fingerprints(self) -> Sequence[str]:
        """See :meth:`Contender.fingerprints`."""
        return await self.fleet.all("fingerprint")


class Ours(ToFleet):
    """The library."""

    def __init__(self, fleet: Fleet, weights: Mapping[str, Tensor], synchronizer: asyncsync.WeightSynchronizer) -> None:
        super().__init__(fleet, list(weights.values()))
        self.synchronizer = synchronizer

    async def run(self) -> float:
        """See :meth:`Contender.run`."""
        start = time.perf_counter()
        await self.synchronizer.update_weights()
        return time.perf_counter() - start

    async def close(self) -> None:
        """Close the synchronizer."""
        await self.synchronizer.aclose()


class Flat(ToFleet):
    """A way for bytes in one piece, to the engines' flat memory."""

    async def fingerprints(self) -> Sequence[str]:
        """Digests of the engines' flat memory."""
        return await self.fleet.all("flat_fingerprint")


class Put(Flat):
    """Ray's object store, as lean as can be: one array, put from a thread, and copied by each actor."""

    async def run(self) -> float:
        """See :meth:`Contender.run`."""
        start = time.perf_counter()
        reference = await asyncio.to_thread(ray.put, self.tensors[0].numpy())
        await self.fleet.all("receive_object", reference)
        return time.perf_counter() - start


class Seed(ToFleet):
    """The loop that the library replaces. It blocks the event loop: that is what its stall shows."""

    def __init__(self, fleet: Fleet, weights: Mapping[str, Tensor]) -> None:
        super().__init__(fleet, list(weights.values()))
        self.weights = weights

    async def connect(self) -> None:
        """Form the group."""
        await self.fleet.form_group()

    async def run(self) -> float:
        """See :meth:`Contender.run`."""
        start = time.perf_counter()
        SeedLoop(self.fleet.engines, self.fleet.group, self.fleet.lock).update(self.weights)
        return time.perf_counter() - start


class BareGloo(Flat):
    """One broadcast of as many bytes: what the data plane can do."""

    async def connect(self) -> None:
        """Form the group."""
        await self.fleet.form_group()

    async def run(self) -> float:
        """See :meth:`Contender.run`."""
        received = asyncio.create_task(self.fleet.all("receive_flat"))
        seconds = await asyncio.to_thread(self._broadcast)
        await received
        return seconds

    def _broadcast(self) -> float:
        self.fleet.group.barrier()
        start = time.perf_counter()
        self.fleet.group.broadcast(self.tensors[0]).wait()
        self.fleet.group.barrier()
        return time.perf_counter() - start


class Memcpy(Contender):
    """One copy of as many bytes: what the memory can do."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__(tensors)
        self.target = torch.zeros_like(tensors[0])

    async def run(self) -> float:
        """See :meth:`Contender.run`."""
        start = time.perf_counter()
        self.target.copy_(self.tensors[0])
        return time.perf_counter() - start

    async def fingerprints(self) -> Sequence[str]:
        """The copy's digest."""
        return [layouts.fingerprint([self.target])]


def in_turn(names: Iterable[str], turn: int) -> list[str]:
    """The contenders in the order of one round: who comes after whom matters, since one that has rested is slower."""
    names = list(names)
    return random.Random(turn).sample(names, len(names))


async def once(contender: Contender) -> float:
    """Run a contender on changed weights; the seconds it took.

    Raises:
        WrongBytesError: An engine holds other bytes than were sent.
    """
    await contender.prepare()
    seconds = await contender.run()
    await contender.check()
    return seconds


async def stall_of(contender: Contender) -> float:
    """Run a contender on changed weights; the longest that this event loop stood still meanwhile, in milliseconds.

    Raises:
        WrongBytesError: An engine holds other bytes than were sent.
    """
    await contender.prepare()
    async with stalls_of_the_loop() as meter:
        await contender.run()
    await contender.check()
    return meter.longest_ms
