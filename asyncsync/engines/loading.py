"""Where an engine puts the buckets that arrive: beside the weights it serves (staged), or over them (in place).

A staged engine receives into an *arena*, one flat buffer for the whole set of weights, and at the commit points its
parameters into it. The next update goes to a second arena, and the two change places from then on: fresh memory is
slow at first touch, so nothing is allocated after the second update. An arena that an abandoned transfer may still
write to, for all that is known, is thrown away, never used again.

An engine that holds shards receives whole buckets into bounce buffers, and takes out what lies in its blocks. Its
arenas are of the size of what it holds.

Where the source shares its memory, a staged engine on the CPU *adopts* that as its next arena, and copies nothing; when
the one after is in service, it lets go of it. An engine of another kind takes buckets from where they lie, as it takes
them from a bounce buffer; so does every engine where they lie on a GPU.

What differs from the update in service may come in place of a bucket. In place, it is written over the weights. A
staged engine writes it to its other arena, which holds the update before that: so it keeps what the last update
changed, and brings that arena up to date with it first. One that holds anything else is copied to from that in service.

Parameters that are views of a larger memory (a fused weight, say) are copied to instead of pointed elsewhere: their
siblings would not follow.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from asyncsync.buckets import Bucket, Piece, TensorSpec, plan_buckets
from asyncsync.deltas import Changed, apply, grain_of, read
from asyncsync.devices import home_of, settle
from asyncsync.digests import StreamingDigests
from asyncsync.engines.binding import Binding
from asyncsync.packing import arena_views, flat_bytes, hash_bucket, pack, raw, unpack
from asyncsync.shards import Block, Shard, unpack_shards
from asyncsync.transports.base import LentArena


class Loader(Protocol):
    """Takes the buckets of one layout, update after update. All methods run on the engine's worker thread."""

    device: str
    """Device type that buckets arrive on."""

    base_epoch: int | None
    """The update whose bytes what differs can be applied to; None: those that are here are of none, or not all here."""

    @property
    def touched(self) -> bool:
        """Whether weights in service were overwritten by an update that is not committed."""
        ...

    @property
    def in_flight(self) -> int:
        """How many buckets may be on their way at the same time."""
        ...

    def begin(self, *, delta: bool = False) -> None:
        """Get ready for an update; if it is a delta, one of what differs from :attr:`base_epoch`."""
        ...

    def adopt(self, lent: LentArena) -> bool:
        """Whether it takes memory of the source's for its own, once all buckets lie there; then it lets go of it."""
        ...

    def drop(self) -> None:
        """Let go of what was adopted, and is not to be taken into service after all."""
        ...

    def target(self, bucket: Bucket) -> Tensor:
        """The flat uint8 buffer that this bucket is to be received into; the last ``in_flight`` given may be in use."""
        ...

    def take(self, bucket: Bucket, buffer: Tensor) -> None:
        """Take a bucket that has arrived; buckets come in order."""
        ...

    def take_changes(self, bucket: Bucket, message: Tensor | None) -> None:
        """Take what differs in a bucket, in place of the bucket; None: nothing does.

        Raises:
            TransferError: The message is none of such a bucket. Nothing was written.
        """
        ...

    def digest(self) -> str:
        """Digest of all that was taken, and of what has stayed as it was."""
        ...

    def commit(self) -> None:
        """Make what was taken the weights in service; whose they are is for the caller to note."""
        ...

    def discard(self) -> None:
        """Give up every buffer: a transfer that was left behind may still write to them."""
        ...


