"""The trainer's side, as it is seen from outside: what a user's class includes, and what the conductor calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from asyncsync import cluster
from asyncsync.messages import Contacts, ReadOptions, Rendezvous, SendReceipt, TrainerStatus, UpdateOrder
from asyncsync.rank_worker import RankWorker
from asyncsync.shards import Holding
from asyncsync.weights import Weights


class Trainer(Protocol):
    """A source of weights as the conductor sees it: here or in actors, one rank or several, the calls are the same."""

    async def begin_update(self) -> bool:
        """Collective. Call the trainer's own hook, and say whether it has one; then :meth:`end_update` must follow."""
        ...

    async def end_update(self) -> None:
        """Collective. Call the hook's counterpart; no error if :meth:`begin_update` was not called, or has failed."""
        ...

    async def describe_weights(self, options: ReadOptions, known_digest: str | None) -> TrainerStatus:
        """Read names, dtypes and shapes, and plan. The tensors are left out if the plan is the known one."""
        ...

    async def open_trainer_group(self, rendezvous: Rendezvous) -> Contacts:
        """Begin to join a group, beside those it is in; returns how this rank is reached."""
        ...

    async def join_trainer_group(self, connection: str, contacts: Contacts) -> None:
        """Collective. Join the group that was opened, whose members are reached like this."""
        ...

    async def leave_trainer_group(self, connection: str) -> None:
        """Leave a group, joined or only opened; no error if there is none of that name."""
        ...

    async def snapshot_weights(self, order: UpdateOrder) -> None:
        """Collective. Copy the weights as they are now, for this order and any that is given in its place."""
        ...

    async def drop_snapshot(self, snapshot: str) -> None:
        """Forget a snapshot; no error if there is none of that name."""
        ...

    async def send_weights(self, order: UpdateOrder) -> SendReceipt | None:
        """Collective. Read the weights, and send every bucket; None if this rank only brings shards to the source."""
        ...

    async def publish_weights(self, epoch: int, digest: str, sources: int) -> None:
        """Have readers of the folder find what was written there in an update, by so many sources."""
        ...

    async def abort_send(self, epoch: int) -> None:
        """Stop sending an update, or copying its weights, and leave its group; no error if that is not under way."""
        ...


class Rank(Trainer, Protocol):
    """One rank of a trainer, alone or among others."""

    async def share_holdings(self, rank: int, holdings: tuple[Holding | None, ...]) -> tuple[int, ...]:
        """Learn which rank this is of several, and what each holds; returns those that bring shards to the source."""
        ...


_NO_HOOK = "__asyncsync_no_hook__"


def _no_hook(method: Callable[[Any], None]) -> Callable[[Any], None]:
    """Mark a method that is there to be overridden, and does nothing."""
    setattr(method, _NO_HOOK, True)
    return method


class TrainerRank:
    """A rank that holds weights: include it in a trainer actor's class, or use one in this process.

    Example:
        >>> @asyncsync.remote(num_gpus=1)
        ... class Trainer(asyncsync.TrainerRank):
        ...     def __init__(self):
        ...         self.model = build_model()
        ...         super().__init__(self.model)
        ...
        ...     def train_step(self, batch): ...

    Args:
        weights: What to send: a module, a state dict, pairs of name and tensor, or a function that returns one of
            these. Must not change while an update is under way, or, if it was started
            (:meth:`asyncsync.WeightSynchronizer.start_update`), until that has returned.
        offload: False if this trainer never offloads its memory; None to find out (see
            :func:`asyncsync.memory_saver_guard`).

    Raises:
        TypeError: ``weights`` is none of these, or a hook is ``async``.
    """

    control_group: str | None = None

    def __init__(self, weights: Weights, *, offload: bool | None = None) -> None:
        # All that the library keeps lies in here, so that a class which includes this one may name its own as it likes.
        self._asyncsync = RankWorker(weights, offload=offload, hooks=self.__hooks())

    def __getattr__(self, name: str) -> Any:
        """What is missing; mostly it is the call of this class's constructor."""
        hint = "" if "_asyncsync" in self.__dict__ else ": call super().__init__(weights) in its __init__"
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{hint}")

    @_no_hook
    def before_update(self) -> None:
        """Get ready for an update, for you to override: re-create process groups that gathering needs, say.

        Called on every rank at once before an update reads or connects anything, and :meth:`after_update` on every path
        after it: success, failure and cancellation (of an update that was started: once the weights are copied). Both
        run on a thread of the library's, where no allocation is tracked by the memory saver (its ``disable()`` is
        entered); they may block, and must not be ``async``. If this fails, so does the update, and ``after_update`` is
        not called on this rank: the next update calls this again.
        A trainer that has hooks must have one synchronizer only: the end of one's update would put it to sleep in the
        middle of another's.
        """

    @_no_hook
    def after_update(self) -> None:
        """Undo what :meth:`before_update` did: destroy process groups, go back to sleep.

        Let go of every reference to a group before it is destroyed, and make the next one over a store of a new name:
        torch may find the old one otherwise.
        """

    def __hooks(self) -> tuple[Callable[[], None], Callable[[], None]] | None:
        # By a mark: Ray gives an actor's class copies of the methods it inherits.
        if hasattr(self.before_update, _NO_HOOK) and hasattr(self.after_update, _NO_HOOK):
            return None
        hooks = self.before_update, self.after_update
        if any(inspect.iscoroutinefunction(hook) for hook in hooks):
            raise TypeError("before_update and after_update run on a thread, and may block: they must not be async")
        return hooks

    @cluster.control
    async def begin_update(self) -> bool:
        """See :class:`Trainer`."""
        return await self._asyncsync.begin_update()

    @cluster.control
    async def end_update(self) -> None:
        """See :class:`Trainer`."""
        await self._asyncsync.end_update()

    @cluster.control
    async def describe_weights(self, options: ReadOptions, known_digest: str | None) -> TrainerStatus:
        """See :class:`Trainer`."""
        status = await self._asyncsync.describe_weights(options, known_digest)
        return replace(status, control_group=self.control_group is not None or not cluster.in_actor())

    @cluster.control
    async def open_trainer_group(self, rendezvous: Rendezvous) -> Contacts:
        """See :class:`Trainer`."""
        return await self._asyncsync.open_trainer_group(rendezvous)

    @cluster.control
    async def join_trainer_group(self, connection: str, contacts: Contacts) -> None:
        """See :class:`Trainer`."""
        await self._asyncsync.join_trainer_group(connection, contacts)

    @cluster.control
    async def leave_trainer_group(self, connection: str) -> None:
        """See :class:`Trainer`."""
        await self._asyncsync.leave_trainer_group(connection)

    @cluster.control
    async def share_holdings(self, rank: int, holdings: tuple[Holding | None, ...]) -> tuple[int, ...]:
        """See :class:`Trainer`."""
        return await self._asyncsync.share_holdings(rank, holdings)

    @cluster.control
    async def snapshot_weights(self, order: UpdateOrder) -> None:
        """See :class:`Trainer`."""
        await self._asyncsync.snapshot_weights(order)

    @cluster.control
    async def drop_snapshot(self, snapshot: str) -> None:
        """See :class:`Trainer`."""
        await self._asyncsync.drop_snapshot(snapshot)

    @cluster.control
    async def send_weights(self, order: UpdateOrder) -> SendReceipt | None:
        """See :class:`Trainer`."""
        return await self._asyncsync.send_weights(order)

    @cluster.control
    async def publish_weights(self, epoch: int, digest: str, sources: int) -> None:
        """See :class:`Trainer`."""
        await self._asyncsync.publish_weights(epoch, digest, sources)

    @cluster.control
    async def abort_send(self, epoch: int) -> None:
        """See :class:`Trainer`."""
        await self._asyncsync.abort_send(epoch)


