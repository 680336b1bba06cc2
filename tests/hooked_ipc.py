"""CUDA IPC between processes, with stubbed CUDA: programs, as in :mod:`tests.hooked`.

The trainer's process is under torch_memory_saver's real hook, and its weights lie in the saver's memory.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch_memory_saver import torch_memory_saver as saver

import asyncsync
from asyncsync.errors import LinkLostError
from asyncsync.memory_saver.driver import is_ipc_capable, is_mapped
from asyncsync.messages import Contacts, EngineStatus, Rendezvous
from asyncsync.rank_worker import RankWorker
from asyncsync.transports import device_memory, shared
from asyncsync.transports.cuda_ipc import IpcEngineLink, IpcJoining, IpcSourceLink
from asyncsync.transports.device_memory import DeviceSet, DeviceSets
from benchmarks.gpu_peer import Peer
from tests.cuda_stubs import gpu
from tests.engines import zoo
from tests.hooked_updates import step
from tests.sample import Zoo, contents, random_bytes

Found = dict[str, Any]

GPU, OTHER = "0f3b8a51-0000-4000-8000-00000000000a", "0f3b8a51-0000-4000-8000-00000000000b"
NBYTES = 3 * 4096 + 5
NEVER = threading.Event()


# -- whole updates ----------------------------------------------------------------------------------------------------


class GpuEngine(asyncsync.ModuleEngine):
    """An engine on a GPU, in a process of its own.

    Args:
        seed: Of its first weights.
        staged: Whether it holds new weights beside the old.
        sees: The GPUs that it sees; its own is the first.
    """

    def __init__(self, seed: int, staged: bool, *sees: str) -> None:
        gpu.install(*sees)
        super().__init__(gpu.put_module(zoo(seed)), staged=staged)
        self._calls: list[str] = []

    async def describe_engine(self) -> EngineStatus:
        self._calls.append("describe_engine")
        return await super().describe_engine()

    async def pause_generation(self, *args: Any) -> None:
        self._calls.append("pause_generation")
        await super().pause_generation(*args)

    def calls(self) -> list[str]:
        """What it was asked."""
        return self._calls

    def contents(self) -> dict[str, bytes]:
        """Its weights."""
        return contents(self.module)

    def opened(self) -> int:
        """How many allocations of other processes it has open."""
        return gpu.opened()


@asynccontextmanager
async def engines(*kinds: tuple[Any, ...]) -> AsyncIterator[list[Any]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(Peer.start(GpuEngine, *kind)) for kind in kinds]


def in_saver() -> tuple[Zoo, dict[str, Tensor]]:
    """A model, and its weights in the saver's memory on the GPU."""
    model = Zoo(1)
    return model, gpu.put_all(dict(model.state_dict(keep_vars=True)))


def worker_of(synchronizer: asyncsync.WeightSynchronizer) -> RankWorker:
    worker = synchronizer._sources.all[0].trainer
    assert isinstance(worker, RankWorker)
    return worker


async def updated() -> Found:
    """Weights that lie in the saver's memory: what is sent is a repacked copy, awake, paused and started."""
    model, weights = in_saver()
    before = len(gpu.allocations())
    found: Found = {"equal": [], "transports": [], "opened": [], "kept": []}
    found["saver's"] = not any(is_ipc_capable(tensor) for tensor in weights.values() if tensor.numel())
    taken: list[tuple[bool, bool]] = []
    make = DeviceSets._make

    def note(sets: DeviceSets, number: int, nbytes: int) -> DeviceSet:
        made = make(sets, number, nbytes)
        taken.append((is_ipc_capable(made.memory), threading.current_thread().name == "asyncsync-sender"))
        return made

    patched: Any = DeviceSets
    patched._make = note
    async with (
        engines((50, True, GPU), (51, False, OTHER, GPU)) as peers,
        asyncsync.WeightSynchronizer(weights, peers, bucket_size=1024, timeout=60) as synchronizer,
    ):

        async def look(update: asyncsync.WeightUpdate, was: dict[str, bytes]) -> None:
            held = await asyncio.gather(*(peer.contents.remote() for peer in peers))
            found["equal"].append([each == was for each in held])
            found["transports"].append([outcome.transport for outcome in update.outcomes])
            found["opened"].append([await peer.opened.remote() for peer in peers])
            found["kept"].append(len(worker_of(synchronizer)._device_sets._sets) + device_memory.sweep())

        for _ in range(3):
            await look(await synchronizer.update_weights(), contents(model))
            step(weights, model)
        saver.pause()
        await look(await synchronizer.update_weights(), contents(model))
        found["stays paused"] = not any(is_mapped(tensor) for tensor in weights.values() if tensor.numel())
        saver.resume()
        was = contents(model)
        started = await synchronizer.start_update()
        step(weights, model)
        await look(await started, was)
        found["allocated"] = len(gpu.allocations()) - before
        found["made"] = [list(each) for each in taken]
    found["in /dev/shm"] = [name for name in os.listdir("/dev/shm") if "torch" in name or "cuda" in name.lower()]
    return found


