"""Anonymous files in memory, mapped by those who share them, and the sets of weights that a source keeps in such.

A file that was never linked has no name in ``/dev/shm``, not for a moment: whoever is killed, the kernel frees it with
the last process that maps it. It is handed on as a descriptor, and sealed: it cannot be truncated under those who read
it, and nobody but the source can come to write to it.
"""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from asyncsync.buckets import Plan
from asyncsync.errors import OutOfStepError
from asyncsync.report import format_bytes
from asyncsync.transports.envelopes import ENVELOPE
from asyncsync.transports.host_memory import available_memory

SETS = 2
"""Sets that change places from update to update."""

_PROT_READ_WRITE, _MAP_SHARED, _MAP_PRIVATE = 3, 1, 2
_MADV_DONTNEED, _MADV_DONTFORK = 4, 10
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW, _F_SEAL_FUTURE_WRITE = 1, 2, 4, 16
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PRESENT_OR_SWAPPED, _OF_A_FILE = np.uint64(62), np.uint64(61)  # bits of an entry of /proc/self/pagemap
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def shared_nbytes(plan: Plan) -> int:
    """How long a file must be for the weights of a plan, and an envelope for each bucket.

    None is empty, for that could not be mapped.
    """
    return max(1, plan.arena_nbytes + ENVELOPE * len(plan.buckets))


