"""Requests over HTTP that end in time and take no more bytes than is allowed.

The time-out of `requests` is between two bytes, and its answers have no bound: who is asked may
drip one a minute, or never stop. Here the time counts from the first byte that is sent to the
last one that comes, handshake and headers included.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Any, Final

import requests
from requests.adapters import HTTPAdapter
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import HTTPError
from urllib3.util.retry import Retry

# A query to a server that is there but busy is repeated; one to none fails soon.
_RETRY: Final = Retry(
    total=2, backoff_factor=0.2, status_forcelist=(429, 502, 503, 504), raise_on_status=False
)
_CHUNK_BYTES: Final = 1 << 16


class TooLargeError(Exception):
    """An answer has more bytes than are taken at once."""


class BoundedSession(requests.Session):
    """A session whose requests end `begin`'s seconds after it at the latest.

    Redirects are not followed: the login would go with them. What comes packed although nobody
    asked for that stays packed.

    Raises: requests' own errors, Timeout among them; TooLargeError.
    """

    def __init__(self, *, verify: bool) -> None:
        super().__init__()
        self.verify = verify
        self._adapter = _Adapter(self)
        self._timeout_s, self._max_bytes = 0.0, 0
        # What is open, as a double: whoever wraps a socket in TLS takes it away. It is one, for
        # requests come one by one and a connection is made where the one before is of no use.
        self._open: socket.socket | None = None
        self.is_over = False

    def begin(self, timeout_s: float, max_bytes: int) -> None:
        """Say how long the next request may take, and how large its answer may be."""
        self._timeout_s, self._max_bytes = timeout_s, max_bytes

    def get_adapter(self, url: str) -> Any:  # noqa: ANN401, ARG002 - as requests has it
        """Return the one adapter, whatever is mounted."""
        return self._adapter

    def opened(self, connection: socket.socket) -> None:
        """Remember a connection. Raises: TimeoutError if it comes too late."""
        if self.is_over:
            connection.close()
            raise TimeoutError
        self._forget()
        self._open = connection.dup()

    def request(self, *args: Any, **kwargs: Any) -> requests.Response:  # noqa: ANN401 - as is
        """Return the whole answer."""
        self.is_over = False
        timer = threading.Timer(self._timeout_s, self._end)
        timer.daemon = True
        timer.start()
        try:
            options = kwargs | {"stream": True, "allow_redirects": False}
            with super().request(*args, **options) as response:
                response._content = self._body(response)  # noqa: SLF001 - no other way in
        except (requests.RequestException, HTTPError, OSError) as cause:
            if self.is_over:
                raise requests.Timeout from cause
            if isinstance(cause, HTTPError):
                raise requests.ConnectionError from cause
            raise
        finally:
            timer.cancel()
        if self.is_over:  # an end that we made, read as the server's
            raise requests.Timeout
        return response

    def _body(self, response: requests.Response) -> bytes:
        body = bytearray()
        while part := response.raw.read1(_CHUNK_BYTES, decode_content=False):
            body += part
            if len(body) > self._max_bytes:
                raise TooLargeError
        return bytes(body)

    def _end(self) -> None:
        """End what is under way: whoever reads has come to the end."""
        self.is_over = True
        if self._open is not None:
            with suppress(OSError):
                self._open.shutdown(socket.SHUT_RDWR)

    def _forget(self) -> None:
        if self._open is not None:
            self._open.close()

    def close(self) -> None:
        """Close the connection."""
        super().close()
        self._adapter.close()
        self._forget()


class _Adapter(HTTPAdapter):
    """Tells the session of each connection before anything is sent over it."""

    def __init__(self, session: BoundedSession) -> None:
        self._pools = {
            scheme: _telling(pool, session)
            for scheme, pool in (("http", HTTPConnectionPool), ("https", HTTPSConnectionPool))
        }
        super().__init__(max_retries=_RETRY)

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - as is
        """Make connections that tell."""
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = self._pools

    def proxy_manager_for(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as is
        """Make connections to a proxy that tell."""
        manager = super().proxy_manager_for(*args, **kwargs)
        manager.pool_classes_by_scheme = self._pools
        return manager


def _telling(pool: Any, session: BoundedSession) -> Any:  # noqa: ANN401 - classes of urllib3
    """Return a pool whose connections tell the session when they are opened."""

    class Connection(pool.ConnectionCls):  # type: ignore[misc]  # a class that is a value
        def _new_conn(self) -> socket.socket:
            made: socket.socket = super()._new_conn()
            session.opened(made)
            return made

    return type(pool.__name__, (pool,), {"ConnectionCls": Connection})