async def kept() -> Found:
    """A trainer that nothing takes memory away from keeps one set; a failed update costs another, for a while."""
    _, weights = in_saver()
    found: Found = {"numbers": [], "equal": []}
    async with (
        engines((50, True, GPU), (51, False, GPU)) as peers,
        asyncsync.WeightSynchronizer(
            weights, peers, bucket_size=1024, timeout=60, offload=False, transport="cuda_ipc"
        ) as synchronizer,
    ):
        worker = worker_of(synchronizer)
        make = DeviceSets._make

        def untracked(sets: DeviceSets, number: int, nbytes: int) -> DeviceSet:
            with saver.disable():
                return make(sets, number, nbytes)

        patched: Any = DeviceSets
        patched._make, patched.why_not = untracked, lambda sets, nbytes: None
        for number in range(4):
            weights["matrix_float32"].add_(1)
            await synchronizer.update_weights()
            held = await asyncio.gather(*(peer.contents.remote() for peer in peers))
            found["equal"].append(held[0] == held[1] and number + 1 == synchronizer.weight_version)
            found["numbers"].append(sorted(worker._device_sets.numbers))
    found["left"] = len(worker._device_sets._sets)
    return found


async def mixed() -> Found:
    """One update through a GPU's memory, the host's and a broadcast, from one reading of the weights."""
    model, weights = in_saver()
    found: Found = {"equal": [], "transports": []}
    ways = ["cuda_ipc", "broadcast", "shared"]
    async with engines((50, True, GPU), (51, False, GPU), (52, True, OTHER)) as peers:
        chosen = dict(zip(map(id, peers), ways, strict=True))
        async with asyncsync.WeightSynchronizer(
            weights,
            peers,
            bucket_size=1024,
            timeout=60,
            backend="gloo",
            transport=lambda peer: chosen[id(peer)],  # type: ignore[arg-type,return-value]
        ) as synchronizer:
            for _ in range(2):
                update = await synchronizer.update_weights()
                held = await asyncio.gather(*(peer.contents.remote() for peer in peers))
                found["equal"].append([each == contents(model) for each in held])
                found["transports"].append([outcome.transport for outcome in update.outcomes])
                step(weights, model)
    return found


