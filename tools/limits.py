"""Limits of our server: the time in which a request must arrive, and the size of its body."""

import asyncio
import json

from uvicorn.protocols.http.auto import AutoHTTPProtocol

BODY = 16 * 2**20  # most bytes of a request's body
SECONDS = 30.0  # for its headers, and again for its body


class Limits:
    """A part of the application that reads the body of a request, if it comes in time and is not too large."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        """Answer a request with the application, or with status 408 or 413."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        body, more, fault = bytearray(), True, None
        try:
            async with asyncio.timeout(SECONDS):
                while more and not fault:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    fault = (413, f"the body has more than {BODY} bytes") if len(body) > BODY else None
        except TimeoutError:
            fault = 408, f"the body did not arrive within {SECONDS:g} s"
        if fault:
            headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": fault[0], "headers": headers})
            return await send({"type": "http.response.body", "body": json.dumps({"detail": fault[1]}).encode()})
        whole = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def again():
            return whole.pop() if whole else await receive()

        return await self.app(scope, again, send)


class Impatient(AutoHTTPProtocol):
    """uvicorn's HTTP protocol, but the headers of a request must arrive within SECONDS."""

    half = None  # the timer of a request whose headers are not complete

    def connection_made(self, transport):
        """Begin to wait for a request."""
        super().connection_made(transport)
        self.watch()

    def data_received(self, data):
        """Take a part of a request."""
        super().data_received(data)
        self.watch()

    def connection_lost(self, exc):
        """Stop to wait."""
        super().connection_lost(exc)
        if self.half:
            self.half.cancel()

    def watch(self):
        """Start the timer of a request whose headers are not complete, or stop it."""
        waits = self.cycle is None or self.cycle.response_complete
        if waits and self.half is None:
            self.half = self.loop.call_later(SECONDS, self.transport.close)
        elif self.half and not waits:
            self.half.cancel()
            self.half = None
