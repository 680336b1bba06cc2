"""The door to transformers' continuous batching manager, and what must be done so that it can be trusted.

The manager generates on a thread of its own. What it gives is used as it is, through its public methods, but for this:

- Its outputs are taken on that thread, in the step that made them: so once it is parked, all that was computed has been
  counted. (Its own handlers run later, on an event loop; and if requests have several loops, all of a step's outputs on
  that of the last.)
- No step is prepared before the one before was counted (``use_async_batching``), for the same reason.
- No keys and values are shared between requests (``allow_block_sharing``): complete blocks are found again by the
  tokens alone, whatever weights they were computed with, and those of a request that goes on over its old cache cannot
  be told from new ones.
- CUDA graphs read the memory they were captured with, so a staged engine, which points its weights elsewhere, has none.
- One request that cannot be computed ends the thread for all, so requests are looked at before they are let in.
- The thread is started from a daemon thread, since it would hold the interpreter's exit for ever otherwise.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from torch import nn

from asyncsync.engines.batching_config import (
    as_batching_config,
    as_generation_config,
    refuse_processors,
    stop_tokens,
)
from asyncsync.errors import AsyncSyncError, EngineError
from asyncsync.threads import WorkerThread

_EXIT_TIMEOUT = 2.0  # seconds that the interpreter's exit may wait for a step that runs
_live: weakref.WeakSet[ContinuousBatch] = weakref.WeakSet()


class Listener(Protocol):
    """Who is told what a batch comes to, on the thread that generates; see ``BatchedGenerations``."""

    def take(self, outputs: Sequence[tuple[str, Sequence[int], bool, str | None]]) -> None:
        """Hear of a step: a request's key, all its tokens, whether it has ended, and why it failed, if it did."""
        ...

    def end(self, error: AsyncSyncError) -> None:
        """Hear that there will be no more steps, and why."""
        ...


class ContinuousBatch:
    """Generates with a model of transformers for many requests at once.

    Args:
        model: A causal language model with ``init_continuous_batching``; put into evaluation mode.
        generation_config: transformers' ``GenerationConfig``; None: greedy.
        batching_config: transformers' ``ContinuousBatchingConfig``; None: as transformers chooses on a GPU, and little
            memory on a CPU.
        staged: Whether the model's parameters are pointed elsewhere by an update.

    Attributes:
        capacity: How many tokens a request may have, prompt and answer together.
        stop: The tokens that end an answer, unless a request names others.
    """

    def __init__(self, model: nn.Module, generation_config: Any, batching_config: Any, *, staged: bool) -> None:
        from transformers.generation.continuous_batching.model_runner import infer_max_single_request_tokens

        generation_config = as_generation_config(model, generation_config)
        self.stop = stop_tokens(generation_config.eos_token_id)
        batching_config = as_batching_config(model, batching_config, staged=staged)
        self._manager: Any = model.init_continuous_batching(  # type: ignore[operator]  # transformers' mixin
            generation_config=generation_config, continuous_batching_config=batching_config
        )
        refuse_processors(self._manager.logit_processor.logits_processor)
        self._status: Any = self._manager.background_thread_status
        self._manager.warmup()  # allocates the cache: here, where the caller hears it if there is no room for that
        processor = self._manager.batch_processor
        _let_waiting_requests_in(processor.scheduler)
        room: int = infer_max_single_request_tokens(processor.cache)
        self.capacity = min(
            room, getattr(self._manager.model.config.get_text_config(), "max_position_embeddings", room)
        )
        self._vocabulary = self._manager.model.get_input_embeddings().num_embeddings
        self._pauser = WorkerThread("asyncsync-pauser")
        self._pause: Any = None
        self._ended = threading.Event()

    def start(self, listener: Listener) -> None:
        """Start the thread; the listener is not kept alive by it."""
        _hear(self._manager, self._status, weakref.ref(listener))
        self._pauser.submit(self._manager.start).result()
        watched = (self._manager, weakref.ref(listener), self._ended)
        threading.Thread(target=_watch, args=watched, name="asyncsync-watcher", daemon=True).start()
        weakref.finalize(self, _request_stop, self._status).atexit = False
        _live.add(self)

    def check(self, prompt: Sequence[int], max_new_tokens: int, options: Iterable[str]) -> None:
        """See whether a request can be computed.

        Raises:
            ValueError: It cannot.
        """
        if not prompt:
            raise ValueError("a prompt has one token at least")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be positive, not {max_new_tokens}")
        if min(prompt) < 0 or max(prompt) >= self._vocabulary:
            raise ValueError(f"token ids must be between 0 and {self._vocabulary - 1}")
        if len(prompt) + max_new_tokens > self.capacity:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and {max_new_tokens} new ones do not fit: there is room "
                f"for {self.capacity} (the least of the model's max_position_embeddings, and of what num_blocks and "
                "page_size of ContinuousBatchingConfig leave)"
            )
        if unknown := set(options) - set(self._manager.logit_processor.supported_keys):
            raise ValueError(
                f"a request cannot bring its own {', '.join(sorted(unknown))}: that takes a GenerationConfig which "
                "sets it too, and ContinuousBatchingConfig(per_request_processors=True)"
            )

    # -- the Batch protocol ---------------------------------------------------------------------------------------

    def add(
        self, key: str, prompt: Sequence[int], max_new_tokens: int, stop: frozenset[int], options: dict[str, Any]
    ) -> None:
        """See :class:`~asyncsync.engines.batched.Batch`; what comes too late is told of by the watcher."""
        self._manager.add_request(
            list(prompt), key, max_new_tokens, streaming=True, eos_token_id=sorted(stop), **options
        )

    def cancel(self, key: str) -> None:
        """See :class:`~asyncsync.engines.batched.Batch`."""
        self._manager.cancel_request(key)

    async def park(self) -> None:
        """See :class:`~asyncsync.engines.batched.Batch`."""
        await self._pauser.run(self._enter_pause)

    def unpark(self) -> None:
        """See :class:`~asyncsync.engines.batched.Batch`."""
        self._pauser.submit(self._leave_pause)

    # The manager counts pauses per thread, and waits for a step to end: so both run on one thread, in order.

    def _enter_pause(self) -> None:
        if self._pause is not None:
            return
        pause = self._manager.pause()
        try:
            pause.__enter__()
        except RuntimeError as error:
            raise EngineError(f"generation cannot be paused: {error}") from (error.__cause__ or error)
        self._pause = pause

    def _leave_pause(self) -> None:
        if self._pause is not None:
            pause, self._pause = self._pause, None
            pause.__exit__(None, None, None)

    def stop_soon(self) -> None:
        """End the thread after its step; whoever waits for an answer is told. Does not wait."""
        self.unpark()
        _request_stop(self._status)

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread's end; blocks, for so many seconds at the most."""
        self._ended.wait(timeout)


