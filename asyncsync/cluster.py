"""The one door to Ray: actors declared, called and recognised, and their errors made ours.

The rest of the library awaits ``call(handle, method, …)`` and never sees Ray. A handle is anything whose methods have
``.remote(…)`` returning an awaitable, so that tests conduct engines and trainers without a cluster.

**The control group.** Ray runs an async actor's sync methods on its event loop, so a plain ``generate`` would hold up
every control call until it is done. A *concurrency group* has a thread and a loop of its own. :func:`remote` is
``ray.remote`` that puts the library's methods into such a group; Ray wants the group declared on the class and offers
no way to add it later, hence a decorator of our own.
"""

from __future__ import annotations

import asyncio
import inspect
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

import ray
from ray.actor import ActorClass, ActorHandle
from ray.exceptions import (
    ObjectStoreFullError,
    OutOfDiskError,
    RayActorError,
    RayError,
    RayTaskError,
    TaskCancelledError,
)

CONTROL_GROUP = "asyncsync"
CONTROL_CONCURRENCY = 16
_CONTROL_MARK = "__asyncsync_control__"
_ONCE_MARK = "__asyncsync_once__"

ActorLostError = RayActorError
"""Raised by :func:`call` when the actor's process is gone, or was replaced while it ran."""

NoRoomError = (ObjectStoreFullError, OutOfDiskError)
"""Raised by :func:`put_object` when neither the store nor the disk that it spills to has room."""

ObjectGoneError = RayError
"""Raised in the place of an object that cannot be fetched (any more): its owner has died, say."""

F = TypeVar("F", bound=Callable[..., Any])


def control(method: F) -> F:
    """Mark an async method as a control call: :func:`remote` runs it on a loop of its own."""
    setattr(method, _CONTROL_MARK, True)
    return method


def once(method: F) -> F:
    """Mark a control call that Ray must not make again by itself, at a process that took the place of a dead one."""
    setattr(method, _ONCE_MARK, True)
    return method


def remote(*args: Any, **options: Any) -> Any:
    """``ray.remote`` for a class that includes :class:`asyncsync.ModuleEngine` or :class:`asyncsync.TrainerRank`.

    Works as ``@asyncsync.remote`` and as ``@asyncsync.remote(num_gpus=1, …)``; every option is passed on to
    ``ray.remote``. What it adds is a concurrency group named ``"asyncsync"``, in which the library's control methods
    are answered at once even while a synchronous method of the actor runs. Other concurrency groups may be given too;
    how many calls run at once in this one is the library's to say.

    Returns:
        The Ray actor class, or a decorator that makes it.

    Raises:
        TypeError: The decorated object is not a class with control methods.
    """
    if len(args) == 1 and not options and isinstance(args[0], type):
        return _actor_class(args[0], {})
    if args:
        raise TypeError("asyncsync.remote takes keyword options only, or decorates a class directly")
    return lambda cls: _actor_class(cls, options)


def _actor_class(cls: type, options: dict[str, Any]) -> Any:
    controls = {name: getattr(cls, name) for name in _marked(cls, _CONTROL_MARK)}
    if not controls:
        raise TypeError(
            f"asyncsync.remote: {cls.__name__} includes neither asyncsync.ModuleEngine nor asyncsync.TrainerRank"
        )
    groups = {**options.get("concurrency_groups", {}), CONTROL_GROUP: CONTROL_CONCURRENCY}
    once_only = _marked(cls, _ONCE_MARK)
    namespace: dict[str, Any] = {
        name: _grouped(name, cls, method, {"max_task_retries": 0} if name in once_only else {})
        for name, method in controls.items()
    }
    namespace |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    namespace["control_group"] = CONTROL_GROUP
    actor = type(cls.__name__, (cls,), namespace)
    return ray.remote(**{**options, "concurrency_groups": groups})(actor)


def _marked(cls: type, mark: str) -> list[str]:
    """Names of methods marked in any base: one that overrides such a method is meant by the mark, too."""
    names = (name for base in cls.__mro__ for name, method in vars(base).items() if getattr(method, mark, False))
    return list(dict.fromkeys(names))


