"""How buckets travel of which only what differs is sent: over any link, each behind an envelope that says what follows.

An envelope is a message of a fixed size: nothing (the bucket is as it was), a delta, or the whole bucket; and of how
many bytes. In memory that a source shares, a bucket's message lies where the bucket would, and the envelopes lie behind
all buckets, so there each bucket is one step as ever. In a folder, envelopes and deltas lie beside the whole buckets.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncsync.errors import TransferError
from asyncsync.transports.base import LentArena, Link

ENVELOPE = 16
"""Bytes of an envelope."""

_FORM = struct.Struct("<QQ")


class Content(IntEnum):
    """What follows an envelope."""

    NOTHING = 0
    DELTA = 1
    WHOLE = 2


def write_envelope(envelope: Tensor, content: Content, nbytes: int) -> Tensor:
    """Write one.

    Args:
        envelope: Flat uint8, :data:`ENVELOPE` long, in host memory.
        content: What follows.
        nbytes: How long that is.
    """
    envelope.numpy()[:] = np.frombuffer(_FORM.pack(content, nbytes), dtype=np.uint8)
    return envelope


def read_envelope(envelope: Tensor, whole: int) -> tuple[Content, int]:
    """What follows, and how long that is.

    Args:
        envelope: Flat uint8, in host memory.
        whole: How long the whole bucket is.

    Raises:
        TransferError: It is no envelope of such a bucket.
    """
    content, nbytes = _FORM.unpack(envelope.numpy().tobytes())
    fits = {Content.NOTHING: nbytes == 0, Content.DELTA: 0 < nbytes < whole, Content.WHOLE: nbytes == whole}
    if not fits.get(content, False):
        raise TransferError(f"an envelope speaks of {nbytes} bytes of kind {content} for a bucket of {whole}")
    return Content(content), nbytes


class Outbox:
    """Sends an update's buckets over one link, each in an envelope.

    Args:
        start_send: Starts to send something over the link; gives what is to be waited for.
        envelopes: Where they are to lie, in memory that is shared; None if they are sent.
        whole: Whether a bucket that comes whole is sent behind its envelope; else it comes another way.
    """

    def __init__(
        self, start_send: Callable[[Tensor], Any], envelopes: Tensor | None = None, *, whole: bool = True
    ) -> None:
        self._start_send = start_send
        self._envelopes = envelopes
        self._whole = whole

    def start_send(self, index: int, content: Content, body: Tensor) -> list[Any]:
        """Start to send a bucket; gives what is to be waited for.

        Args:
            index: Its place in the plan.
            content: What is sent of it.
            body: That: flat uint8, which must stay as it is; in shared memory, where the bucket lies.
        """
        if self._envelopes is not None:
            write_envelope(self._envelopes[index * ENVELOPE : (index + 1) * ENVELOPE], content, body.numel())
            return [self._start_send(body)]
        envelope = write_envelope(torch.empty(ENVELOPE, dtype=torch.uint8), content, body.numel())
        sent = [self._start_send(envelope)]
        if body.numel() and (self._whole or content is not Content.WHOLE):
            sent.append(self._start_send(body))
        return sent


class Inbox:
    """Receives an update's buckets over one link, each in an envelope.

    Args:
        link: The link.
        count: How many buckets come.
        lent: Where they come to lie, if they do so by themselves.
        arena_nbytes: How long the part of that is in which buckets lie; envelopes are behind it.
        stop: Ends a wait, from another thread.
    """

    def __init__(
        self, link: Link, count: int, lent: LentArena | None, arena_nbytes: int, stop: threading.Event
    ) -> None:
        self._link = link
        self._left = count
        self._lent = lent
        self._next = arena_nbytes  # where the next envelope lies
        self._stop = stop
        self._envelope = torch.empty(ENVELOPE, dtype=torch.uint8)
        self._coming: Any = None
        self._expect()

    def _expect(self) -> None:
        """Start to receive the next envelope, while the last bucket is being taken."""
        if self._lent is None and self._left:
            self._coming = self._link.start_receive(self._envelope)

    def receive(
        self, nbytes: int, start: int, buffer_for: Callable[[Content, int], Tensor]
    ) -> tuple[Content, Tensor | None]:
        """Receive the next bucket. Blocks.

        Args:
            nbytes: How long it is whole.
            start: Where it lies in the arena.
            buffer_for: Gives a buffer for what comes of it; not called if it lies in memory that is lent.

        Returns:
            What came, and it itself.

        Raises:
            TransferError: It did not, or it is no bucket in an envelope.
        """
        self._left -= 1
        if self._lent is not None:
            memory = self._lent.memory
            self._link.wait(self._link.start_receive(memory[start : start + nbytes]), self._stop)
            content, length = read_envelope(memory[self._next : self._next + ENVELOPE], nbytes)
            self._next += ENVELOPE
            return content, memory[start : start + length] if length else None
        self._link.wait(self._coming, self._stop)
        content, length = read_envelope(self._envelope, nbytes)
        body = buffer_for(content, length) if length else None
        handle = None if body is None else self._link.start_receive(body)
        self._expect()
        if body is not None:
            self._link.wait(handle, self._stop)
        return content, body
