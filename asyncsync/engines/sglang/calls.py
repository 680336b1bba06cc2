"""SGLang's control calls, in one shape, however an engine is reached.

The calls have SGLang's own names (0.5.23's; slime's and miles' Ray actors use the same). An answer that says
``success=false`` is an exception here, always. Nothing here decides: order, deadlines and what a failure means are the
adapter's.

With tensor parallelism SGLang passes on the first rank's answer only: that one says yes does not say that all ranks
did. :meth:`SGLangClient.weights_checksums` does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from asyncsync import cluster

PauseMode = Literal["abort", "in_place", "retract"]
Selector = Literal["all", "target", "draft"]
PAUSE_MODES: tuple[PauseMode, ...] = ("abort", "in_place", "retract")

_ASSUMED: dict[str, object] = {"mode": "abort", "selector": "all", "load_format": None, "abort_all_requests": True}
_ASSUMED |= {"weight_version": None, "tags": None}
"""Fields that older interfaces lack, and the value that they have there."""

_UPDATED_NOT_FLUSHED = "Weights were updated, but the cache was not flushed"

_DISPENSABLE = {"timeout", "timeout_s"}
"""Fields that may be left out whatever their value."""


class SGLangError(RuntimeError):
    """An SGLang engine said no, or gave no answer.

    Attributes:
        message: What it said.
        call: Which call it was.
    """

    def __init__(self, message: str, call: str | None = None) -> None:
        super().__init__(message, call)
        self.message = message
        self.call = call

    def __str__(self) -> str:
        return f"SGLang's {self.call}: {self.message}" if self.call else self.message


class SGLangUnreachableError(SGLangError):
    """The engine gave no answer: it may have done what was asked, or may do so yet."""


class SGLangRefusalError(SGLangError):
    """The engine answered no. What it was asked was not done, but for what its words say."""


class NotFlushedError(SGLangError):
    """The weights were loaded; what failed is the flush of the cache after it, since requests were running."""


class UnsupportedBySGLangError(SGLangRefusalError):
    """This engine, or the actor in front of it, cannot do what was asked. Nothing was done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SGLangFacts:
    """What an SGLang engine says about itself; None where it does not say.

    Attributes:
        version: SGLang's.
        model_path: Checkpoint it was started with.
        device: ``"cuda"``, ``"cpu"``, …
        dtype: Of its weights, as it was asked for: may be ``"auto"``.
        quantization: How its weights are quantized.
        tensor_parallel_size: Each of these ranks is one in the weight update group.
        data_parallel_size: SGLang updates weights from a group only if this is 1.
        pipeline_parallel_size: Stages.
        radix_cache: Whether it keeps keys and values of old prompts for new ones.
        overlap_schedule: Whether a token may be on its way while the next is scheduled.
        memory_saver: Whether it can release its memory (``enable_memory_saver``).
        weights_kept: Whether it keeps a copy of weights that it releases (``enable_weights_cpu_backup``).
        speculative: Whether it has a draft model.
        sessions: Whether updates run between ``begin_weight_update`` and ``end_weight_update``.
        pause_modes: Modes of ``pause_generation`` that it takes.
        flattened_buckets: Whether a weight update can come as one flat tensor; else tensor by tensor.
        selectors: Whether an update can be for the target or the draft model alone.
        labels: Whether its weight version can be set without aborting requests.
        labels_in_updates: Whether it can be set by a call that updates weights.
        checksums: Whether it can give checksums of its weights.
        aborts: Whether requests can be aborted while it is paused.
        timed_flush: Whether it can be asked to flush its cache once, or for so long, and not until it succeeds.
    """

    version: str | None
    model_path: str | None
    device: str | None
    dtype: str | None
    quantization: str | None
    tensor_parallel_size: int | None
    data_parallel_size: int | None
    pipeline_parallel_size: int | None
    radix_cache: bool | None
    overlap_schedule: bool | None
    memory_saver: bool | None
    speculative: bool | None
    sessions: bool
    pause_modes: tuple[PauseMode, ...] = PAUSE_MODES
    flattened_buckets: bool = True
    selectors: bool = True
    labels: bool = True
    labels_in_updates: bool = True
    checksums: bool = True
    aborts: bool = True
    timed_flush: bool = True
    weights_kept: bool | None = None


