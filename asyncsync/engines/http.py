"""The one door to httpx: calls to an engine's HTTP server, whose every end is an answer or a clear error."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import httpx

_CONNECT_TIMEOUT = 5.0  # seconds
KEEP_ALIVE = 1.0
"""Seconds after which an idle connection is not used again: less than a server's own limit (vLLM's is 5), lest it hang
up in the moment of a call."""


class ServerUnreachableError(RuntimeError):
    """The server could not be called, or gave no answer: whether it did what was asked is not known."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server said.

    Attributes:
        status: The HTTP status.
        body: The JSON value, or the text if it is none.
    """

    status: int
    body: Any

    @property
    def fields(self) -> Mapping[str, Any]:
        """The body, if it is a JSON object."""
        return self.body if isinstance(self.body, dict) else {}


class HTTPServer:
    """An engine's HTTP server, called over connections of its own.

    Made without a running loop, used in one; close it with :meth:`aclose`.

    Args:
        url: Where it is, such as ``"http://10.0.0.7:30000"``.
        api_key: Sent as a bearer token.
        timeout: Seconds to wait for an answer, if the call does not say otherwise.
        transport: Instead of the network (an ``httpx.AsyncBaseTransport``).

    Attributes:
        url: Where it is.
        timeout: Seconds to wait for an answer.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout: float = 60.0, transport: Any = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"an engine's address begins with http:// or https://, not {url!r}")
        self.url = url.rstrip("/")
        self._api_key = api_key
        self.timeout = timeout
        self._transport = transport
        self._client: httpx.AsyncClient | None = None

    def __repr__(self) -> str:
        return f"<HTTPServer {self.url}>"  # never the key

    def own_address(self) -> str:
        """Of this machine's addresses, the one from which the server is reached.

        Raises:
            OSError: There is no way to it.
        """
        parts = urlsplit(self.url)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((parts.hostname, parts.port or 80))  # of a datagram socket: nothing is sent
            address: str = probe.getsockname()[0]
            return address

    async def call(
        self,
        method: str,
        path: str,
        *,
        json: object = None,
        params: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> Answer:
        """Send one request and wait for its answer, of whatever status.

        Never sent twice: most calls to an engine must not be. A cancelled call may go on at the server.

        Raises:
            ServerUnreachableError: No connection, no answer in time, or one that is no HTTP.
        """
        import httpx

        client = self._connected()
        limit = httpx.Timeout(self.timeout if timeout is None else timeout, connect=_CONNECT_TIMEOUT)
        try:
            response = await client.request(method, path, json=json, params=params, timeout=limit)
        except httpx.TimeoutException as error:
            seconds = limit.connect if isinstance(error, httpx.ConnectTimeout) else limit.read
            raise ServerUnreachableError(f"{method} {self.url}{path}: no answer in {seconds} s") from error
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise ServerUnreachableError(f"{method} {self.url}{path}: {reason}") from error
        try:
            return Answer(response.status_code, response.json())
        except ValueError:
            return Answer(response.status_code, response.text)

    async def aclose(self) -> None:
        """Close the connections; a later call opens new ones."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    def _connected(self) -> httpx.AsyncClient:
        if self._client is None:
            try:
                import httpx
            except ImportError as error:
                raise ImportError("engines that are HTTP servers need httpx: pip install httpx") from error
            self._client = httpx.AsyncClient(
                base_url=self.url,
                headers={"Authorization": f"Bearer {self._api_key}"} if self._api_key else None,
                limits=httpx.Limits(keepalive_expiry=KEEP_ALIVE),
                transport=self._transport,
                trust_env=False,  # a proxy for the internet has no business between a trainer and its engines
            )
        return self._client
