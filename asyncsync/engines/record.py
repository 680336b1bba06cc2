"""What an engine knows of the weights it holds: of which version they are, whether they are whole, and since when.

An engine is *tainted* while it must not serve: it took a part of an update, it missed one, or its process is new. Which
tensors are *torn* is kept by name, since an update may bring only some of them: an engine is whole again once every
torn one was brought anew.

Epochs: an engine refuses whatever is older than the newest it has seen. An update's epoch counts as ended once it was
committed or aborted, so a call that arrives late finds nothing to do harm to.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from asyncsync.buckets import Plan, list_names
from asyncsync.errors import OutOfStepError, TaintedEngineError
from asyncsync.messages import EngineStatus, UpdateOrder

ANOTHER = "(does another synchronizer update it, that does not share this one's lock?)"


class WeightRecord:
    """The versions, epochs and gaps of one engine's weights.

    Args:
        on_taint: Told the reason whenever the engine becomes tainted.

    Attributes:
        epoch: The newest it has seen.
        ended_epoch: The newest that was committed or aborted.
        version: The version it was brought last, tainted or not.
        committed_epoch: By which update.
        tainted: Why it must not serve, or None.
        received: In which epoch buckets arrived last, how many, and of how many; None: that is not known.
    """

    def __init__(self, on_taint: Callable[[str], None] = lambda reason: None) -> None:
        self.instance = uuid.uuid4().hex
        self.epoch = 0
        self.ended_epoch = 0
        self.version: int | None = None
        self.committed_epoch = 0
        self.tainted: str | None = None
        self.received: tuple[int, int, int] | None = None
        self._on_taint = on_taint
        self._torn: set[str] = set()  # tensors that are not of the same version as the others
        self._holds: dict[
            str, tuple[frozenset[str], str]
        ] = {}  # by layout: its names, and the digest of what it brought

    def __repr__(self) -> str:
        return f"<WeightRecord version {self.version}, epoch {self.epoch}{f': {self.tainted}' if self.tainted else ''}>"

    @property
    def weight_version(self) -> int | None:
        """The version it serves; None before the first update, and while it is tainted."""
        return None if self.tainted else self.version

    def status(self, **others: Any) -> EngineStatus:
        """What this record says of the engine, and the rest as given."""
        received: tuple[int, int] | None = None
        if self.received is not None:
            epoch, arrived, buckets = self.received
            received = (arrived if epoch == self.ended_epoch else -1, buckets)
        return EngineStatus(
            instance=self.instance,
            epoch=self.epoch,
            weight_version=self.weight_version,
            newest_version=self.version or 0,
            tainted=self.tainted,
            received=received,
            holds={layout: digest for layout, (_, digest) in self._holds.items()},
            **others,
        )

    def see(self, epoch: int) -> None:
        """Note an epoch.

        Raises:
            OutOfStepError: It is older than the newest.
        """
        if epoch < self.epoch:
            raise OutOfStepError(
                f"a call of epoch {epoch} is out of date: this engine has seen epoch {self.epoch} {ANOTHER}"
            )
        self.epoch = epoch

    def check_new(self, order: UpdateOrder) -> None:
        """Refuse an order that cannot be followed any more.

        Raises:
            OutOfStepError: Its epoch is over, or its version past.
        """
        if order.epoch < self.epoch or order.epoch <= self.ended_epoch:
            raise OutOfStepError(f"epoch {order.epoch} is over: this engine has seen {self.epoch} {ANOTHER}")
        if order.version <= (self.version or 0):
            raise OutOfStepError(f"version {order.version} is past: this engine has served {self.version} {ANOTHER}")

    def end(self, epoch: int) -> None:
        """Note that an update was aborted.

        Raises:
            OutOfStepError: A newer one is under way.
        """
        self.see(epoch)
        self.ended_epoch = epoch

    def committed(self, order: UpdateOrder, names: frozenset[str], digest: str | None) -> None:
        """Note that what an update brought is in service now.

        Args:
            order: The update's.
            names: Every name it brought.
            digest: Digest of what it brought, if it is known.

        Raises:
            TaintedEngineError: The engine still lacks what an earlier update brought to others.
        """
        self.version, self.tainted = order.version, None
        self.committed_epoch = self.ended_epoch = order.epoch
        self._holds = {layout: held for layout, held in self._holds.items() if held[0].isdisjoint(names)}
        if digest is not None:
            self._holds[order.plan_digest] = names, digest
        self._torn -= names
        if self._torn:
            self.taint(f"it lacks what an earlier update brought to others: {list_names(self._torn)}")
            raise TaintedEngineError(str(self.tainted))

    def taint(self, what: str, torn: frozenset[str] = frozenset()) -> None:
        """Note that the engine must not serve.

        Args:
            what: Why.
            torn: Names of the tensors that are not of the same version as the others.
        """
        if torn:
            self._torn |= torn
            self._holds.clear()
        self.tainted = f"{what}: the engine stays paused until a whole update repairs it"
        self._on_taint(self.tainted)

    def lose(self, names: frozenset[str]) -> None:
        """Note that its weights are gone: all that it was ever brought is torn.

        Args:
            names: What an update brings it.
        """
        self._torn |= names.union(*(held for held, _ in self._holds.values()))
        self._holds.clear()
        if self.tainted is None:
            self.taint("its weights were released")

    def compare(self, epoch: int, published: int | None, names: frozenset[str]) -> None:
        """Note that other engines serve a version now: one that does not hold it is tainted.

        Numbers alone do not tell: who had switched, and was then not heard of, holds a version that was never
        published, and whose number the next update was given.

        Args:
            epoch: Of the update that brought it.
            published: The version; None: none of them has switched.
            names: What the update was to bring.
        """
        if published is None or self.tainted is not None or (self.committed_epoch, self.version) == (epoch, published):
            return
        ahead = self.version is not None and self.version >= published
        what = f"it holds version {self.version} alone" if ahead else f"it missed version {published}"
        self.taint(what, names)


def all_names(plan: Plan | None) -> frozenset[str]:
    """Every tensor of a plan, under every name."""
    return plan.names if plan else frozenset()
