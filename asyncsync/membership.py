"""Who belongs to a synchronizer: engines that were given, join, leave, or are asked for anew before every update."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeAlias

from asyncsync import cluster
from asyncsync.engines.base import RolloutEngine
from asyncsync.engines.group import EngineGroup, rank_keys, ranks_of
from asyncsync.engines.remote import as_rank
from asyncsync.errors import MembershipError
from asyncsync.fleet import Fleet, Member

Engines: TypeAlias = Iterable[Any] | Callable[[], Awaitable[Iterable[Any]]]
"""Engines, or an async function that returns those of now."""


class Membership:
    """The engines of a synchronizer, as they come and go.

    Args:
        engines: Ray actors that include :class:`asyncsync.ModuleEngine`, or objects with the protocol, or lists of
            these, one a rank, for an engine that has several; or an async function that returns all that.
        initial_version: The version that those who join before the first update hold already.

    Raises:
        MembershipError: There are none, or one, or a rank of one, is given twice.
        TypeError: One does not have the protocol.

    Attributes:
        silent: Names of those who were given up on without an answer, in the phase that is running.
    """

    def __init__(self, engines: Engines, *, initial_version: int | None = None) -> None:
        self.silent: list[str] = []
        self._numbers = itertools.count()
        self._members: dict[str, Member] = {}
        self._joining: dict[str, Member] = {}
        self._departed: list[Member] = []
        self._initial_version = initial_version
        self._find: Callable[[], Awaitable[Iterable[Any]]] | None = None
        if callable(engines) and not isinstance(engines, Iterable):
            self._find = engines
        elif isinstance(engines, Iterable):
            self._set(engines)
        else:
            raise TypeError(f"engines must be a list, even of one: not {type(engines).__name__}")

    def __repr__(self) -> str:
        return f"<Membership: {', '.join(member.name for member in self.members) or 'nobody'}>"

    @property
    def members(self) -> tuple[Member, ...]:
        """Who belongs to it now."""
        return tuple(self._members.values())

    def __contains__(self, member: Member) -> bool:
        return member in self._members.values()

    @property
    def is_asked(self) -> bool:
        """Whether a function was given for the engines."""
        return self._find is not None

    async def refresh(self) -> None:
        """Ask for the engines of now, if there is someone to ask.

        Raises:
            MembershipError: The answer is no list of engines, empty, or names one twice. Nothing changed.
        """
        if self._find is None:
            return
        try:
            asked = self._find()
            if not inspect.isawaitable(asked):
                raise TypeError("the function that is given for engines must be async")
            found = await asked
            if not isinstance(found, Iterable):
                raise TypeError(f"a list of engines is needed, not {type(found).__name__}")
            self._set(found)
        except MembershipError:
            raise
        except Exception as error:
            raise MembershipError(f"the engines could not be asked for: {type(error).__name__}: {error}") from error

    def fleet(self) -> Fleet:
        """A snapshot.

        Raises:
            MembershipError: There are no engines.
        """
        if not self._members:
            raise MembershipError("a synchronizer needs at least one engine")
        return Fleet(self.members)

    def add(self, engine: Any) -> Member:
        """Have an engine be about to join: it belongs to no fleet before :meth:`admit`.

        Raises:
            MembershipError: It belongs to it already, or one of its ranks does; or engines are asked for.
            TypeError: It does not have the protocol.
        """
        self._refuse_if_asked("add")
        key = engine_key(engine)
        everyone = self._members | self._joining
        if (member := everyone.get(key)) is not None:
            raise MembershipError(f"this engine has joined already: it is {member.name}")
        joined = [(member.name, member.handle) for member in everyone.values()]
        _refuse_shared_ranks([*joined, ("the engine that is to join", engine)])
        member = self._joining[key] = self._new(engine)
        return member

    def admit(self, member: Member) -> None:
        """Let an engine in that was added: it has answered, and its weights fit.

        Raises:
            MembershipError: It was removed meanwhile.
        """
        key = next((key for key, each in self._joining.items() if each is member), None)
        if key is None:
            raise MembershipError(f"{member.name} was removed while it was joining")
        self._members[key] = self._joining.pop(key)

    def remove(self, engine: Any) -> Member:
        """Have an engine leave.

        Raises:
            MembershipError: It does not belong to it, or engines are asked for.
        """
        self._refuse_if_asked("remove")
        key = engine_key(engine) if not isinstance(engine, str) else self._key_of(engine)
        if (member := self._joining.pop(key, None)) is None and (member := self._members.pop(key, None)) is None:
            name = engine if isinstance(engine, str) else engine_name(engine)
            raise MembershipError(f"{name} is none of the engines: {self!r}")
        self._departed.append(member)
        return member

    def _key_of(self, name: str) -> str:
        everyone = self._members | self._joining
        return next((key for key, member in everyone.items() if member.name == name), "")

    def find(self, engine: Any) -> Member:
        """The member that an engine is.

        Raises:
            MembershipError: It is none.
        """
        member = self._members.get(self._key_of(engine) if isinstance(engine, str) else engine_key(engine))
        if member is None:
            raise MembershipError(f"{engine if isinstance(engine, str) else engine_name(engine)} is none of {self!r}")
        return member

    def discard(self, member: Member) -> None:
        """Have a member leave, if it has not left."""
        if member in self or member in self._joining.values():
            self._departed.append(member)
        self._members = {key: each for key, each in self._members.items() if each is not member}
        self._joining = {key: each for key, each in self._joining.items() if each is not member}

    def take_departed(self) -> list[Member]:
        """Those who have left and were not asked for yet: they may still be in groups."""
        departed, self._departed = self._departed, []
        return departed

    def _refuse_if_asked(self, what: str) -> None:
        if self._find is not None:
            raise MembershipError(f"cannot {what} an engine: the function that was given for engines must do it")

    def _set(self, engines: Iterable[Any]) -> None:
        found: dict[str, Any] = {}
        engines = [engines] if isinstance(engines, str) else list(engines)  # that one is refused for what it is
        for index, engine in enumerate(engines):
            key = engine_key(engine)
            if key in found:
                raise MembershipError(f"engine {index} is given twice: it is engine {list(found).index(key)} too")
            found[key] = engine
        _refuse_shared_ranks((f"engine {index}", engine) for index, engine in enumerate(engines))
        if not found:
            raise MembershipError("a synchronizer needs at least one engine")
        new = {key: self._new(engine) for key, engine in found.items() if key not in self._members}
        self._departed += [member for key, member in self._members.items() if key not in found]
        self._members = {key: self._members.get(key) or new[key] for key in found}

    def _new(self, engine: Any) -> Member:
        behind = as_engine(engine)
        member = Member(f"{engine_name(engine)}-{next(self._numbers)}", engine, behind, self.silent)
        member.weight_version = self._initial_version
        return member


def engine_key(engine: Any) -> str:
    """What tells one engine from another; of several ranks, the same ranks in the same order are the same engine.

    Raises:
        MembershipError: It is an empty list.
    """
    return "+".join(rank_keys(engine))


def engine_name(engine: Any) -> str:
    """The first part of an engine's name; of several ranks, the class of the first."""
    while ranks := ranks_of(engine):
        engine = ranks[0]
    return cluster.actor_class_name(engine)


def as_engine(candidate: Any) -> RolloutEngine:
    """The engine behind whatever a user may pass as one: one object or actor, or a list of them, one a rank.

    Raises:
        TypeError: It is none.
        MembershipError: It is an empty list, or a rank is given twice.
    """
    if not isinstance(candidate, list | tuple):
        return as_rank(candidate)
    return as_rank(candidate[0]) if len(candidate) == 1 else EngineGroup(candidate)


def _refuse_shared_ranks(engines: Iterable[tuple[str, Any]]) -> None:
    """Refuse a rank that is in two engines.

    Args:
        engines: What an error calls each engine, and the engine.

    Raises:
        MembershipError: There is one; both places are named.
    """
    places: dict[str, str] = {}
    for name, engine in engines:
        keys = rank_keys(engine)
        for rank, key in enumerate(keys):
            place = f"rank {rank} of {name}" if ranks_of(engine) else name
            if (other := places.setdefault(key, place)) is not place:
                raise MembershipError(f"{place} is given twice: it is {other} too")