TRAINER_METHODS = tuple(name for kind in (Trainer, Rank) for name in vars(kind) if not name.startswith("_"))
"""The names of the methods a trainer rank must have."""


class RemoteTrainer:
    """A trainer rank that is a Ray actor: the same calls, remote.

    Args:
        handle: A Ray actor that includes :class:`TrainerRank`, or anything called the same way.

    Raises:
        TypeError: The handle lacks methods of a trainer rank; they are named.
    """

    def __init__(self, handle: Any) -> None:
        missing = cluster.missing_methods(handle, TRAINER_METHODS)
        if missing:
            raise TypeError(
                f"{cluster.actor_class_name(handle)} is no trainer rank: it lacks {', '.join(missing)}; "
                "include asyncsync.TrainerRank in its class"
            )
        self.handle = handle

    def __repr__(self) -> str:
        return f"<RemoteTrainer {cluster.actor_class_name(self.handle)} {cluster.actor_key(self.handle)[:8]}>"

    async def begin_update(self) -> bool:
        has_hooks: bool = await cluster.call(self.handle, "begin_update")
        return has_hooks

    async def end_update(self) -> None:
        await cluster.call(self.handle, "end_update")

    async def describe_weights(self, options: ReadOptions, known_digest: str | None) -> TrainerStatus:
        status: TrainerStatus = await cluster.call(self.handle, "describe_weights", options, known_digest)
        return status

    async def open_trainer_group(self, rendezvous: Rendezvous) -> Contacts:
        contacts: Contacts = await cluster.call(self.handle, "open_trainer_group", rendezvous)
        return contacts

    async def join_trainer_group(self, connection: str, contacts: Contacts) -> None:
        await cluster.call(self.handle, "join_trainer_group", connection, contacts)

    async def leave_trainer_group(self, connection: str) -> None:
        await cluster.call(self.handle, "leave_trainer_group", connection)

    async def share_holdings(self, rank: int, holdings: tuple[Holding | None, ...]) -> tuple[int, ...]:
        bringers: tuple[int, ...] = await cluster.call(self.handle, "share_holdings", rank, holdings)
        return bringers

    async def snapshot_weights(self, order: UpdateOrder) -> None:
        await cluster.call(self.handle, "snapshot_weights", order)

    async def drop_snapshot(self, snapshot: str) -> None:
        await cluster.call(self.handle, "drop_snapshot", snapshot)

    async def send_weights(self, order: UpdateOrder) -> SendReceipt | None:
        receipt: SendReceipt | None = await cluster.call(self.handle, "send_weights", order)
        return receipt

    async def publish_weights(self, epoch: int, digest: str, sources: int) -> None:
        await cluster.call(self.handle, "publish_weights", epoch, digest, sources)

    async def abort_send(self, epoch: int) -> None:
        await cluster.call(self.handle, "abort_send", epoch)
