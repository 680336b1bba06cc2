"""The groups that an SGLang engine is in: joined through a letter box, left without waiting for anyone.

SGLang's side of a group is one call that is answered once all have joined. It is made by a task of its own, which is
never cancelled: what ends it is the closing of the letter box.
"""

from __future__ import annotations

import asyncio
from typing import Any

from asyncsync.engines.sglang.calls import SGLangClient, SGLangError, SGLangUnreachableError
from asyncsync.errors import ConnectError
from asyncsync.messages import PROTOCOL_VERSION, Contacts, Rendezvous
from asyncsync.transports.letterbox import LetterBox

_FORM_TIMEOUT = 10.0  # seconds, once every member is known; it takes milliseconds
_LEAVE_TIMEOUT = 5.0  # seconds; SGLang gives up a group within 2 once its store is gone


class Membership:
    """An engine's place in one group.

    Args:
        client: Calls the engine.
        rendezvous: Which group, and as whom.
        ranks: How many ranks the engine has.

    Attributes:
        rendezvous: Which group, and as whom.
        joined: Whether it has joined.
    """

    def __init__(self, client: SGLangClient, rendezvous: Rendezvous, ranks: int) -> None:
        self._client = client
        self.rendezvous = rendezvous
        self._ranks = range(rendezvous.rank, rendezvous.rank + ranks)
        self._box: LetterBox | None = None
        self._joining: asyncio.Task[None] | None = None
        self.joined = False

    def __repr__(self) -> str:
        return f"<Membership {self.rendezvous.connection[:8]}: {'joined' if self.joined else 'joining'}>"

    async def open(self, address: str) -> Contacts:
        """Begin to join.

        Args:
            address: This node's, as the engine reaches it.

        Returns:
            How the engine's ranks are reached.

        Raises:
            ConnectError: The engine cannot join.
        """
        rendezvous = self.rendezvous
        if rendezvous.protocol != PROTOCOL_VERSION:
            raise ConnectError(
                f"this end speaks asyncsync protocol {PROTOCOL_VERSION}, the other {rendezvous.protocol}: "
                "install the same version of asyncsync at both"
            )
        if rendezvous.backend != "gloo":
            raise ConnectError("SGLang engines are reached over gloo only, so far: backend='gloo'")
        box = self._box = LetterBox(rendezvous.connection, address)
        joining = self._joining = asyncio.ensure_future(
            self._client.init_weights_update_group(
                address=address,
                port=box.port,
                rank_offset=rendezvous.rank,
                world_size=rendezvous.world_size,
                group_name=rendezvous.connection,
                backend=rendezvous.backend,
            )
        )
        joining.add_done_callback(_seen)
        collecting = asyncio.ensure_future(asyncio.to_thread(box.collect, self._ranks, rendezvous.join_timeout))
        collecting.add_done_callback(_seen)
        await asyncio.wait((joining, collecting), return_when=asyncio.FIRST_COMPLETED)
        if joining.done() and (error := joining.exception()) is not None:
            box.close()
            raise ConnectError(self._client.tell(error))
        return await collecting

    async def join(self, contacts: Contacts) -> None:
        """Collective. Join, told how all members are reached.

        Raises:
            ConnectError: The engine could not.
        """
        box, joining = self._box, self._joining
        assert box is not None
        assert joining is not None
        own = {f"0/{rank}" for rank in self._ranks}
        others = {contact: value for contact, value in contacts.items() if contact not in own}
        await asyncio.to_thread(box.deliver, others)
        try:
            async with asyncio.timeout(self.rendezvous.join_timeout + _FORM_TIMEOUT):
                await asyncio.shield(joining)
        except SGLangError as error:
            raise ConnectError(self._client.tell(error)) from error
        except TimeoutError as error:
            raise ConnectError("the engine did not join the group in time") from error
        self.joined = True

    def stands(self) -> None:
        """Note that bytes have come through it: now every rank is in it, and the letter box is not needed any more.

        Before that it may be: that the engine has joined is the word of its first rank alone.
        """
        if self._box is not None:
            self._box.close()

    async def leave(self) -> None:
        """Leave, joined or not. No error if the engine is not in the group any more, or cannot be reached.

        Raises:
            SGLangError: The engine would not.
        """
        if self._box is not None:
            self._box.close()
        if self._joining is None:
            return
        await asyncio.wait([self._joining], timeout=_LEAVE_TIMEOUT)
        self.joined = False
        if self._joining.done() and self._joining.exception() is not None:
            return  # it has never joined
        try:
            await self._client.destroy_weights_update_group(self.rendezvous.connection)
        except SGLangUnreachableError:
            pass
        except SGLangError as error:
            if "does not exist" not in error.message:
                raise


def _seen(done: asyncio.Future[Any]) -> None:
    if not done.cancelled():
        done.exception()