class Told(logging.Handler):
    """Keeps what was logged."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname}: {record.getMessage()}")


async def refused() -> Found:
    """What cannot be shared, or opened: an error before anything is paused, or another way, and the reason is told."""
    model, weights = in_saver()
    found: Found = {}
    log = logging.getLogger("asyncsync")
    log.setLevel(logging.DEBUG)

    def not_capable() -> None:
        os.environ["STUB_NOT_CAPABLE"] = "1"

    cuda: Any = torch.cuda

    def too_little() -> None:
        cuda.mem_get_info = lambda which=None: (1000, 2000)

    def nothing() -> None:
        os.environ.pop("STUB_NOT_CAPABLE", None)
        cuda.mem_get_info = lambda which=None: (gpu.FREE, gpu.FREE)

    cases: dict[str, tuple[Callable[[], None], str]] = {
        "not capable": (not_capable, GPU),
        "too little": (too_little, GPU),
        "hidden": (nothing, OTHER),
    }
    for name, (begin, sees) in cases.items():
        async with engines((50, False, sees)) as peers:
            begin()
            options: dict[str, Any] = {"bucket_size": 1024, "timeout": 60, "backend": "gloo"}
            async with asyncsync.WeightSynchronizer(weights, peers, transport="cuda_ipc", **options) as synchronizer:
                try:
                    await synchronizer.update_weights()
                except asyncsync.ConnectError as error:
                    found[name] = {
                        "error": str(error),
                        "calls": await peers[0].calls.remote(),
                    }
            told = Told()
            log.addHandler(told)
            async with asyncsync.WeightSynchronizer(weights, peers, transport="shared", **options) as synchronizer:
                update = await synchronizer.update_weights()
            log.removeHandler(told)
            found[name]["shared"] = update.outcomes[0].transport
            found[name]["told"] = [line for line in told.lines if "CUDA IPC" in line]
            found[name]["equal"] = await peers[0].contents.remote() == contents(model)
            nothing()
    return found


async def used_up() -> Found:
    """Memory of the GPU that cannot be had any more in the second update, and can again in the third."""
    model, weights = in_saver()
    found: Found = {"transports": [], "equal": []}
    memory: Any = device_memory
    allocate = device_memory._allocate

    def only_a_little(nbytes: int, where: torch.device) -> Tensor:
        if nbytes > 1:
            raise OSError("out of memory")
        return allocate(nbytes, where)

    async with (
        engines((50, True, GPU), (51, False, GPU)) as peers,
        asyncsync.WeightSynchronizer(weights, peers, bucket_size=1024, timeout=60, backend="gloo") as synchronizer,
    ):
        for number in range(3):
            memory._allocate = only_a_little if number == 1 else allocate
            if number == 2:
                synchronizer._connection.forget()
            update = await synchronizer.update_weights()
            held = await asyncio.gather(*(peer.contents.remote() for peer in peers))
            found["equal"].append([each == contents(model) for each in held])
            found["transports"].append([outcome.transport for outcome in update.outcomes])
            step(weights, model)
    return found


# -- lines ------------------------------------------------------------------------------------------------------------


def rendezvous(rank: int) -> Rendezvous:
    return Rendezvous(
        connection="a group",
        backend="gloo",
        transport="cuda_ipc",
        rank=rank,
        world_size=2,
        join_timeout=10,
        operation_timeout=30,
    )


class Source:
    """A source whose steps are told, in a process of its own."""

    def __init__(self) -> None:
        gpu.install(GPU)
        self._sets = DeviceSets()
        self._sets.device = torch.device("cuda", 0)
        self._link: IpcSourceLink | None = None
        self._last = 0

    async def open(self) -> Contacts:
        """Begin to let an engine in."""
        self._joining = IpcJoining(rendezvous(0), sets=self._sets)
        self._joined = asyncio.ensure_future(asyncio.to_thread(self._joining.join))
        return await self._joining.contacts()

    async def join(self) -> None:
        """Wait for it."""
        self._link = await self._joined  # type: ignore[assignment]

    def send(self, epoch: int, buckets: int) -> int:
        """Write a set, and tell of so many of its two buckets; the set's number."""
        assert self._link is not None
        self._link.hear()
        taken = self._sets.take(NBYTES)
        self._link.begin(epoch, taken, 2)
        taken.memory.copy_(random_bytes(NBYTES, epoch))
        for _ in range(buckets):
            self._last = self._link.start_send(taken.memory)
        return taken.number

    async def wait(self) -> None:
        """Wait until all was taken."""
        assert self._link is not None
        await asyncio.to_thread(self._link.wait, self._last, NEVER)

    def order(self) -> list[str]:
        """What a bucket's telling is made of, in order."""
        assert self._link is not None
        gpu.said.clear()
        tell = self._link._tell
        self._link._tell = lambda: gpu.said.append("told")  # type: ignore[method-assign]
        self._link.start_send(torch.empty(0))
        self._link._tell = tell  # type: ignore[method-assign]
        return list(gpu.said)

    def held(self) -> int:
        """How many sets are held."""
        assert self._link is not None
        self._link.hear()
        return sum(bool(each.holders) for each in self._sets._sets)

    def retired(self) -> tuple[int, int]:
        """How many sets are there to be given, and how many were given up that somebody has open."""
        assert self._link is not None
        self._link.hear()
        return len(self._sets.numbers), device_memory.sweep()

    def allocated(self) -> int:
        """How many sets have memory."""
        return sum(each["total_size"] == NBYTES + gpu.OFFSET for each in gpu.allocations())

    def say(self, message: bytes) -> None:
        """Say something else, with a descriptor."""
        assert self._link is not None
        line = self._link._peers[0].line
        assert line is not None
        socket.send_fds(line, [message], [0])

    def strange(self, epoch: int) -> None:
        """Give a set on a GPU of another name."""
        properties: Any = torch.cuda
        properties.get_device_properties = lambda which: type("", (), {"uuid": OTHER})()
        self.send(epoch, 2)

    def kill(self) -> None:
        """Be killed."""
        os.kill(os.getpid(), signal.SIGKILL)


