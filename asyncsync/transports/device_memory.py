"""Sets of weights in a GPU's memory, and such sets of another process, opened by CUDA IPC.

To free memory that is open elsewhere is undefined, and no driver tells who has it open. So with each set goes a
*lease*, the end of a pipe that nobody writes to: whoever opens the set keeps it until he has closed that, and however
he ends, the kernel closes it. The memory goes back to torch once the pipe has no such end any more.
"""

from __future__ import annotations

import os
import select
import struct
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from asyncsync.devices import CPU, gpu_of, visible_gpus
from asyncsync.errors import MemorySaverError, OutOfStepError
from asyncsync.memory_saver import ipc
from asyncsync.memory_saver.driver import is_ipc_capable
from asyncsync.transports.memory_files import WeightSet, WeightSets

CLOSING_TIMEOUT = 1.0
"""Seconds that a rank which is to keep nothing on its GPU waits for engines to close what they have let go of."""

_SHARE = struct.Struct(f"!{ipc.HANDLE_NBYTES}sQ40s")
_NOT_CAPABLE = "CUDA IPC cannot share what torch allocates here (expandable segments, or an allocator of its own?)"


def this_process() -> str:
    """Which process this is, on its node: equal for no two.

    What is before the colon is equal for those that are in the same namespaces of processes and of IPC, as two that
    open each other's memory must be.
    """
    places = []
    for kind in ("pid", "ipc"):
        with suppress(OSError):
            places.append(str(os.stat(f"/proc/self/ns/{kind}").st_ino))
    return f"{'/'.join(places)}:{os.getpid()}"


@dataclass(frozen=True, slots=True)
class Share:
    """Where a set lies, for another process on the same node.

    Attributes:
        handle: The driver's, of the allocation.
        offset: Where the set begins in it, in bytes.
        gpu: The UUID of the GPU: two processes may number the same one differently.
    """

    handle: bytes
    offset: int
    gpu: str

    NBYTES = _SHARE.size

    @classmethod
    def of(cls, memory: Tensor) -> Self:
        """The share of memory on a GPU.

        Raises:
            OSError: The driver gives no handle.
        """
        (gpu,) = gpu_of(memory.device)
        with torch.cuda.device(memory.device):
            return cls(*ipc.handle_of(memory), gpu)

    @classmethod
    def unpack(cls, packed: bytes) -> Self:
        """The inverse of :meth:`pack`."""
        handle, offset, gpu = _SHARE.unpack(packed)
        return cls(handle, offset, gpu.rstrip(b"\0").decode("ascii", "replace"))

    def pack(self) -> bytes:
        """As bytes: always as many."""
        return _SHARE.pack(self.handle, self.offset, self.gpu.encode("ascii"))


# -- at the source ----------------------------------------------------------------------------------------------------


class DeviceSet(WeightSet):
    """A set on a GPU. Make it as guarded work, or it would be the saver's, which cannot be shared.

    Args:
        number: Its own, among all of its source.
        nbytes: How many.
        device: The GPU.

    Raises:
        OSError: There is no memory for it, or none that can be shared.

    Attributes:
        share: Where it lies.
    """

    def __init__(self, number: int, nbytes: int, device: torch.device) -> None:
        memory = _allocate(nbytes, device)
        self.share = Share.of(memory)
        reading, fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._ending = weakref.finalize(self, _give_back, memory, reading, fd)
        self._ending.atexit = False
        super().__init__(number, memory, fd)

    def close_here(self) -> None:
        """See :class:`WeightSet`. What a child does with a GPU's memory is nothing."""
        if (ending := self._ending.detach()) is not None:
            for fd in ending[2][1:]:
                os.close(fd)


def _allocate(nbytes: int, device: torch.device) -> Tensor:
    try:
        memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        if is_ipc_capable(memory):
            return memory
    except (torch.OutOfMemoryError, MemorySaverError) as error:
        raise OSError(str(error)) from error
    raise OSError(_NOT_CAPABLE)


@dataclass(frozen=True, slots=True, eq=False)
class _GivenUp:
    """A set that its source has given up: its memory, and the pipe that tells whether somebody has it open."""

    memory: Tensor
    reading: int


_given_up: list[_GivenUp] = []
_mutex = threading.RLock()


def _give_back(memory: Tensor, reading: int, fd: int) -> None:
    os.close(fd)
    _given_up.append(_GivenUp(memory, reading))
    sweep()


def sweep(timeout: float = 0.0) -> int:
    """Free what was given up and nobody has open any more; how many sets are left that somebody has.

    Args:
        timeout: Seconds to wait for that.
    """
    deadline = time.monotonic() + timeout
    while True:
        with _mutex:
            for each in [each for each in _given_up if _has_ended(each.reading)]:
                with suppress(ValueError):  # the garbage collector may have come here in between
                    _given_up.remove(each)
                    os.close(each.reading)
            left = list(_given_up)
        if not left or time.monotonic() >= deadline:
            return len(left)
        _has_ended(left[0].reading, 0.05)


def _has_ended(reading: int, timeout: float = 0.0) -> bool:
    poll = select.poll()
    poll.register(reading, 0)
    return any(events & select.POLLHUP for _, events in poll.poll(timeout * 1000))


