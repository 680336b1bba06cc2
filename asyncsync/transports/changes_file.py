"""A file beside a version in a folder: what differs in it from an update that engines hold.

It begins with a head that says of which update it is, and against which. Then each bucket comes in an envelope, in the
plan's order; of one that comes whole there is the envelope alone, since its bytes lie in the version's own files. Who
reads it looks through all envelopes before the first is taken: they must lead to the file's end, to the byte.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import TypeAlias

import torch

from asyncsync.buckets import Bucket, Plan
from asyncsync.errors import TransferError
from asyncsync.transports.envelopes import ENVELOPE, Content, read_envelope
from asyncsync.weight_files import Run

Parcel: TypeAlias = bytes | Run | Bucket
"""What is taken at a time: an envelope, a message where it lies behind the head, or a bucket of the version's files."""


def changes_name(source: int) -> str:
    """The name of a source's file."""
    return f".changes-{source}"


def changes_head(plan: Plan, against: int, metadata: Mapping[str, str]) -> bytes:
    """What a source's file begins with.

    Args:
        plan: The source's plan.
        against: The update that it is compared with.
        metadata: What the version's files tell of it.
    """
    return json.dumps({**metadata, "plan": plan.digest, "against": f"{against:x}"}).encode() + b"\n"


def read_parcels(fd: int, head: bytes, plan: Plan, number: int) -> Iterator[Parcel]:
    """What is to be taken of a file, in order. It is checked meanwhile: its lengths may be trusted once this has ended.

    Args:
        fd: The file's descriptor.
        head: What it must begin with.
        plan: The source's plan.
        number: The file's, in the runs that are given.

    Raises:
        TransferError: It is cut off, or holds something else.
        OSError: It cannot be read.
    """
    if os.pread(fd, len(head), 0) != head:
        raise TransferError("it is of another update, or against another")
    at = 0
    for bucket in plan.buckets:
        envelope = os.pread(fd, ENVELOPE, len(head) + at)
        if len(envelope) < ENVELOPE:
            raise TransferError(f"it ends before bucket {bucket.index} of {len(plan.buckets)}")
        content, nbytes = read_envelope(torch.frombuffer(bytearray(envelope), dtype=torch.uint8), bucket.nbytes)
        yield envelope
        at += ENVELOPE
        if content is Content.WHOLE:
            yield bucket
        elif content is Content.DELTA:
            yield Run(number, at, ((0, nbytes),))
            at += nbytes
    if (size := os.fstat(fd).st_size) != len(head) + at:
        raise TransferError(f"it has {size} bytes, and speaks of {len(head) + at}")