def _grouped(name: str, cls: type, method: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    # No functools.wraps: Ray unwraps methods before it reads their group, and would find none.
    async def grouped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await method(self, *args, **kwargs)

    grouped.__name__, grouped.__qualname__ = name, f"{cls.__qualname__}.{name}"
    grouped.__module__, grouped.__doc__ = cls.__module__, method.__doc__
    setattr(grouped, _CONTROL_MARK, True)
    marked: Callable[..., Any] = ray.method(concurrency_group=CONTROL_GROUP, **options)(grouped)
    return marked


def in_actor() -> bool:
    """Whether this process is a Ray actor's."""
    return ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None


def was_restarted() -> bool:
    """Whether this process is an actor's that Ray has started anew after its first process died."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Ray's own, at a call of its own
        return in_actor() and bool(ray.get_runtime_context().was_current_actor_reconstructed)


def is_actor(candidate: object) -> bool:
    """Whether ``candidate`` is a Ray actor handle."""
    return isinstance(candidate, ActorHandle)


def is_actor_class(candidate: object) -> bool:
    """Whether ``candidate`` is a Ray actor's class: what ``.remote()`` makes actors of."""
    return isinstance(candidate, ActorClass)


def how_it_was_lost(error: BaseException) -> str:
    """In a few words, how an actor was lost; what its constructor raised, if that was it."""
    creation = getattr(error, "creation_task_error", None) or error
    text = str(creation)
    if "creation task" in text:
        last = next((line for line in reversed(text.splitlines()) if line.strip()), "")
        return f"its constructor failed: {last.strip()}"
    return "its process died or was replaced"


def how_it_failed(name: str, error: BaseException, waited: float | None = None) -> str:
    """What to say of an end whose call failed with an error that is none of the library's own.

    Args:
        name: What errors call the end.
        error: What the call ended with.
        waited: Seconds after which it was given up on, if it was.
    """
    if isinstance(error, ActorLostError):
        return f"{name} is gone: {how_it_was_lost(error)}"
    if waited is not None:
        return f"{name} did not answer within {waited:.3g} s"
    return f"{name} failed: {type(error).__name__}: {error}"


def actor_key(handle: object) -> str:
    """What tells one actor from another, however many handles there are to it."""
    return handle._actor_id.hex() if isinstance(handle, ActorHandle) else f"object-{id(handle):x}"


def actor_class_name(handle: object) -> str:
    """The name of an actor's class, or of any object's."""
    if isinstance(handle, ActorHandle):
        return str(handle._ray_actor_creation_function_descriptor.class_name).rpartition(".")[2]
    if isinstance(handle, ActorClass):
        return str(handle.__ray_metadata__.class_name).rpartition(".")[2]  # type: ignore[attr-defined]
    return type(handle).__name__


def missing_methods(handle: object, names: tuple[str, ...]) -> list[str]:
    """Which of these remote methods the actor does not have."""
    return [name for name in names if not hasattr(getattr(handle, name, None), "remote")]


def parameters(handle: object, method: str) -> frozenset[str] | None:
    """The names of what a remote method takes; None if it takes any, or does not say."""
    declared = getattr(handle, "_ray_method_signatures", None)
    if declared is not None:
        said = declared.get(method)
    else:
        function = getattr(getattr(handle, method), "function", None)
        said = None if function is None else list(inspect.signature(function).parameters.values())
    if said is None or any(parameter.kind is parameter.VAR_KEYWORD for parameter in said):
        return None
    return frozenset(parameter.name for parameter in said)


async def call(handle: Any, method: str, *args: Any, **kwargs: Any) -> Any:
    """Await one remote call; if the wait is cancelled, so is the call.

    Ray ends only the local wait when the awaiting task is cancelled: the remote call runs on. Async actor methods can
    be cancelled from afar, so that is done too; it needs no answer.

    Raises:
        Exception: What the method raised, as it raised it, with Ray's error (which holds the remote traceback) as the
            cause.
        ActorLostError: The actor's process is gone.
    """
    reference = getattr(handle, method).remote(*args, **kwargs)
    try:
        return await reference
    except asyncio.CancelledError:
        if isinstance(reference, ray.ObjectRef) and ray.is_initialized():  # else it would start a cluster to do so
            with suppress(Exception):  # must not take the place of the cancellation
                ray.cancel(reference, force=False)
        raise
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, Exception) and not isinstance(cause, RayError | TaskCancelledError):
            raise cause from error
        raise


def node_address() -> str:
    """The address under which other processes of the cluster reach this one; loopback outside a cluster."""
    if not ray.is_initialized():
        return "127.0.0.1"
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def is_connected() -> bool:
    """Whether this process belongs to a Ray cluster."""
    return bool(ray.is_initialized())


async def start_actor(
    cls: type, *, name: str | None = None, arguments: dict[str, Any] | None = None, **options: Any
) -> Any:
    """Start an actor that needs no CPU of its own, or find the one of that name in this Ray namespace.

    Ray talks to its control store meanwhile, so this runs on a thread.

    Args:
        cls: The actor's class, undecorated.
        name: Name to start it under, or to find it by.
        arguments: Keyword arguments of the class.
        **options: Ray's options, such as ``max_concurrency``.
    """
    if name is not None:
        options |= {"name": name, "get_if_exists": True}
    actor: Any = ray.remote(cls)
    actor = actor.options(**{"num_cpus": 0, **options})
    return await asyncio.to_thread(actor.remote, **(arguments or {}))


async def kill_actor(handle: Any) -> None:
    """End an actor's process at once."""
    await asyncio.to_thread(ray.kill, handle)


def put_object(value: Any) -> Any:
    """Put a value into the object store; returns a reference, which keeps it there. Blocks: never on an event loop.

    Raises:
        NoRoomError: There is no room for it.
    """
    return ray.put(value)


def fetch_object(reference: Any) -> Future[Any]:
    """Start to fetch an object; the result holds it as long as it lives itself. Does not block."""
    fetched: Future[Any] = reference.future()
    return fetched


def send(handle: Any, method: str, *args: Any) -> Any:
    """Send one remote call now.

    Awaiting the result is optional, and cancelling that wait does not cancel the call.
    """
    return getattr(handle, method).remote(*args)