class Installed:
    """Which memory a module's parameters were pointed to; shared by all of its loaders, one after the other.

    Attributes:
        views: What each was pointed to, by the parameter's id, and where that memory begins.
        lent: The memory of sources among it.
        left: What of that was let go of, and is to be tidied up.
    """

    def __init__(self) -> None:
        self.views: dict[int, tuple[Tensor, int]] = {}
        self.lent: list[LentArena] = []
        self.left: list[LentArena] = []

    def keep(self, held: Collection[int]) -> None:
        """Forget all parameters but these."""
        self.views = {key: view for key, view in self.views.items() if key in held}

    def let_go(self, live: Tensor) -> None:
        """Let go of memory that no parameter points to any more.

        Args:
            live: Memory in which the weights in service lie as well, though parameters may be copies of them: what
                differs from them may come next.
        """
        used = {where for _, where in self.views.values()} if self.lent else set()
        used.add(live.untyped_storage().data_ptr())
        kept = []
        for lent in self.lent:
            if lent.memory.untyped_storage().data_ptr() in used:
                kept.append(lent)
            else:
                lent.let_go()
                self.left.append(lent)
        self.lent = kept

    def tidy(self) -> None:
        """Tidy up what was let go of: it takes a while, and nobody has to wait for it."""
        while self.left:
            self.left.pop().tidy()


class StagedLoader:
    """Holds the new weights beside the old.

    Args:
        binding: What goes where.
        installed: What parameters were pointed to; shared by all loaders of a module.
        device: Device type that buckets arrive on.
    """

    touched = False

    @property
    def in_flight(self) -> int:
        return 2 if self._bounces else 8

    def __init__(self, binding: Binding, installed: Installed, device: str) -> None:
        self._binding = binding
        self._installed = installed
        self.device = device
        self._home = home_of(binding.tensors)
        self._bounces = bool(binding.shards) or self._home.type != device
        self._bounce: _Bounce | None = None
        self._spare: _Arena | None = None
        self._live: _Arena | None = None
        self._adopted: LentArena | None = None  # in place of the spare one
        self._lent: WeakKeyDictionary[LentArena, _Arena] = WeakKeyDictionary()  # they come again and again
        self._digests = StreamingDigests(0)
        self.base_epoch: int | None = None
        self._lag: dict[int, Tensor | None] = {}  # by bucket: what brings the spare arena up to date, if it is known
        self._changes: dict[int, Tensor | None] = {}  # of the update that is being received

    def begin(self, *, delta: bool = False) -> None:
        settle(self._home)
        self.drop()
        self._digests = StreamingDigests(len(self._binding.plan.specs))
        self._changes = {}
        if not delta:
            self._lag = {}

    def adopt(self, lent: LentArena) -> bool:
        plan = self._binding.plan
        if self._home.type != "cpu" or self._binding.shards or len(plan.parts) > 1:
            return False
        if lent not in self._lent:
            self._lent[lent] = _Arena(self._binding, self._home, lent.memory[: plan.arena_nbytes])
        self._adopted, self._spare = lent, self._lent[lent]
        return True

    def drop(self) -> None:
        if self._adopted is not None:
            self._adopted.let_go()
            self._adopted = self._spare = None

    def _own(self) -> _Arena:
        if self._spare is None:
            self._spare = _Arena(self._binding, self._home)
        return self._spare

    def target(self, bucket: Bucket) -> Tensor:
        if not self._bounces:
            self._lag.pop(bucket.index, None)
            return self._own().place(bucket)
        if self._bounce is None:
            self._bounce = _Bounce(self._binding.plan.largest_bucket, self.device)
        return self._bounce.target(bucket)

    def take(self, bucket: Bucket, buffer: Tensor) -> None:
        self._lag.pop(bucket.index, None)
        self._own().put(bucket, buffer)
        hash_bucket(self._binding.plan, bucket, buffer, self._digests)

    def take_changes(self, bucket: Bucket, message: Tensor | None) -> None:
        assert self._live is not None
        plan = self._binding.plan
        runs = grain_of(plan, bucket).runs
        changed = [] if message is None else read(message, runs)
        place = self._own().place(bucket)
        if bucket.index not in self._lag:
            place.copy_(self._live.place(bucket))
        elif (lag := self._lag.pop(bucket.index)) is not None:
            apply(lag, runs, place)
        for each in changed:
            each.write(place[each.run.start : each.run.stop])
        self._changes[bucket.index] = message
        hash_bucket(plan, bucket, place, self._digests)

    def digest(self) -> str:
        return self._binding.plan.digest_of(self._digests.result())

    def commit(self) -> None:
        self.base_epoch = None  # until it is whole
        arena = self._own()
        if self._adopted is not None:
            self._installed.lent.append(self._adopted)  # whatever becomes of this: parameters may point there now
            self._adopted = self._spare = None
        written: list[Tensor] = []
        if self._live is None or not self._live.is_in_service():
            written = [tensor for tensor in arena.targets if not self._may_point_elsewhere(tensor)]
        self._binding.check_memory(written)
        stay = {id(tensor) for tensor in written}
        with torch.no_grad():
            for tensor, taken in zip(arena.targets, arena.views, strict=True):
                if id(tensor) in stay:
                    raw(tensor).copy_(raw(taken[0]))
                else:
                    tensor.data = taken[0]
                    self._installed.views[id(tensor)] = taken
        settle(self._home)
        self._spare = None if arena.lent or self._live is None or self._live.lent else self._live
        self._live = arena
        self._lag = self._changes if self._spare is not None else {}
        self._changes = {}
        self._installed.let_go(arena.memory)

    def _may_point_elsewhere(self, tensor: Tensor) -> bool:
        """Whether nothing else would go on to see the old memory: it is all the tensor's own, or an arena of ours."""
        installed = self._installed.views.get(id(tensor))
        if installed is not None and installed[0].data_ptr() == tensor.data_ptr():
            return True
        whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        return whole and id(tensor) not in self._binding.shared

    def discard(self) -> None:
        self.drop()
        self._lag = {}
        self._spare = self._bounce = None