class SGLangClient(ABC):
    """The control calls to one SGLang engine, over one way of asking it.

    Every method raises :class:`SGLangError`: the engine's own message, or that it was not reached
    (:class:`SGLangUnreachableError`), or that it cannot (:class:`UnsupportedBySGLangError`).
    """

    @abstractmethod
    async def get_facts(self) -> SGLangFacts:
        """Ask the engine what it is; changes nothing."""

    @abstractmethod
    async def _ask(self, call: str, fields: dict[str, Any]) -> Any:
        """Make one call by SGLang's name for it, and return its answer, success or not."""

    def address(self) -> str:
        """This node's address, as the engine's processes reach it."""
        return cluster.node_address()

    def tell(self, error: BaseException) -> str:
        """What to say of an error of a call: also of which engine, as its owner knows it."""
        said = str(error) if isinstance(error, SGLangError) else f"{type(error).__name__}: {error}"
        return said if repr(self) in said else f"{self!r}: {said}"

    async def aclose(self) -> None:  # noqa: B027 - most have nothing to let go of
        """Let go of connections; the engine runs on."""

    async def _do(self, call: str, fields: dict[str, Any]) -> Any:
        answer = await self._ask(call, fields)
        success, message = outcome_of(answer)
        if not success:
            # Only its words tell this failure from one after which the weights are half new.
            kind = NotFlushedError if message.startswith(_UPDATED_NOT_FLUSHED) else SGLangRefusalError
            raise kind(message, call)
        return answer

    async def get_weight_version(self) -> str:
        """The label of its weights; ``"default"`` until one was set."""
        return str(await self._do("get_weight_version", {}))

    async def update_weight_version(self, label: str) -> None:
        """Label its weights, aborting nothing. Requests in flight note the change."""
        await self._do("update_weight_version", {"new_version": label, "abort_all_requests": False})

    async def pause_generation(self, mode: PauseMode) -> None:
        """Hold back new requests, and deal with those in flight; takes 1 s for ``abort`` if there are any.

        Never ``abort`` while it is paused ``in_place``: requests could not end, and it would wait for them for ever,
        deaf to ``continue_generation``.
        """
        await self._do("pause_generation", {"mode": mode})

    async def continue_generation(self) -> None:
        """End a pause of any mode; no error if it is not paused."""
        await self._do("continue_generation", {})

    async def flush_cache(self, *, wait: float = 0.0) -> bool:
        """Drop cached keys and values, unless requests run.

        Args:
            wait: Seconds to wait for requests to end.

        Returns:
            Whether it was done.
        """
        return outcome_of(await self._ask("flush_cache", {"timeout": wait}))[0]

    async def init_weights_update_group(
        self, *, address: str, port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Collective. Join a group whose store listens at an address; waits for all, up to half an hour."""
        fields = {
            "master_address": address,
            "master_port": port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group_name,
            "backend": backend,
        }
        await self._do("init_weights_update_group", fields)

    async def destroy_weights_update_group(self, group_name: str) -> None:
        """Leave a group; an error if it is in none of that name."""
        await self._do("destroy_weights_update_group", {"group_name": group_name})

    async def begin_weight_update(self, selector: Selector = "all") -> None:
        """Begin a session of updates. Waits for requests in flight, unless it is paused.

        A session that is open already is an error. Generating in one is possible, and gives what is loaded so far.
        """
        await self._do("begin_weight_update", {"selector": selector})

    async def end_weight_update(self) -> None:
        """End the session; what was loaded stays loaded."""
        await self._do("end_weight_update", {})

    async def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        *,
        group_name: str,
        selector: Selector = "all",
        flattened: bool = True,
        weight_version: str | None = None,
        flush_cache: bool = False,
    ) -> None:
        """Collective. Receive tensors from the group's first rank and load them.

        An unknown name is no error, and a tensor of another dtype is converted: compare checksums. After an error the
        weights may be overwritten in part. Waits up to half an hour for the bytes, deaf to ``continue_generation``; if
        the first rank leaves the group, it fails at once.

        Args:
            names: As in the checkpoint.
            dtypes: Such as ``"bfloat16"``.
            shapes: Of the whole tensors.
            group_name: The group's.
            selector: Which models they are for.
            flattened: Whether they come as one flat uint8 tensor, one after another, each at a multiple of its
                element's size; else as a broadcast each.
            weight_version: Label for the weights, set at once: before the session ends.
            flush_cache: Flush the cache afterwards, without giving memory back to the device, which takes longer.

        Raises:
            NotFlushedError: The weights were loaded, but requests are running.
        """
        fields = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": group_name,
            "flush_cache": flush_cache,
            "load_format": "flattened_bucket" if flattened else None,
            "selector": selector,
            "weight_version": weight_version,
        }
        await self._do("update_weights_from_distributed", fields)

    async def weights_checksums(self, selector: Selector = "all") -> tuple[Mapping[str, str], ...]:
        """Per tensor parallel rank, checksums of its parameters as they lie in memory (fused, and its shard of each).

        On a CPU, a checksum is the first 8 bytes of the SHA-256 of a parameter's bytes, as 16 hex digits.
        """
        answer = await self._do("check_weights", {"action": "checksum", "selector": selector})
        ranks = answer.get("ranks") if isinstance(answer, dict) else None
        if not ranks:
            raise UnsupportedBySGLangError("gives no checksums", "check_weights")
        return tuple(dict(rank["checksums"]) for rank in ranks)

    async def release_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Release memory (``"weights"``, ``"kv_cache"``, ``"cuda_graph"``; None: all). No call tells afterwards."""
        await self._do("release_memory_occupation", {"tags": None if tags is None else list(tags)})

    async def resume_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Get released memory back; SGLang's process ends if it was not released."""
        await self._do("resume_memory_occupation", {"tags": None if tags is None else list(tags)})

    async def abort_all(self) -> None:
        """Abort the requests that the scheduler has, running or queued; not those held back by a pause."""
        await self._do("abort_request", {"rid": "", "abort_all": True})


def outcome_of(answer: Any) -> tuple[bool, str]:
    """Whether an answer says success, and its message. One that says neither was no error where it came from."""
    if isinstance(answer, dict) and "success" in answer:
        return bool(answer["success"]), str(answer.get("message") or "no reason given")
    if isinstance(answer, bool):
        return answer, "no reason given"
    return True, ""


def fields_that_fit(call: str, fields: Mapping[str, Any], accepted: Collection[str] | None) -> dict[str, Any]:
    """What of a request an older or narrower interface takes.

    Args:
        call: The call's name.
        fields: Of the request, as 0.5.23 takes it.
        accepted: Names that the other side takes; None: any.

    Raises:
        UnsupportedBySGLangError: It lacks a field, and would assume another value than the one that is wanted.
    """
    if accepted is None:
        return dict(fields)
    for name in fields.keys() - accepted:
        if name not in _DISPENSABLE and (name not in _ASSUMED or fields[name] != _ASSUMED[name]):
            raise UnsupportedBySGLangError(f"takes no {name}, so {name}={fields[name]!r} cannot be asked for", call)
    return {name: value for name, value in fields.items() if name in accepted}


def facts_from(info: Mapping[str, Any], *, sessions: bool, **capabilities: Any) -> SGLangFacts:
    """Facts from the fields of ``/server_info``, which are those of SGLang's ``ServerArgs``."""

    def negated(name: str) -> bool | None:
        return None if info.get(name) is None else not info[name]

    return SGLangFacts(
        version=info.get("version"),
        model_path=info.get("model_path"),
        device=info.get("device"),
        dtype=info.get("dtype"),
        quantization=info.get("quantization"),
        tensor_parallel_size=info.get("tp_size"),
        data_parallel_size=info.get("dp_size"),
        pipeline_parallel_size=info.get("pp_size"),
        radix_cache=negated("disable_radix_cache"),
        overlap_schedule=negated("disable_overlap_schedule"),
        memory_saver=info.get("enable_memory_saver"),
        weights_kept=info.get("enable_weights_cpu_backup"),
        speculative=bool(info["speculative_algorithm"]) if "speculative_algorithm" in info else None,
        sessions=sessions,
        **capabilities,
    )
