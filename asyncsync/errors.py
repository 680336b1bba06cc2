"""What can go wrong, sorted by what the caller can do about it.

Every error of the library is an :class:`AsyncSyncError`. Those that end a weight update are also a
:class:`WeightUpdateError`, so ``except WeightUpdateError`` is the one clause a training loop needs: the error says
in which phase the update ended and what became of each engine, and the next update may simply be tried.

Errors travel between processes by pickle: each is rebuilt from its message, and its attributes follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncsync.report import EngineOutcome, WeightUpdate


class AsyncSyncError(Exception):
    """Base of every error that asyncsync raises on purpose."""


def what_was_said(error: Exception | str) -> str:
    """An error's text; of one that ended an update, without where that was."""
    return error.said if isinstance(error, WeightUpdateError) else str(error)


class PlanError(AsyncSyncError, ValueError):
    """The weights do not fit: names, shapes or dtypes that differ, or tensors that cannot be sent.

    Raised before the first byte is sent; every engine goes on serving what it had.

    Attributes:
        names: The tensors concerned, sorted.
    """

    def __init__(self, message: str, *, names: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.names = tuple(names)

    def named(self, name: str) -> PlanError:
        """The same error, as that of one end."""
        return PlanError(f"{name}: {self}", names=self.names)


class NotReadyError(AsyncSyncError):
    """There is no whole set of weights to generate with (yet): update first, or pass ``initial_version``."""


class ClosedError(AsyncSyncError):
    """The object was closed with ``aclose()`` and cannot be used again."""


class EventLoopError(AsyncSyncError, RuntimeError):
    """The object belongs to another event loop than the one that is running."""


class MemorySaverError(AsyncSyncError):
    """torch_memory_saver cannot give the guard that was asked for."""


class LockError(AsyncSyncError):
    """A rollout lock cannot be had, or a lease on one was lost."""


class LockTimeoutError(LockError, TimeoutError):
    """A rollout lock was not free in time; the message names its holder."""


class WeightUpdateError(AsyncSyncError):
    """A weight update did not succeed everywhere.

    Attributes:
        weight_version: The version the update was to publish.
        phase: The phase of the transaction that failed (``"connect"``, ``"transfer"``, …).
        outcomes: One :class:`asyncsync.EngineOutcome` per engine: who holds what now.
        update: What was brought to the other engines, and published, if only some have failed; else None.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.weight_version: int | None = None
        self.phase: str | None = None
        self.outcomes: tuple[EngineOutcome, ...] = ()
        self.update: WeightUpdate | None = None

    def __str__(self) -> str:
        """What happened; and where in the update, as far as that is known."""
        version = "" if self.weight_version is None else f" to version {self.weight_version}"
        where = "" if self.phase is None else f" [in the {self.phase} of the update{version}]"
        return f"{self.said}{where}"

    @property
    def said(self) -> str:
        """What happened."""
        return super().__str__()


class MembershipError(WeightUpdateError, ValueError):
    """The list of engines cannot be used: one is named twice, or is not in it, or there is none."""


class WeightUpdateTimeoutError(WeightUpdateError, TimeoutError):
    """The update, or its phase, took longer than it may.

    Attributes:
        silent: Names of those who had not answered.
        engine: Name of the engine that alone held it up, if one did.
    """

    def __init__(self, message: str, *, silent: Sequence[str] = (), engine: str | None = None) -> None:
        super().__init__(message)
        self.silent = tuple(silent)
        self.engine = engine


class ConnectError(WeightUpdateError):
    """The data plane could not be set up; nothing is left half-open, nothing was sent.

    Attributes:
        engine: Name of the engine that could not join, if it was one.
    """

    def __init__(self, message: str, *, engine: str | None = None) -> None:
        super().__init__(message)
        self.engine = engine

    def named(self, name: str) -> ConnectError:
        """The same error, as that of one end."""
        return ConnectError(f"{name}: {self}", engine=self.engine)


class OutOfStepError(WeightUpdateError):
    """An end refuses an order before the first byte: it does not know the group, layout or epoch in it (any more).

    Raised by engines and trainers; the conductor answers it by asking everyone anew, once, inside the same update.
    """


class TransferError(WeightUpdateError):
    """The bytes did not arrive whole.

    Attributes:
        bucket: Index of the bucket in transit, if it is known.
        engine: Name of the engine that alone is to blame, if one is.
    """

    def __init__(self, message: str, *, bucket: int | None = None, engine: str | None = None) -> None:
        super().__init__(message)
        self.bucket = bucket
        self.engine = engine

    def named(self, name: str) -> TransferError:
        """The same error, as that of one end."""
        return TransferError(f"{name}: {self}", bucket=self.bucket)


class LinkLostError(TransferError):
    """A link broke, or its other end has left: mostly the consequence of what happened there.

    Attributes:
        peers: The ends that have left, as far as is known: by group, and rank in it.
        witnesses: Names of the engines that have heard of it.
    """

    def __init__(
        self,
        message: str,
        *,
        bucket: int | None = None,
        peers: Iterable[tuple[str, int]] = (),
        witnesses: Iterable[str] = (),
    ) -> None:
        super().__init__(message, bucket=bucket)
        self.peers = frozenset(peers)
        self.witnesses = frozenset(witnesses)

    def named(self, name: str) -> LinkLostError:
        """The same error, as that of one end."""
        return LinkLostError(f"{name}: {self}", bucket=self.bucket, peers=self.peers, witnesses=[name])


class TrainerError(WeightUpdateError):
    """The trainer failed at its part of the update; its own error is the ``__cause__``."""


class EngineError(WeightUpdateError):
    """A rollout engine failed at its part of the update; its own error is the ``__cause__``.

    Attributes:
        engine: The engine's name.
    """

    def __init__(self, message: str, *, engine: str | None = None) -> None:
        super().__init__(message)
        self.engine = engine


class EngineErrorGroup(ExceptionGroup[Exception], WeightUpdateError):
    """Several rollout engines failed; the errors of each are its ``.exceptions``."""

    def __init__(self, message: str, errors: Sequence[Exception]) -> None:
        WeightUpdateError.__init__(self, message)
        self.args = (message, list(errors))  # what pickle makes it anew from

    __str__ = WeightUpdateError.__str__

    @property
    def said(self) -> str:
        """What happened."""
        return self.message

    def derive(self, errors: Sequence[Exception]) -> EngineErrorGroup:  # type: ignore[override]  # of errors only
        """The same group of fewer errors."""
        return EngineErrorGroup(self.message, errors)


class TaintedEngineError(EngineError):
    """This engine holds part of an update: it serves nobody until a whole update repairs it."""