class _Arena:
    """A set of weights beside that in service: laid out as the plan is or, if shards lie here, of their size only.

    Args:
        binding: What goes where.
        device: Where it is to lie.
        memory: Memory to lie in, if there is some: flat uint8, laid out as the plan is.

    Attributes:
        memory: Flat uint8.
        lent: Whether it is a source's.
        targets: The module's tensors that are to be pointed into it.
        views: What each of them is to become, and where the memory of all begins.
    """

    def __init__(self, binding: Binding, device: torch.device, memory: Tensor | None = None) -> None:
        self._plan = plan = binding.plan
        found: list[tuple[int, Block | None, list[Tensor]]] = []
        for index, targets in enumerate(binding.targets):
            by_block: dict[Block | None, list[Tensor]] = {None: list(targets)} if targets else {}
            for shard in binding.shards.get(index, ()):
                by_block.setdefault(shard.block, []).append(shard.tensor)
            found += [(index, block, tensors) for block, tensors in by_block.items()]
        lying = plan
        if binding.shards:
            specs = (
                (plan.specs[index], plan.specs[index].shape if block is None else block.shape)
                for index, block, _ in found
            )
            lying = plan_buckets([TensorSpec(str(at), spec.dtype, shape) for at, (spec, shape) in enumerate(specs)])
        self.lent = memory is not None
        if memory is None:
            memory = torch.empty(lying.arena_nbytes, dtype=torch.uint8, device=device)
        self.memory = memory
        views = arena_views(lying, self.memory)
        where = self.memory.untyped_storage().data_ptr()
        becoming = [(tensor, view) for view, (*_, tensors) in zip(views, found, strict=True) for tensor in tensors]
        self.targets = [tensor for tensor, _ in becoming]
        self.views = [(view, where) for _, view in becoming]
        self._addresses = [view.data_ptr() for _, view in becoming]
        self._sharded = bool(binding.shards)
        self._whole: list[list[Tensor]] = [[] for _ in plan.specs]
        self._shards: dict[int, list[Shard]] = {}
        for view, (index, block, _) in zip(views, found, strict=True):
            if block is None:
                self._whole[index].append(view)
            else:
                self._shards.setdefault(index, []).append(Shard(view, block))

    def is_in_service(self) -> bool:
        """Whether all of the module's tensors point into it."""
        return list(map(Tensor.data_ptr, self.targets)) == self._addresses

    def place(self, bucket: Bucket) -> Tensor:
        """Where a bucket lies, if it is laid out as the plan is."""
        return self.memory[bucket.start : bucket.stop]

    def put(self, bucket: Bucket, buffer: Tensor) -> None:
        """Copy a bucket in, or what is wanted of it, unless it lies here already."""
        if self._sharded:
            unpack(self._plan, bucket, buffer, self._whole)
            unpack_shards(self._plan, bucket, buffer, self._shards)
        elif (place := self.place(bucket)).data_ptr() != buffer.data_ptr():
            place.copy_(buffer)