class DeviceSets(WeightSets[DeviceSet]):
    """Sets on a source's GPU. No engine adopts one, so one is enough, unless somebody stays behind on it.

    Attributes:
        device: The GPU that the weights are on.
    """

    def __init__(self) -> None:
        super().__init__(self._free, 1, "memory of the GPU")
        self.device = CPU
        self._refused: tuple[int, str] | None = None  # what could not be had last

    def why_not(self, nbytes: int) -> str | None:
        """Why weights of this size cannot be shared by CUDA IPC; None if they can. Guarded work."""
        if self.device.type != "cuda":
            return "the trainer's weights are on no GPU"
        sweep()
        if (reason := ipc.why_not_here() or self.shortage(nbytes)) is not None:
            return reason
        refused, self._refused = self._refused, None
        if refused is not None and nbytes >= refused[0]:
            return refused[1]
        try:
            _allocate(1, self.device)  # whatever allocates this allocates sets
        except OSError as error:
            return str(error)
        return None

    def give_back(self) -> None:
        """Keep no set that nobody holds: what is freed, a trainer that sleeps does not need. Blocks for a moment."""
        with self._mutex:
            self._sets = [each for each in self._sets if each.holders]
        sweep(CLOSING_TIMEOUT)

    def _free(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.device)  # what torch keeps is not counted: it may be in pieces
        return int(free)

    def _make(self, number: int, nbytes: int) -> DeviceSet:
        return DeviceSet(number, nbytes, self.device)

    def take(self, nbytes: int) -> DeviceSet:
        """See :class:`WeightSets`. What cannot be had now is not promised the next time."""
        sweep()
        try:
            return super().take(nbytes)
        except OutOfStepError as error:
            self._refused = nbytes, str(error)
            raise

    def _fits(self, made: DeviceSet, nbytes: int) -> bool:
        return super()._fits(made, nbytes) and made.memory.device == self.device


# -- at an engine -----------------------------------------------------------------------------------------------------


def why_not_opened(home: torch.device) -> str | None:
    """Why no set is opened for weights that are on a device; None if it can be, as far as is known."""
    if home.type != "cuda":
        return "its weights are on no GPU"
    return _failures[-1] if _failures else ipc.why_not_here()


_failures: list[str] = []
"""Why sets could not be opened here. The driver was asked, and the next update need not ask again."""


class OpenedSet:
    """A set of another process's, opened here as a tensor; closed when the last tensor over it is gone.

    Args:
        share: Where it lies.
        nbytes: How long it is.
        lease: The descriptor that came with it; a copy of it is kept until it is closed.

    Raises:
        OSError: It lies on a GPU that is not seen here, or the driver does not open it.

    Attributes:
        memory: Flat uint8, on the GPU where it lies.
    """

    def __init__(self, share: Share, nbytes: int, lease: int) -> None:
        device = _device_of(share.gpu)
        with torch.cuda.device(device):
            torch.cuda.synchronize(device)  # so that this thread has a context
            kept = os.dup(lease)  # closed on exec, as all that Python makes
            try:
                address = ipc.open_handle(share.handle)
            except BaseException as error:
                os.close(kept)
                _failures.append(f"its driver does not open memory of the trainer's GPU: {error}")
                raise
            exported = _Exported(device, address, share.offset, nbytes, kept)
            self.memory: Tensor = torch.as_tensor(exported)
        if self.memory.device != device or self.memory.data_ptr() != address + share.offset:
            raise OSError(f"torch sees other memory on {self.memory.device} than was opened on {device}")


class _Exported:
    """Memory that torch makes a tensor of; it keeps this as long as there is one."""

    def __init__(self, device: torch.device, address: int, offset: int, nbytes: int, kept: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address + offset, False),
            "strides": None,
            "version": 2,
        }
        self._ending = weakref.finalize(self, _close, device, address, kept)
        self._ending.atexit = False
        _opened.add(self)

    def forget(self) -> None:
        """In a child that was forked: what is open is open at its parent's."""
        if (ending := self._ending.detach()) is not None:
            os.close(ending[2][2])


def _close(device: torch.device, address: int, lease: int) -> None:
    try:
        with torch.cuda.device(device):
            torch.cuda.synchronize(device)  # what reads it
            ipc.close_handle(address)
    finally:
        os.close(lease)


def _device_of(gpu: str) -> torch.device:
    for number, seen in enumerate(visible_gpus()):
        if seen == gpu:
            return torch.device("cuda", number)
    raise OSError(f"the source's weights are on GPU {gpu}, which this process does not see (CUDA_VISIBLE_DEVICES?)")


_opened: weakref.WeakSet[_Exported] = weakref.WeakSet()


_of_the_parent: list[_GivenUp] = []
"""In a child: what its parent frees."""


def _forget_in_child() -> None:
    for each in list(_opened):
        each.forget()
    for given_up in _given_up:
        os.close(given_up.reading)
    _of_the_parent.extend(_given_up)
    _given_up.clear()


os.register_at_fork(after_in_child=_forget_in_child)
