"""Who takes part, and in what they run: each entry says how its contender is made, and what memory it needs."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import ray
import torch
from torch import Tensor, nn

import asyncsync
from asyncsync.demo.actors import running
from asyncsync.messages import Transport
from benchmarks import layouts
from benchmarks.contenders import BareGloo, Contender, Memcpy, Ours, Put, Seed
from benchmarks.fleets import FlatReceiver, Fleet
from benchmarks.layouts import Layout
from benchmarks.peers.collective import Collective, CollectiveMember
from benchmarks.peers.direct_transport import DirectGloo, DirectReceiver, DirectSender, Nixl
from benchmarks.peers.object_store import PutPacked, PutStateDict, StateDictReceiver
from benchmarks.peers.torchrl_scheme import SchemeReceiver, Torchrl
from benchmarks.peers.torchstore_store import Torchstore

ENGINES = 2

Kind = Literal["ours", "peer", "bare"]
"""The library's own; what others offer; bytes in one piece, of no tensor: what a machine and a data plane can do."""


class PeersEngine(FlatReceiver, CollectiveMember, DirectReceiver, SchemeReceiver, StateDictReceiver):
    """An engine of the peers': it holds weights, and is nothing else."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.module = nn.Module()


class PeersTrainer(CollectiveMember, DirectSender):
    """The trainer of peers that are for actors alone."""

    def __init__(self) -> None:
        torch.set_num_threads(1)

    def fingerprint(self) -> str:
        """Digest of the weights."""
        return layouts.fingerprint([self.flat])


_OPTIONS: dict[str, Any] = {"num_cpus": 0, "enable_tensor_transport": True}
RemotePeersEngine: Any = ray.remote(**_OPTIONS)(PeersEngine)
RemotePeersTrainer: Any = ray.remote(**_OPTIONS)(PeersTrainer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What the contenders of one run share.

    Attributes:
        layout: Of the weights.
        weights: The trainer's, in this process.
        flat: As many bytes in one piece.
        fleet: Engines that hold the weights, and do nothing else.
        trainer: An actor that holds the weights, too.
        folder: For what goes through files.
    """

    layout: Layout
    weights: Mapping[str, Tensor]
    flat: Tensor
    fleet: Fleet
    trainer: Any
    folder: str

    @classmethod
    @asynccontextmanager
    async def open(cls, layout: Layout) -> AsyncIterator[Place]:
        """Start the actors and make the weights; they end with the context."""
        with tempfile.TemporaryDirectory() as folder:
            async with (
                Fleet.start(ENGINES, RemotePeersEngine) as fleet,
                running((RemotePeersTrainer, ())) as (trainer,),
            ):
                await asyncio.gather(fleet.all("hold", layout), trainer.hold.remote(layout))
                yield cls(
                    layout=layout,
                    weights=layouts.make_weights(layout),
                    flat=torch.zeros(layout.nbytes, dtype=torch.uint8),
                    fleet=fleet,
                    trainer=trainer,
                    folder=folder,
                )


PLACE_SETS = 5
"""How many sets of the weights lie in a place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One that takes part.

    Attributes:
        name: What the table calls it.
        kind: Which kind it is.
        sets: Memory that it needs at the most, in sets of the weights, beside its place.
        processes: How many it starts.
        is_restless: Whether it is busy even while nothing is sent.
        is_far: Whether bytes go from member to member, through no memory of the node and no store.
        make: Makes the contender in a place.
    """

    name: str
    kind: Kind
    sets: int
    processes: int = 0
    is_restless: bool = False
    is_far: bool = False
    make: Callable[[Place], AbstractAsyncContextManager[Contender]]


@asynccontextmanager
async def _ours(transport: str, staged: bool, place: Place) -> AsyncIterator[Contender]:
    options: dict[str, Any] = {"folder": place.folder} if transport == "folder" else {}
    async with Fleet.start(ENGINES) as fleet:
        await fleet.all("hold", place.layout, staged=staged)
        synchronizer = asyncsync.WeightSynchronizer(
            dict(place.weights), fleet.engines, **{"transport": transport, **options}
        )
        yield Ours(fleet, place.weights, synchronizer)


@asynccontextmanager
async def _made(make: Callable[[Place], Contender], place: Place) -> AsyncIterator[Contender]:
    yield make(place)


def _other(
    name: str,
    make: Callable[[Place], Contender],
    *,
    kind: Kind = "peer",
    sets: int = 1,
    processes: int = 0,
    is_restless: bool = False,
    is_far: bool = False,
) -> Entry:
    return Entry(
        name=name,
        kind=kind,
        sets=sets,
        processes=processes,
        is_restless=is_restless,
        is_far=is_far,
        make=partial(_made, make),
    )


def our_name(transport: str, *, staged: bool) -> str:
    """What the table calls the library over a transport."""
    return f"asyncsync {transport}, {'staged' if staged else 'in place'}"


REFERENCE = our_name("shared", staged=True)
"""The library as it is between processes of one node: what the others are measured against."""

REFERENCE_BETWEEN_NODES = our_name("broadcast", staged=True)
"""The same between nodes."""

FLOOR = "memcpy"

ON_GPUS = ("pynccl", "cuda_ipc")
"""Transports between GPUs."""


def _names(literals: Any) -> list[str]:
    """What a Literal, or a union of some, allows."""
    return [name for each in get_args(literals) for name in ([each] if isinstance(each, str) else _names(each))]


def all_entries() -> list[Entry]:
    """Everyone."""
    transports = [name for name in _names(Transport) if name not in ON_GPUS]
    ours = [
        Entry(
            name=our_name(transport, staged=staged),
            kind="ours",
            sets=6 if staged else 4,
            processes=ENGINES,
            is_far=transport == "broadcast",
            make=partial(_ours, transport, staged),
        )
        for transport in transports
        for staged in (True, False)
    ]
    return [
        _other(FLOOR, lambda place: Memcpy([place.flat]), kind="bare", is_far=True),
        _other("gloo broadcast, flat", lambda place: BareGloo(place.fleet, [place.flat]), kind="bare", is_far=True),
        _other("ray.put, flat", lambda place: Put(place.fleet, [place.flat]), kind="bare"),
        *ours,
        _other("ray.put, packed", lambda place: PutPacked(place.fleet, place.weights), sets=2),
        _other("ray.put of a state dict", lambda place: PutStateDict(place.fleet, place.weights), sets=5),
        _other("seed's loop", lambda place: Seed(place.fleet, place.weights), sets=2, is_far=True),
        _other("ray.util.collective", lambda place: Collective(place.fleet, place.trainer), is_far=True),
        # Its agents' threads look for work all the time: a third of a core in each of three processes.
        _other("Ray direct transport, NIXL", lambda place: Nixl(place.fleet, place.trainer), is_restless=True),
        _other("Ray direct transport, gloo", lambda place: DirectGloo(place.fleet, place.trainer), sets=3, is_far=True),
        _other("torchrl", lambda place: Torchrl(place.fleet, place.weights, place.layout), sets=4),
        _other(
            "torchstore",
            lambda place: Torchstore(place.weights, place.layout, ENGINES),
            sets=6,
            processes=ENGINES + 2,
        ),
    ]