class InPlaceLoader:
    """Overwrites the weights in service, bucket by bucket; needs no more memory than two buckets.

    Args:
        binding: What goes where.
        device: Device type that buckets arrive on.
    """

    in_flight = 2

    def __init__(self, binding: Binding, device: str) -> None:
        self.touched = False
        self._binding = binding
        self._home = home_of(binding.tensors)
        self.device = device
        self.base_epoch: int | None = None
        self._bounce: _Bounce | None = None
        self._digests = StreamingDigests(0)

    def begin(self, *, delta: bool = False) -> None:
        settle(self._home)
        self._binding.check_memory(self._binding.tensors)
        self.base_epoch = None  # until it is whole
        self._digests = StreamingDigests(len(self._binding.plan.specs))

    def adopt(self, lent: LentArena) -> bool:
        return False  # its weights lie where they lie

    def drop(self) -> None:
        pass

    def target(self, bucket: Bucket) -> Tensor:
        if self._bounce is None:
            self._bounce = _Bounce(self._binding.plan.largest_bucket, self.device)
        return self._bounce.target(bucket)

    def take(self, bucket: Bucket, buffer: Tensor) -> None:
        self.touched = True
        hash_bucket(self._binding.plan, bucket, buffer, self._digests)
        unpack(self._binding.plan, bucket, buffer, self._binding.targets)
        unpack_shards(self._binding.plan, bucket, buffer, self._binding.shards)

    def take_changes(self, bucket: Bucket, message: Tensor | None) -> None:
        changed = [] if message is None else read(message, grain_of(self._binding.plan, bucket).runs)
        self.touched = self.touched or bool(changed)
        for part in (*bucket.whole_pieces, *bucket.pieces):
            start, stop = part.offset, part.offset + part.stop - part.start
            of_part = [
                each.within(start, stop) for each in changed if each.run.start <= start and stop <= each.run.stop
            ]
            self._change(replace(part, offset=0), of_part)

    def _change(self, part: Piece, changed: Sequence[Changed]) -> None:
        """Write what differs in a tensor, or in a part of one, and hash all of that."""
        plan, (first, *others) = self._binding.plan, self._binding.targets[part.tensor]
        nbytes = part.stop - part.start
        alone = Bucket(0, 0, nbytes, (), (), (part,))
        own = flat_bytes(first, "cpu")
        flat = torch.empty(nbytes, dtype=torch.uint8) if own is None else own[part.start : part.stop]
        if own is None:
            pack(plan, alone, {part.tensor: first}, flat)
        for each in changed:
            each.write(flat)
        if own is None and changed:
            unpack(plan, alone, flat, {part.tensor: [first]})
        if others:
            unpack(plan, alone, flat, {part.tensor: others})
        hash_bucket(plan, alone, flat, self._digests)

    def digest(self) -> str:
        return self._binding.plan.digest_of(self._digests.result())

    def commit(self) -> None:
        settle(self._home)
        self.touched = False

    def discard(self) -> None:
        self._bounce = None


class _Bounce:
    """Two buffers that take turns."""

    def __init__(self, size: int, device: str) -> None:
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]

    def target(self, bucket: Bucket) -> Tensor:
        return self._buffers[bucket.index % 2][: bucket.nbytes]
