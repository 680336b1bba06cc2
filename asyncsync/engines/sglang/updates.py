"""One update at an SGLang engine: its session, and its buckets one by one.

A call that loads a bucket waits for the bytes as long as SGLang likes to, half an hour, and cannot be taken back. So
each is a task of its own, which ends when the source hangs up; who waited for it may have left by then. The next bucket
is asked for only when the last was loaded: over HTTP, two calls could overtake each other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncsync.buckets import Bucket, Plan, TensorSpec, list_names
from asyncsync.engines.sglang.calls import NotFlushedError, Selector, SGLangClient, SGLangError, SGLangFacts
from asyncsync.engines.sglang.groups import Membership
from asyncsync.errors import EngineError, LinkLostError, OutOfStepError, TransferError
from asyncsync.messages import UpdateOrder
from asyncsync.shield import CLEANUP_TIMEOUT

_log = logging.getLogger("asyncsync")

_NO_SESSION = "must run between begin_weight_update() and end_weight_update()"

_END_TIMEOUT = CLEANUP_TIMEOUT / 2  # seconds; a call that waits for bytes ends at once when the source hangs up


@dataclass(slots=True)
class Update:
    """An update under way.

    Attributes:
        order: The update's.
        plan: How it is cut.
        names: Under which name each tensor is sent.
        limit: Ends the receiving.
        touched: Whether weights were overwritten, as far as can be known.
        received: Whether every bucket was loaded.
        flushed: Whether SGLang has dropped its cache since.
        in_session: Whether SGLang's session is open.
        call: The call that loads a bucket.
        ended: Set once nothing more is asked for.
    """

    order: UpdateOrder
    plan: Plan
    names: Sequence[str]
    limit: asyncio.Timeout
    touched: bool = False
    received: bool = False
    flushed: bool = False
    in_session: bool = False
    call: asyncio.Task[None] | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Loading:
    """Has an engine load updates.

    Args:
        client: Calls it.
        facts: What it is.
        selector: Which of its models updates are for.
    """

    def __init__(self, client: SGLangClient, facts: SGLangFacts, selector: Selector) -> None:
        self._client = client
        self._facts = facts
        self._selector: Selector = selector
        self._warned = False  # that weights cannot be labelled

    async def load(self, update: Update, groups: Sequence[Membership]) -> None:
        """Have it receive and load every bucket, in a session of its own.

        Args:
            update: Which.
            groups: Where the buckets come from: one of each source, or one for all.

        Raises:
            SGLangError: No session could be begun. Nothing was loaded.
            OutOfStepError: The engine is in no such group. Nothing was loaded.
            EngineError: It wants sessions, which its actor does not offer. Nothing was loaded.
            TransferError: A bucket was not loaded.
        """
        if self._facts.sessions:
            update.in_session = True  # from here on, since whether it was begun may not be known
            await self._begin_session()
        last = len(update.plan.buckets) - 1
        for bucket in update.plan.buckets:
            group = groups[bucket.source] if len(groups) > 1 else groups[0]
            flush = bucket.index == last and update.order.policy != "continue"
            update.touched = True
            update.call = asyncio.create_task(self._load_bucket(update, bucket, group, flush=flush))
            update.call.add_done_callback(_seen)
            try:
                await asyncio.shield(update.call)
                group.stands()
            except NotFlushedError:
                continue  # loaded it is, all the same
            except SGLangError as error:
                raise self._failure(error, update, bucket) from error
            update.flushed = flush
        update.received = True

    def _failure(self, error: SGLangError, update: Update, bucket: Bucket) -> Exception:
        """What it means that a bucket was not loaded."""
        said = self._client.tell(error)
        if bucket.index == 0 and "Group " in error.message and " not in " in error.message:
            update.touched = False
            return OutOfStepError(f"the engine is in no group any more: was it restarted? ({said})")
        if _NO_SESSION in error.message and not self._facts.sessions:
            update.touched = False
            return EngineError(f"{said} (the actor lacks one of these methods, or both: add them)")
        if "Failed to receive weights" in error.message:  # what happened at the other end is not known here
            return LinkLostError(said, bucket=bucket.index)
        specs = [update.plan.specs[index] for index in bucket.whole]
        return TransferError(f"{said} (loading {_of_shapes_in(error.message, specs)})", bucket=bucket.index)

    async def _load_bucket(self, update: Update, bucket: Bucket, group: Membership, *, flush: bool) -> None:
        specs = [update.plan.specs[index] for index in bucket.whole]
        await self._client.update_weights_from_distributed(
            [update.names[index] for index in bucket.whole],
            [str(spec.dtype).removeprefix("torch.") for spec in specs],
            [spec.shape for spec in specs],
            group_name=group.rendezvous.connection,
            selector=self._selector,
            flattened=self._facts.flattened_buckets,
            flush_cache=flush,
        )

    async def finish(self, update: Update) -> None:
        """End the session; then no cache computed under older weights is left, unless the policy keeps them.

        Raises:
            SGLangError: The engine could not.
            EngineError: Requests are running that keep the cache.
        """
        await self._end_session(update)
        if not update.flushed and update.order.policy != "continue" and not await self._client.flush_cache():
            raise EngineError("its cache could not be flushed, since requests are running")

    async def give_up(self, update: Update) -> None:
        """End an update that will not be finished. If its bytes still come, they are not waited for long.

        Raises:
            EngineError: The engine still waits for bytes.
            SGLangError: It could not end the session.
        """
        if not update.ended.is_set():
            update.limit.reschedule(asyncio.get_running_loop().time())
            await update.ended.wait()
        if update.call is not None:
            await asyncio.wait([update.call], timeout=_END_TIMEOUT)
            if not update.call.done():
                raise EngineError(f"the engine still waits for the weights of update {update.order.version}")
        await self._end_session(update)

    async def label(self, label: str, groups: Collection[Membership]) -> bool:
        """Label its weights.

        Args:
            label: The label.
            groups: Those it is in.

        Returns:
            Whether that could be done without aborting requests.

        Raises:
            SGLangError: It failed.
        """
        if self._facts.labels:
            await self._client.update_weight_version(label)
            return True
        group = next((group for group in groups if group.joined), None)
        if self._facts.labels_in_updates and group is not None:
            await self._update_nothing(label, group)
            return True
        if not self._warned:
            self._warned = True
            _log.warning(
                "SGLangEngine of %r: its weights cannot be labelled with their version: what it says of that is older, "
                "and a later synchronizer goes on from there",
                self._client,
            )
        return False

    async def _update_nothing(self, label: str, group: Membership) -> None:
        """An update without weights: no bytes are waited for, and the label that comes with it is set."""
        if self._facts.sessions:
            await self._begin_session()
        try:
            await self._client.update_weights_from_distributed(
                *([], [], []),
                group_name=group.rendezvous.connection,
                selector=self._selector,
                flattened=False,
                weight_version=label,
            )
        finally:
            if self._facts.sessions:
                await self._client.end_weight_update()

    async def _begin_session(self) -> None:
        """Begin SGLang's session; one that was left open, by a conductor that died, is ended first."""
        try:
            await self._client.begin_weight_update(self._selector)
        except SGLangError as error:
            if "already open" not in error.message:
                raise
            await self._client.end_weight_update()
            await self._client.begin_weight_update(self._selector)

    async def _end_session(self, update: Update) -> None:
        if not update.in_session:
            return
        try:
            await self._client.end_weight_update()
        except SGLangError as error:
            if update.received or "no weight-update session" not in error.message:
                raise
        update.in_session = False


def _of_shapes_in(message: str, specs: Sequence[TensorSpec]) -> str:
    """Which tensors an error may be about: those of a shape that it has in it, or all if none is."""
    shaped = [spec for spec in specs if str(list(spec.shape)) in message]
    return list_names({str(spec) for spec in shaped or specs})


def _seen(done: asyncio.Task[Any]) -> None:
    if not done.cancelled():
        done.exception()
