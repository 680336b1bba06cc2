"""What conductor, trainer ranks and engines tell each other: the control plane's values.

Every message that belongs to an update carries its *epoch*: a number that grows with every attempt, over all
conductors an engine has ever had, and whose low bits are random, so that two conductors never use the same. An engine
refuses anything older than the newest it has seen, so a message that was delayed, or that comes from a driver that was
replaced, changes nothing.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch

from asyncsync.buckets import Plan, TensorSpec, join_plans, plan_buckets
from asyncsync.errors import PlanError
from asyncsync.shards import Block, Holding

PROTOCOL_VERSION = 6

PEER = -1
"""In place of a source's number: an engine that gives its weights to others."""

NO_GROUP = ""
"""What an engine is asked to leave that is in no group: it was met, and may keep something open for more."""

NameMap: TypeAlias = Callable[[str], str | None]
"""From the trainer's name of a tensor to the engines'; None leaves the tensor out."""

Backend: TypeAlias = Literal["gloo", "nccl"]

Store: TypeAlias = Literal["objects", "folder"]
"""A place that a source first brings everything to, and that engines fetch it from: Ray's object store, or a folder."""

Transport: TypeAlias = Literal["broadcast", "shared", "cuda_ipc", "pynccl"] | Store
"""What kind of group: a process group; memory that the source shares with engines on its node, the host's or a GPU's;
or a group of vLLM's, that its workers join by themselves, and that meets at a store of the source's. Members of the
first three meet over the control plane. Of a store there is only the source's end: no engine is in a group with it."""

STORES: tuple[Store, ...] = ("objects", "folder")
"""All of them."""

Contacts: TypeAlias = dict[str, bytes]
"""What a group's members must know to reach others of them; made and read by the transport alone."""

Policy: TypeAlias = Literal["drain", "abort", "recompute", "continue"]
"""What happens to requests in flight: they finish first, end now, or go on with the cache recomputed or kept."""


Asleep: TypeAlias = Literal["wake", "refuse"]
"""What an update does with an engine whose memory is released: it wakes what it must, or it refuses to begin."""

WEIGHTS = "weights"
"""The tag of the memory that an engine's weights lie in; other tags are the engine's own affair."""

_RANDOM_BITS = 32


def next_epoch(newest: int) -> int:
    """An epoch newer than any that is known, and nobody else's."""
    return ((newest >> _RANDOM_BITS) + 1) << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)


@dataclass(frozen=True, slots=True)
class ChecksumPart:
    """A part of what a checksum is taken of.

    Attributes:
        name: A tensor of the layout, under its own name.
        block: Which part of it; None: all.
    """

    name: str
    block: Block | None = None