def _hear(manager: Any, status: Any, heard_by: weakref.ref[Any]) -> None:
    """Have outputs told to a listener, on the thread that makes them."""

    def deliver_batch(outputs: Sequence[Any]) -> None:
        listener: Listener | None = heard_by()
        if listener is None:
            return
        if status.local_status:  # it is ending: the watcher tells all who are left, and why
            outputs = [output for output in outputs if output.error is None]
        listener.take(
            [(output.request_id, output.generated_tokens, output.is_finished(), output.error) for output in outputs]
        )

    manager.output_router.deliver_batch = deliver_batch
    manager.output_router.deliver = lambda output: deliver_batch([output])


def _watch(manager: Any, heard_by: weakref.ref[Any], ended: threading.Event) -> None:
    """Wait for the thread's end and tell of it: a request that comes in that moment is dropped without a word."""
    manager.join(time.perf_counter())
    ended.set()
    listener: Listener | None = heard_by()
    if listener is not None:
        cause = manager.background_thread_status.fatal_error
        error = EngineError("the engine generates no more" + (f": {type(cause).__name__}: {cause}" if cause else ""))
        error.__cause__ = cause
        listener.end(error)


def _let_waiting_requests_in(scheduler: Any) -> None:
    """Mend a stall: out of cache, it lets nobody in until a request finishes; if all are cancelled, that is never."""
    clear_cancelled_requests: Callable[[], Any] = scheduler.clear_cancelled_requests

    def clear_and_let_in() -> Any:
        cancelled = clear_cancelled_requests()
        if cancelled:
            scheduler.block_new_requests = False
        return cancelled

    scheduler.clear_cancelled_requests = clear_and_let_in


def _request_stop(status: Any) -> None:
    status.request_stop(status.HARD_STOP, 0)


def _stop_all() -> None:
    """A daemon thread that computes while the interpreter shuts down ends the process with an abort."""
    batches = list(_live)
    for batch in batches:
        batch.stop_soon()
    deadline = time.monotonic() + _EXIT_TIMEOUT
    for batch in batches:
        batch.join(max(0.0, deadline - time.monotonic()))


atexit.register(_stop_all)
