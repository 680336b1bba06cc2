"""CUDA IPC between a source and engines on its own node: weights are repacked on the GPU once, and copied from there.

The lines are those of shared memory (:mod:`~asyncsync.transports.shared`). What they carry of a set is a handle of the
driver's, where the set begins in that allocation, and the UUID of its GPU
(:mod:`~asyncsync.transports.device_memory`). An engine opens a set for one update, copies out of it on the GPU, and
closes it before it lets go: so memory that a trainer frees, or takes with it when it dies, is none that anybody serves
from. The set is memory of torch's own, so weights that lie in the memory saver's need nothing more than this copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from asyncsync.messages import Rendezvous
from asyncsync.transports.device_memory import DeviceSet, DeviceSets, OpenedSet, Share
from asyncsync.transports.memory_files import WeightSet
from asyncsync.transports.shared import LET_GO, SET, SharedEngineLink, SharedJoining, SharedSourceLink


class IpcJoining(SharedJoining):
    """Lines that are being joined. Satisfies :class:`~asyncsync.transports.base.GroupJoining`.

    Args:
        rendezvous: Which group, and as whom.
        sets: At the source: where the weights come to lie.

    Raises:
        ConnectError: The two ends speak different protocols.
    """

    def __init__(self, rendezvous: Rendezvous, *, sets: DeviceSets | None) -> None:
        super().__init__(rendezvous, sets=sets)
        self._source_link, self._engine_link = IpcSourceLink, IpcEngineLink


class IpcSourceLink(SharedSourceLink):
    """The source's end of the lines to some engine ranks. Satisfies :class:`~asyncsync.transports.base.Link`."""

    device = "cuda"
    _writing: torch.device | None = None

    def _give(self, peer: Any, epoch: int, lent: WeightSet) -> bool:
        assert isinstance(lent, DeviceSet)
        self._writing = lent.memory.device
        share = lent.share.pack()
        return bool(peer.say(SET, epoch, lent.number, lent.memory.numel(), fds=[lent.fd], more=share))

    def start_send(self, flat: Tensor) -> int:
        """Tell engines that the next bucket lies in the set, once it does. Blocks for that."""
        torch.cuda.current_stream(self._writing).synchronize()
        return super().start_send(flat)


class IpcEngineLink(SharedEngineLink):
    """An engine rank's end of its line. Satisfies :class:`~asyncsync.transports.base.Link`."""

    device = "cuda"
    _more = Share.NBYTES

    def _note(self, number: int, nbytes: int, fds: Sequence[int]) -> None:
        """A set of an update that is over: it need not be opened."""

    def _set(self, number: int, nbytes: int, fds: Sequence[int], more: bytes) -> Any:
        if len(fds) != 1:
            raise self._lost("the source shares memory of a GPU without a lease")
        try:
            opened = OpenedSet(Share.unpack(more), nbytes, fds[0])
        except (OSError, RuntimeError) as error:
            raise self._lost(f"the source's memory cannot be opened: {error}") from error
        return LentOnDevice(weakref.ref(self), number, opened)


class LentOnDevice:
    """A set that an engine has open. Satisfies :class:`~asyncsync.transports.base.LentArena`."""

    stays = False

    def __init__(self, link: weakref.ref[IpcEngineLink], number: int, opened: OpenedSet) -> None:
        self._link = link
        self._number = number
        self.memory = opened.memory
        self.epoch: int | None = None  # of the update that it is held for

    def lend(self, epoch: int) -> None:
        """Note for which update it is lent."""
        self.epoch = epoch

    def let_go(self) -> None:
        """Close it, once what was started on the GPU has read it, and say so."""
        epoch, self.epoch = self.epoch, None
        if epoch is None:
            return
        torch.cuda.synchronize(self.memory.device)
        self.memory = torch.empty(0, dtype=torch.uint8)  # mostly the last view of it, which closes it
        if (link := self._link()) is not None:
            link.say(LET_GO, epoch, self._number)

    def tidy(self) -> None:
        """Nothing: it is closed."""
