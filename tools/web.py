"""Requests to servers that others run: limited in time and size, without redirects and cookies.

    session = session_for("http://host:8000/retrieve")
    status, body = exchange(session.post, "http://host:8000/retrieve", seconds=10, json={"queries": ["Ada"]})

A timeout of `requests` limits the wait for a single packet, so a server that sends a byte now and then is waited for
without end. Here a timer shuts the connection when the time is over, whatever the server sends: headers or a body.
"""

import contextlib
import ipaddress
import json
import logging
import socket
import threading
from collections.abc import Callable
from http.client import HTTPException
from http.cookiejar import DefaultCookiePolicy
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import HTTPError, InvalidHeader

LIMIT = 16 * 2**20  # most bytes of an answer's body, after its compression is undone
VALUES = 400_000  # most values in an answer: as Python objects, small ones take many times their bytes
PIECE = 2**16  # bytes read at a time
logging.getLogger("urllib3").setLevel(logging.ERROR)  # its warnings quote an answer's headers with a traceback


class Absent(Exception):
    """A request that reached no server. dropped: the connection ended before an answer, as an idle one may."""

    def __init__(self, message: str, dropped: bool = False):
        super().__init__(message)
        self.dropped = dropped


class Late(Exception):
    """A request whose answer was not complete in time."""


class Wrong(Exception):
    """An answer that is not HTTP, ends early, or is too large."""


class _Watch:
    """The time limit of a request: shuts the request's connection when the time is over."""

    def __init__(self, seconds):
        self.late, self.socket = False, None
        self.timer = threading.Timer(seconds, self.shut)
        self.timer.daemon = True

    def shut(self):
        self.late = True
        if self.socket is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(self.socket, socket.SHUT_RDWR)  # under TLS too: the plain socket's method

    def hold(self, connection):
        self.socket = connection
        if self.late:
            self.shut()


_current = threading.local()  # watch: that of the thread's request


class _Watched:
    def getresponse(self, *args, **options):
        if watch := getattr(_current, "watch", None):
            watch.hold(self.sock)
        return super().getresponse(*args, **options)


class _Http(_Watched, HTTPConnection):
    pass


class _Https(_Watched, HTTPSConnection):
    pass


class _HttpPool(HTTPConnectionPool):
    ConnectionCls = _Http


class _HttpsPool(HTTPSConnectionPool):
    ConnectionCls = _Https


class _Adapter(HTTPAdapter):
    def init_poolmanager(self, *args, **options):
        super().init_poolmanager(*args, **options)
        self.poolmanager.pool_classes_by_scheme = {"http": _HttpPool, "https": _HttpsPool}

    def proxy_manager_for(self, *args, **options):
        manager = super().proxy_manager_for(*args, **options)
        manager.pool_classes_by_scheme = {"http": _HttpPool, "https": _HttpsPool}
        return manager


class _Session(requests.Session):
    def get_redirect_target(self, resp):
        """Return None: no redirect is followed. With allow_redirects=False alone the whole body would be read."""


def session_for(address: str, connections: int = 10) -> requests.Session:
    """Return a session that keeps up to `connections` connections. It uses no proxy to reach this machine."""
    session = _Session()
    for scheme in ("http://", "https://"):
        session.mount(scheme, _Adapter(pool_maxsize=connections))
    session.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))
    if _is_here(urlsplit(address).hostname):
        session.trust_env = False
    session.headers["Accept-Encoding"] = "gzip, deflate"
    return session


def exchange(send: Callable, address: str, seconds: float, **options) -> tuple[int, bytes, str]:
    """Return (status, body, address of a redirect or "") of the answer to send(address, ...), a method of a session.

    Raises Absent, Late after `seconds`, or Wrong.
    """
    _current.watch = watch = _Watch(seconds)
    watch.timer.start()
    answer, body = None, bytearray()
    try:
        with send(address, timeout=seconds, stream=True, allow_redirects=False, **options) as answer:
            # raw.read, not iter_content: that one keeps the line with the size of a chunk, however long it is
            while (piece := answer.raw.read(PIECE, decode_content=True)) and not watch.late:
                body += piece
                if len(body) > LIMIT:
                    raise Wrong(f"more than {LIMIT / 2**20:g} MiB")
    except requests.ConnectTimeout:
        raise Absent(f"no connection within {seconds:g} s") from None
    except (requests.RequestException, HTTPError, HTTPException, OSError, ValueError) as error:
        if watch.late or "timed out" in str(error):
            raise Late(f"no answer within {seconds:g} s") from None
        cause = _innermost(error)
        reason = clean(getattr(cause, "strerror", None) or str(cause) or type(cause).__name__)
        reason = reason[:1].lower() + reason[1:]
        # Such as a bad URL. urllib3 has an InvalidHeader of an answer, which requests raises as one of a request.
        unsent = isinstance(error, requests.RequestException) and isinstance(error, ValueError)
        unsent = unsent and not isinstance(cause, InvalidHeader)
        if answer is None and (unsent or isinstance(cause, OSError)):
            raise Absent(reason, dropped=isinstance(cause, (ConnectionResetError, BrokenPipeError))) from None
        raise Wrong(f"an answer that breaks off or is not HTTP ({reason})") from None
    finally:
        watch.timer.cancel()
        watch.timer.join()
        _current.watch = None
    if watch.late:
        raise Late(f"no answer within {seconds:g} s")
    return answer.status_code, bytes(body), answer.headers.get("Location", "") if answer.is_redirect else ""


def parsed(body: bytes) -> object:
    """Return the value of a JSON text. Raises ValueError or RecursionError if it is none or would fill the memory."""
    if sum(body.count(sign) for sign in (b",", b"[", b"{", b":")) > VALUES:
        raise ValueError("too many values")
    return json.loads(body)


def clean(text: str | bytes, length: int = 200) -> str:
    """Return the start of a server's text on one line for a terminal, without control characters."""
    text = text[:2000].decode("utf-8", "replace") if isinstance(text, bytes) else text[:2000]
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))[:length]


def _is_here(host):
    try:
        address = ipaddress.ip_address(host)
        return address.is_loopback or address.is_unspecified
    except ValueError:
        return host == "localhost"


def _innermost(error):
    while below := error.__cause__ or error.__context__:
        error = below
    return error