async def joined(source: Any) -> IpcEngineLink:
    joining = IpcJoining(rendezvous(1), sets=None)
    joining.introduce(await source.open.remote())
    link = await asyncio.to_thread(joining.join)
    await source.join.remote()
    assert isinstance(link, IpcEngineLink)
    return link


def receive(link: IpcEngineLink, epoch: int, buckets: int = 2) -> Any:
    lent = link.arena(epoch, NBYTES, NEVER)
    for _ in range(buckets):
        link.wait(link.start_receive(lent.memory), NEVER)
    return lent


def leases() -> int:
    """Descriptors of pipes that this process has open."""
    links = [os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd")]
    return sum(os.readlink(link).startswith("pipe:") for link in links if os.path.islink(link))


async def lines() -> Found:
    """Two updates over one line: what is open when, and in which order it is said."""
    found: Found = {"equal": [], "open": [], "numbers": []}
    async with Peer.start(Source) as source:
        link = await joined(source)
        before = leases()
        for epoch in (1, 2, 3):
            found["numbers"].append(await source.send.remote(epoch, 2))
            lent = receive(link, epoch)
            found["equal"].append(torch.equal(lent.memory.cpu(), random_bytes(NBYTES, epoch)))
            found["open"].append([gpu.opened(), leases() - before, await source.held.remote()])
            patched: Any = link
            say = link.say
            gpu.said.clear()

            def note(*args: int, say: Callable[..., None] = say) -> None:
                gpu.said.append(f"says with {gpu.opened()} open")
                say(*args)

            patched.say = note
            lent.let_go()
            patched.say = say
            link.finish()
            await source.wait.remote()
            found["open"].append([gpu.opened(), leases() - before, await source.held.remote()])
        found["order here"], found["order there"] = list(gpu.said), await source.order.remote()
        link.close()
    return found


async def one_bucket(source: Any) -> tuple[IpcEngineLink, Any]:
    """A line over which the first of an update's two buckets has come, and the set, which is open."""
    link = await joined(source)
    await source.send.remote(1, 1)
    return link, receive(link, 1, buckets=1)


@contextmanager
def polled() -> Iterator[threading.Event]:
    """Set as soon as somebody looks at sockets: who waits at a line has come to its waiting then."""
    reached, poll, patched = threading.Event(), select.poll, cast("Any", select)

    def noted() -> Any:
        reached.set()
        return poll()

    patched.poll = noted
    try:
        yield reached
    finally:
        patched.poll = poll


async def left() -> Found:
    """An engine that leaves with a set open: the source never writes to it, and frees it once it is closed."""
    found: Found = {}
    async with Peer.start(Source) as source:
        link, lent = await one_bucket(source)
        view = lent.memory[5:]
        link.close()
        found["retired"] = await source.retired.remote()
        link = await joined(source)
        await source.send.remote(2, 2)
        other = receive(link, 2)
        found["bytes stay"] = torch.equal(view.cpu(), random_bytes(NBYTES, 1)[5:])
        found["others"] = torch.equal(other.memory.cpu(), random_bytes(NBYTES, 2))
        found["allocated"] = await source.allocated.remote()
        other.let_go()
        link.finish()
        del lent, other, view
        found["closed"] = [gpu.opened(), await source.retired.remote(), await source.allocated.remote()]
        link.close()
    return found


async def killed() -> Found:
    """A source that is killed while an engine waits for its next bucket."""
    found: Found = {}
    async with Peer.start(Source) as source:
        link, lent = await one_bucket(source)
        with polled() as reached:
            waiting = asyncio.ensure_future(asyncio.to_thread(link.wait, link.start_receive(lent.memory), NEVER))
            found["waits"] = await asyncio.to_thread(reached.wait, 10) and not waiting.done()
        dying = source.kill.remote()
        try:
            await waiting
        except LinkLostError as error:
            found["error"], found["peers"] = str(error), [list(peer) for peer in error.peers]
        await asyncio.wait([dying])
        found["dead"] = isinstance(dying.exception(), ConnectionError)
        found["open"] = [gpu.opened()]
        del lent, waiting
        found["open"].append(gpu.opened())
        link.close()
    return found


class Reader:
    """An engine that takes one bucket, in a process of its own."""

    def __init__(self) -> None:
        gpu.install(GPU)

    async def join(self, contacts: Contacts) -> None:
        """Join the source."""
        joining = IpcJoining(rendezvous(1), sets=None)
        joining.introduce(contacts)
        self._link = await asyncio.to_thread(joining.join)

    def receive(self) -> int:
        """Take a bucket, and keep the set; how many are open."""
        assert isinstance(self._link, IpcEngineLink)
        self._lent = receive(self._link, 1, buckets=1)
        return gpu.opened()

    def kill(self) -> None:
        """Be killed."""
        os.kill(os.getpid(), signal.SIGKILL)


async def engine_killed() -> Found:
    """An engine that is killed with a set open: the source hears it, and the set's memory is freed."""
    found: Found = {}
    source = Source()
    contacts = await source.open()
    async with Peer.start(Reader) as engine:
        await asyncio.gather(engine.join.remote(contacts), source.join())
        with saver.disable():
            source.send(1, 1)
        found["open"] = [await engine.receive.remote(), source.allocated()]
        assert source._link is not None
        source._last = source._link.start_send(torch.empty(0))
        with polled() as reached:
            waiting = asyncio.ensure_future(source.wait())
            found["waits"] = await asyncio.to_thread(reached.wait, 10) and not waiting.done()
        dying = engine.kill.remote()
        await asyncio.wait([waiting, dying])
        found["error"] = str(waiting.exception())
        dying.exception()
        found["left"] = device_memory.sweep(10)
        found["open"].append(source.allocated())
    return found


async def strange() -> Found:
    """What an engine must not follow: another GPU's memory, and messages that say something else."""
    found: Found = {}
    head = shared._TO_ENGINE.pack(shared.SET, 1, 1, NBYTES)
    messages = {
        "no share": head,
        "a share cut short": head + bytes(device_memory.Share.NBYTES - 1),
        "a share too long": head + bytes(device_memory.Share.NBYTES + 1),
        "no handle": head + bytes(device_memory.Share.NBYTES),
        "more than buckets": shared._TO_ENGINE.pack(2, 1, 1, 0) + bytes(device_memory.Share.NBYTES),
        "another GPU": None,
    }
    async with Peer.start(Source) as source:
        for name, message in messages.items():
            link = await joined(source)
            before = leases()
            await (source.strange.remote(1) if message is None else source.say.remote(message))
            try:
                receive(link, 1)
            except LinkLostError as error:
                found[name] = [str(error), gpu.opened(), leases() - before]
            link.close()
    return found


async def forked() -> Found:
    """A child of an engine, and one of a source: it keeps nothing open, and closes nothing of its parent's."""
    found: Found = {}
    async with Peer.start(Source) as source:
        link = await joined(source)
        await source.send.remote(1, 2)
        lent = receive(link, 1)
        with saver.disable():
            own = DeviceSet(1, NBYTES, torch.device("cuda", 0))
        found["pipes"] = [leases()]
        child = os.fork()
        if not child:
            count = leases()
            del lent, own
            os._exit(count)
        found["pipes"].append(os.waitstatus_to_exitcode((await asyncio.to_thread(os.waitpid, child, 0))[1]))
        found["open"] = gpu.opened()
        found["equal"] = torch.equal(lent.memory.cpu(), random_bytes(NBYTES, 1))
        del own
        found["left"] = device_memory.sweep()
        link.close()
    return found


PROGRAMS: dict[str, Callable[[], Any]] = {
    program.__name__: program
    for program in (updated, kept, mixed, refused, used_up, lines, left, killed, engine_killed, strange, forked)
}

if __name__ == "__main__":
    gpu.install(GPU)
    found = asyncio.run(PROGRAMS[sys.argv[1]]())
    sys.stdout.write(f"{json.dumps(found)}\n")