Checksums: TypeAlias = Mapping[str, tuple[ChecksumPart, ...]]
"""What checksums are wanted, by key: each is the sha256 of the parts' bytes, row-major, one behind the other; of that,
the first 16 hex digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """How a trainer rank is to read its weights.

    Attributes:
        bucket_size: Bytes a bucket may have at the most.
        whole_tensors: Whether buckets must hold whole tensors, of one dtype each.
        name_map: Applied to every name.
        dtype: Floating-point tensors are sent in this dtype.
        snapshot: Of which snapshot; None: as they are now.
        delta: Whether to keep what was sent, in host memory, so that the next update can be compared with it.
    """

    bucket_size: int
    whole_tensors: bool = False
    name_map: NameMap | None = None
    dtype: torch.dtype | None = None
    snapshot: str | None = None
    delta: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What an update will send, for an engine to compare with what it holds.

    Attributes:
        parts: The tensors of each source, in order; mostly there is one source.
        bucket_size: Bytes a bucket may have at the most.
        digest: Digest of the plan; an engine that plans the same specs must come to the same (R10).
        whole_tensors: Whether buckets hold whole tensors, of one dtype each.
        partial: Whether names that the engine has and the trainer does not send are fine.
    """

    parts: tuple[tuple[TensorSpec, ...], ...]
    bucket_size: int
    digest: str
    whole_tensors: bool = False
    partial: bool = False

    def plan(self) -> Plan:
        """Plan it.

        Raises:
            PlanError: Two tensors have the same name.
        """
        whole = self.whole_tensors
        return join_plans([plan_buckets(specs, self.bucket_size, whole_tensors=whole) for specs in self.parts])

    def agreed_plan(self) -> Plan:
        """Plan it, and compare with what the trainer has planned (R10).

        Raises:
            PlanError: Two tensors have the same name, or the two ends cut buckets differently.
        """
        plan = self.plan()
        if plan.digest != self.digest:
            raise PlanError(
                "trainer and engine plan the same tensors differently: install the same version of asyncsync at both"
            )
        return plan


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStatus:
    """A trainer rank, about to send.

    Attributes:
        instance: Differs for every process (or object) that ever was this rank.
        device: Device type of its weights.
        gpus: The UUIDs of the GPUs that they are on.
        connections: The groups it is in through which bytes go to engines.
        plan_digest: Digest of its plan.
        specs: What it will send; None if the caller knows this plan already.
        epoch: The newest it has seen.
        holding: What it holds of each tensor; None: all of every one.
        shard_connections: The groups it is in through which shards go to the source rank.
        gathers: Whether its tensors are put together by a gathering of the trainer's own, in which all ranks take part.
        shared: What it was told last about all ranks' holdings: of which plan, and as which of how many ranks.
        control_group: Whether its control calls are answered while its other methods run.
        node: Where it is, as :func:`~asyncsync.transports.memory_files.this_node` tells; empty if it shares no memory.
        shortage: Why there is not enough memory to share what it will send; None if there is.
        base_epochs: The updates whose bytes it can compare with, in this layout; the newest first.
        no_ipc: Why what it will send cannot be shared by CUDA IPC; None if it can.
        process: Which one it is, as :func:`~asyncsync.transports.device_memory.this_process` tells.
    """

    instance: str
    device: str
    connections: tuple[str, ...]
    plan_digest: str
    specs: tuple[TensorSpec, ...] | None
    holding: Holding | None = None
    shard_connections: tuple[str, ...] = ()
    gathers: bool = False
    shared: tuple[str, int, int] | None = None
    epoch: int = 0
    control_group: bool = True
    gpus: tuple[str, ...] = ()
    node: str = ""
    shortage: str | None = None
    base_epochs: tuple[int, ...] = ()
    no_ipc: str | None = "the trainer's weights are on no GPU"
    process: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """A rollout engine, as it is now.

    Attributes:
        instance: Differs for every process (or object) that ever was this engine: a restart is a new one. Those of an
            engine of several ranks are joined by ``+``.
        device: Device type of its weights.
        gpus: The UUIDs of the GPUs that they are on, where they are known.
        staged: Whether it holds new weights beside the old until the commit.
        whole_tensors: Whether it can take buckets only of whole tensors, of one dtype each.
        transport: What kind of group it joins; one that says ``"broadcast"`` and tells its node takes shared memory as
            well.
        node: Where it is, all of its ranks, as :func:`~asyncsync.transports.memory_files.this_node` tells; empty if it
            takes no shared memory.
        stores: What it can fetch weights from that nobody sends it.
        policies: What it can do with requests in flight.
        cannot: Why it cannot do others, where that can be changed.
        world_size: How many ranks of it receive.
        epoch: The newest it has seen.
        weight_version: The version it serves; None before the first, and while tainted.
        newest_version: The newest it has ever served, tainted or not.
        tainted: Why it must not serve, or None.
        received: How many buckets of the update that ended last had arrived, and of how many, where it knows; -1: it
            had not begun to receive.
        connections: The groups it is in.
        plan_digest: The layout it has accepted, if any.
        partial: Whether it accepted that as a partial one.
        shards: What it holds only a part of, by name: the shape of the whole, and which block. An engine of several
            ranks tells what is lacking: tensors of which its ranks together do not hold each element once.
        holds: What it holds whole, of all that any synchronizer has brought it: the digest of the weights, by the
            layout they came in.
        gives: Whether it can give its weights to other engines (:class:`asyncsync.GivingEngine`).
        paused: Whether an update has paused it, and it was not resumed yet, where that is known.
        checks: Whether it can compare what it has loaded with the trainer's (:class:`asyncsync.CheckedEngine`).
        control_group: Whether its control calls are answered while its other methods run.
        released: Which of its memory it has released, by tag, as far as is known: it is asleep. ``"weights"``, and
            whatever else it has (``"kv_cache"``).
        base_epoch: The update whose bytes it holds, so that it can take what differs from them; None: it holds none so.
        no_deltas: Why it always takes whole buckets; None: it takes deltas.
        no_ipc: Why it takes nothing by CUDA IPC; None: it does.
        sees: The UUIDs of the GPUs that each of its ranks sees, where it takes CUDA IPC.
        processes: Those of its ranks, as :func:`~asyncsync.transports.device_memory.this_process` tells.
    """

    instance: str
    device: str
    staged: bool
    whole_tensors: bool = False
    transport: Transport = "broadcast"
    node: str = ""
    stores: tuple[Store, ...] = ()
    policies: tuple[Policy, ...] = ("drain",)
    cannot: Mapping[Policy, str] = field(default_factory=dict)
    world_size: int = 1
    epoch: int = 0
    weight_version: int | None = None
    newest_version: int = 0
    tainted: str | None = None
    received: tuple[int, int] | None = None
    connections: tuple[str, ...] = ()
    plan_digest: str | None = None
    partial: bool = False
    shards: Mapping[str, tuple[tuple[int, ...], Block]] = field(default_factory=dict)
    holds: Mapping[str, str] = field(default_factory=dict)
    gives: bool = False
    checks: bool = False
    paused: bool = False
    control_group: bool = True
    released: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    base_epoch: int | None = None
    no_deltas: str | None = "it takes whole tensors only"
    no_ipc: str | None = "it opens no memory of another process's GPU"
    sees: tuple[str, ...] = ()
    processes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """How to join a data plane group.

    Attributes:
        connection: Its name, random and never used again: who does not know it cannot join.
        backend: Chosen once, for all ends (R10).
        transport: What kind of group it is.
        rank: This member's rank (its first, if it has several); the source is rank 0.
        source: Which of several sources that is. An engine is in one group of each at a time. :data:`PEER`: it is an
            engine that gives its weights to others.
        world_size: Members in all.
        join_timeout: Seconds to wait for the other members.
        operation_timeout: Seconds after which an operation on the group gives up by itself.
        shards_of: None: the group leads from the source rank to engines; else it leads from this trainer rank to the
            source rank, and carries shards.
        folder: Of a store that is a folder: which.
        protocol: The version of this protocol.
    """

    connection: str
    backend: Backend
    rank: int
    world_size: int
    join_timeout: float
    operation_timeout: float
    source: int = 0
    transport: Transport = "broadcast"
    shards_of: int | None = None
    folder: str = ""
    protocol: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Where a source has put its part of an update.

    Attributes:
        objects: In Ray's object store: a reference to each message, in order, or it itself if it is small. They keep
            the messages there, so whoever needs them no more empties the list.
        folder: In a folder of safetensors files: its path.
        version: What these files say that they are part of,
        epoch: and of which attempt.
    """

    objects: list[Any] = field(default_factory=list)
    folder: str = ""
    version: int = 0
    epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateOrder:
    """One weight update, as trainer ranks and engines see it.

    Attributes:
        epoch: This attempt's number.
        version: The version it is to become.
        connections: The groups the bytes go through. To a source: all that it sends through, each to some engines. To
            an engine: the one of each source, in order; or one, that all of them come through.
        plan_digest: The layout they come in; to a source, that of its own part.
        policy: What is done with requests in flight.
        base_epoch: The attempt that made the published version; "changed" is told against it.
        timeout: Seconds after which to give the transfer up, should the conductor be gone.
        lease: Seconds after which the whole update is over: what was not taken into service by then never will be.
        shards: Common part of the names of the groups that shards come through, if any do.
        stored: To an engine that fetches: where each source has put its part, in order.
        checksums: To a source: what engines want checksums of.
        snapshot: To a source: the name of a snapshot that it is to take, or to send; None: it sends the weights as they
            are now.
        wake: To an engine: whether it is to wake what it has released: its weights before they are written, all else
            once they are whole. If not, one that sleeps refuses the order.
        against: To an engine: the update that deltas are taken against; None: buckets come whole. To a source: the one
            to compare with; None: none.
        deltas: To a source: those of the groups that what differs goes through, and not whole buckets; in a folder it
            lies beside them.
    """

    epoch: int
    version: int
    connections: tuple[str, ...]
    plan_digest: str
    policy: Policy
    base_epoch: int | None
    timeout: float
    lease: float = math.inf
    shards: str | None = None
    stored: tuple[Stored, ...] = ()
    checksums: Checksums = field(default_factory=dict)
    snapshot: str | None = None
    wake: bool = False
    against: int | None = None
    deltas: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SendReceipt:
    """What a source rank sent.

    Attributes:
        digest: Digest of the whole set of weights.
        tensors: Distinct tensors sent.
        tensors_changed: How many differ from the published version.
        buckets: Buckets sent.
        nbytes: Bytes of the tensors.
        nbytes_changed: Bytes of those that differ.
        checksums: Those that the order named, by key.
        stored: What it has put where engines fetch it, by the store's connection.
        sent: Bytes that engines which get what differs have got through each group; empty if there are none.
        elements: How many elements the tensors have; 0 if nothing was kept to compare the next update with.
        elements_changed: How many of them differ from the update that they were compared with; None if with none.
    """

    digest: str
    tensors: int
    tensors_changed: int
    buckets: int
    nbytes: int
    nbytes_changed: int
    checksums: Mapping[str, str] = field(default_factory=dict)
    stored: Mapping[str, Stored] = field(default_factory=dict)
    sent: Mapping[str, int] = field(default_factory=dict)
    elements: int = 0
    elements_changed: int | None = None
