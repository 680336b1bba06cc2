"""Forming a group, as its conductor sees it: two rounds of calls to every end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from asyncsync.fanout import race
from asyncsync.messages import Contacts


@dataclass(frozen=True, slots=True)
class End:
    """One end of a group that is to be formed.

    Attributes:
        open: Begins to join, and says how this end is reached.
        join: Joins, told how all ends are reached.
    """

    open: Callable[[], Awaitable[Contacts]]
    join: Callable[[Contacts], Awaitable[None]]


async def form_group(ends: Mapping[object, End]) -> None:
    """Have every end open the group, then join it. The first failure ends it; then every end must be told to leave.

    Raises:
        Exception: What an end raised.
    """
    contacts: Contacts = {}
    for said in (await race({key: end.open() for key, end in ends.items()})).values():
        contacts |= said
    await race({key: end.join(contacts) for key, end in ends.items()})