def this_node() -> str:
    """Where this process is: equal for two processes exactly if files in memory can be passed between them.

    That is: the same boot of the same machine, one network namespace (an abstract socket is of one), and the same user,
    as the same namespace counts users. Empty if they cannot be passed here at all.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        places = [os.stat(f"/proc/self/ns/{kind}") for kind in ("net", "user")]
        os.close(os.memfd_create("asyncsync", os.MFD_CLOEXEC))
    except (OSError, AttributeError):  # no Linux, or not allowed
        return ""
    return "/".join([boot, *(f"{place.st_dev}:{place.st_ino}" for place in places), str(os.geteuid())])


class Mapping:
    """A file in memory, mapped here as a tensor; unmapped when the last tensor over it is gone.

    (Not by the ``mmap`` module: that keeps a descriptor as long as the mapping, and holds the GIL as it unmaps.)

    Args:
        fd: The file's; it may be closed after this.
        nbytes: How long it is.
        private: Whether what is written here is to be seen here alone.

    Raises:
        OSError: It cannot be mapped.

    Attributes:
        memory: Flat uint8.
    """

    def __init__(self, fd: int, nbytes: int, *, private: bool) -> None:
        flags = _MAP_PRIVATE if private else _MAP_SHARED
        self._address: int = _libc.mmap(None, nbytes, _PROT_READ_WRITE, flags, fd, 0)
        if self._address == _FAILED:
            raise OSError(ctypes.get_errno(), f"{format_bytes(nbytes)} of shared memory cannot be mapped")
        self._nbytes = nbytes
        if not private:
            _libc.madvise(self._address, nbytes, _MADV_DONTFORK)  # a child has no use for it, and would keep it
        exported = (ctypes.c_char * nbytes).from_address(self._address)
        weakref.finalize(exported, _libc.munmap, self._address, nbytes).atexit = False
        self.memory: Tensor = torch.frombuffer(exported, dtype=torch.uint8)

    def forget_writes(self) -> None:
        """Of a private one: have it show the file's bytes also where it was written to. Nobody may be reading it."""
        if self._was_written_to():
            _libc.madvise(self._address, self._nbytes, _MADV_DONTNEED)

    def _was_written_to(self) -> bool:
        # To drop all pages and touch them anew takes as long as hashing them; to look, a tenth.
        try:
            with open("/proc/self/pagemap", "rb", buffering=0) as file:
                file.seek(self._address // _PAGE * 8)
                entries = np.frombuffer(file.read(-(-self._nbytes // _PAGE) * 8), dtype=np.uint64)
        except OSError:
            return True
        there = entries >> _PRESENT_OR_SWAPPED != 0
        return bool((there & (entries >> _OF_A_FILE & np.uint64(1) == 0)).any())


def new_memory_file(nbytes: int) -> int:
    """A new file in memory, all of it allocated; its descriptor.

    Raises:
        OSError: There is no memory for it.
    """
    fd = os.memfd_create("asyncsync", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, nbytes)
        os.posix_fallocate(fd, 0, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def seal(fd: int) -> None:
    """Have a file keep its size for good, and be mapped for writing by nobody else than has it mapped already."""
    with suppress(OSError):  # of kernels before 5.1, which do not know the last
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL)


def is_sealed(fd: int, nbytes: int) -> bool:
    """Whether a file is so long, and will stay so: else reading it might end this process."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:  # it is no such file
        return False
    return bool(seals & _F_SEAL_SHRINK) and os.fstat(fd).st_size == nbytes


class WeightSet(ABC):
    """Memory for a whole set of weights, at the source, that others read.

    Args:
        number: Its own, among all of its source.
        memory: Flat uint8.
        fd: The descriptor that is passed on with it.

    Attributes:
        number: Its own, among all of its source.
        memory: Flat uint8.
        fd: The descriptor that is passed on with it.
        holders: Who may read it: each end that was given it, and has not let go of it, with the update it was for.
        retired: Whether somebody may read it who will not say when he does no more: it is never written to again.
    """

    def __init__(self, number: int, memory: Tensor, fd: int) -> None:
        self.number = number
        self.memory = memory
        self.fd = fd
        self.holders: set[tuple[object, int]] = set()
        self.retired = False
        _made.add(self)

    @abstractmethod
    def close_here(self) -> None:
        """In a child that was forked: keep no descriptor, which would keep the memory."""

    def __repr__(self) -> str:
        state = "retired" if self.retired else f"held by {len(self.holders)}" if self.holders else "free"
        return f"<{type(self).__name__} {self.number}: {format_bytes(self.memory.numel())}, {state}>"


class SharedSet(WeightSet):
    """A set in a file in memory, mapped at the source; ``fd`` is the file's.

    Args:
        number: Its own, among all of its source.
        nbytes: How many.

    Raises:
        OSError: There is no memory for it.
    """

    def __init__(self, number: int, nbytes: int) -> None:
        fd = new_memory_file(nbytes)
        self._closing = weakref.finalize(self, os.close, fd)
        super().__init__(number, Mapping(fd, nbytes, private=False).memory, fd)
        seal(fd)

    def close_here(self) -> None:
        """See :class:`WeightSet`."""
        self._closing()


_made: weakref.WeakSet[WeightSet] = weakref.WeakSet()


def _close_in_child() -> None:
    for each in list(_made):
        each.close_here()


os.register_at_fork(after_in_child=_close_in_child)


S = TypeVar("S", bound=WeightSet)


class WeightSets(ABC, Generic[S]):
    """The sets of one source: a few that change places, and more only while somebody stays behind on an old one.

    Whoever was given a set holds it until he has let go. One that ends without (by death, failure or leaving) retires
    it: the source never writes to it again.

    Args:
        available: Gives how many bytes can still be allocated.
        usual: How many there are as a rule.
        kind: What errors call the memory.
    """

    def __init__(self, available: Callable[[], int | None], usual: int, kind: str) -> None:
        self._available = available
        self._usual = usual
        self._kind = kind
        self._numbers = itertools.count(1)
        self._sets: list[S] = []
        self._mutex = threading.RLock()  # ends are closed from other threads; and the garbage collector may close one

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._sets}>"

    @abstractmethod
    def _make(self, number: int, nbytes: int) -> S:
        """A new one.

        Raises:
            OSError: There is no memory for it.
        """

    def _fits(self, made: S, nbytes: int) -> bool:
        """Whether one that is there can be given for weights of a size."""
        return made.memory.numel() == nbytes

    @property
    def numbers(self) -> frozenset[int]:
        """The sets that may be given again."""
        with self._mutex:
            return frozenset(each.number for each in self._sets if not each.retired)

    def shortage(self, nbytes: int) -> str | None:
        """Why there cannot be as many sets of this size as there are as a rule; None if there can."""
        with self._mutex:
            missing = self._usual - len([each for each in self._sets if not each.retired and self._fits(each, nbytes)])
        return self._shortage(missing, nbytes)

    def _shortage(self, count: int, nbytes: int) -> str | None:
        available = self._available() if count > 0 else None
        if available is None or count * nbytes <= available:
            return None
        sets = "a set" if count == 1 else f"{count} sets"
        return (
            f"{self._kind} for {sets} of the weights needs {format_bytes(count * nbytes)}, "
            f"and there is {format_bytes(available)} of memory left"
        )

    def take(self, nbytes: int) -> S:
        """A set that nobody reads, to be written anew.

        Raises:
            OutOfStepError: There is no memory for one (any more).
        """
        with self._mutex:
            self._sets = [each for each in self._sets if not each.retired and self._fits(each, nbytes)]
            free = [each for each in self._sets if not each.holders]
            surplus = max(0, len(self._sets) - self._usual)
            for each in free[1:][:surplus]:
                self._sets.remove(each)
            if free:
                return free[0]
            if (shortage := self._shortage(1, nbytes)) is not None:
                raise OutOfStepError(shortage)
            try:
                new = self._make(next(self._numbers), nbytes)
            except OSError as error:
                raise OutOfStepError(f"{self._kind} of {format_bytes(nbytes)} cannot be had: {error}") from error
            self._sets.append(new)
            return new

    def lend(self, lent: WeightSet, holder: object, epoch: int) -> None:
        """Note that an end is given a set."""
        with self._mutex:
            lent.holders.add((holder, epoch))

    def let_go(self, number: int, holder: object, epoch: int) -> None:
        """Note that an end does not read a set any more."""
        with self._mutex:
            for each in self._sets:
                if each.number == number:
                    each.holders.discard((holder, epoch))

    def let_go_all(self, holder: object) -> None:
        """Note that an end does not read any set any more."""
        with self._mutex:
            for each in self._sets:
                each.holders = {held for held in each.holders if held[0] != holder}

    def ended(self, holder: object) -> None:
        """Note that an end will say nothing more."""
        with self._mutex:
            for each in self._sets:
                each.retired |= any(one == holder for one, _ in each.holders)
            self._sets = [each for each in self._sets if not each.retired]

    def clear(self) -> None:
        """Keep nothing: no end is connected any more."""
        with self._mutex:
            self._sets = []


class SharedSets(WeightSets[SharedSet]):
    """Sets in files in memory: two that change places, as engines adopt them. The kernel frees what was retired.

    Args:
        available: Gives how many bytes can still be allocated.
    """

    def __init__(self, available: Callable[[], int | None] = available_memory) -> None:
        super().__init__(available, SETS, "shared memory")

    def _make(self, number: int, nbytes: int) -> SharedSet:
        return SharedSet(number, nbytes)
