"""ZMTP 3.1 (rfc.zeromq.org/spec/37) as a ROUTER speaks it, over asyncio's streams, without encryption.

libzmq bounds frames (ZMQ_MAXMSGSIZE) and counts whole messages (ZMQ_RCVHWM), so that a message that never ends grows in it without limit.
Here a message is bounded in frames, bytes and seconds while it is read, and all connections share one budget of bytes, of requests and of
answers that their clients have not read. Connections take turns: each has one message, or one command, handled at a time.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

MOST_FRAMES = 16
SMALL_BYTES = 256
"""A frame up to this size is read whatever the budget says: the answer that refuses a request needs its id."""
MESSAGE_WITHIN_S = 10.0
"""The longest time from the first byte of a message to its last, and for the greeting."""
UNREAD_BYTES = 16 * 2**20
"""The bytes of answers that a client may leave unread. Where there are more and another answer comes, its connection is cut; a single
answer may have any size.
"""
_MORE, _LONG, _COMMAND = 1, 2, 4
_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_GREETING = _SIGNATURE + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
_ASKING = (b"DEALER", b"REQ", b"ROUTER")
_CHUNK = 2**14
"""The bytes of a large frame that are read before they count as held; and those that a message may hold whatever its caller's others do."""


class Broken(Exception):
    """The peer does not speak as it must; its connection is cut."""


class ByteBudget:
    """Bytes that all requests of a door, and its answers that are unread, may hold together. `unread`: those of the latter. With a message
    of more than _CHUNK bytes a caller holds at most as many as are free, so that one caller never takes the room of all others;
    connections that have shown no known key are one caller, None.
    """

    def __init__(self, most: int) -> None:
        self.most, self.held, self.unread = most, 0, 0
        self._of: Counter[bytes | None] = Counter()
        """Caller -> the bytes that its requests hold."""

    @property
    def takes_no_more_unread(self) -> bool:
        """Whether unread answers take up more than half of all, so that requests find too little room."""
        return self.unread > self.most // 2

    def take(self, count: int, heard: "Heard") -> bool:
        """Take `count` more bytes for a message if there is room; returns whether they were taken."""
        if fits := self.held + count <= self.most and self._may_grow(heard, count):
            self._add(count, heard)
        return fits

    def pass_on(self, heard: "Heard", caller: bytes) -> bool:
        """Count a message as its caller's, once that is known; returns whether the caller may hold so much."""
        held = heard.held
        self._add(-held, heard)
        heard.caller = caller
        fits = self._may_grow(heard, held)
        self._add(held, heard)
        return fits

    def give(self, count: int, caller: bytes | None) -> None:
        """What a caller's message has held is free again."""
        self.held -= count
        self._of[caller] -= count
        if not self._of[caller]:
            del self._of[caller]

    def _may_grow(self, heard: "Heard", count: int) -> bool:
        """Whether the caller may hold `count` bytes more with this message, of what was free before it came."""
        free = self.most - self.held + heard.held
        return heard.held + count <= _CHUNK or self._of[heard.caller] + count <= free

    def _add(self, count: int, heard: "Heard") -> None:
        self.give(-count, heard.caller)
        heard.held += count


@dataclass(slots=True)
class Heard:
    """A message. `caller`: under which it counts in the budget; `held`: its bytes there, for its receiver to give back; `whole`: whether
    the budget had room for all of it.
    """

    caller: bytes | None = None
    frames: list[bytes] = field(default_factory=list)
    size: int = 0
    held: int = 0
    whole: bool = True


class Peer:
    """The connection of one client. What breaks the protocol or a bound raises Broken, TimeoutError or EOFError."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, budget: ByteBudget, most_bytes: int) -> None:
        self._reader, self._writer, self._budget, self._most_bytes = reader, writer, budget, most_bytes
        self.caller: bytes | None = None
        """Of the last request with a known key. A client that has sent one is heard while answers to it are unread."""
        self.silent = False
        """Whether the client is between two messages."""
        self.unread, self.unread_since = 0, 0.0
        """Bytes of answers that wait for the client to read them, as the budget counts them, and since when it was seen to read none."""
        self._was_cut = False
        self._draining: asyncio.Task[None] | None = None
        writer.transport.set_write_buffer_limits(0)  # so that `drain` waits for all to be read

    @property
    def known(self) -> bool:
        """Whether the client has sent a known key."""
        return self.caller is not None

    @property
    def gone(self) -> bool:
        return self._writer.is_closing()

    async def greet(self) -> None:
        """Carry out ZMTP's handshake with a socket that sends requests."""
        self._writer.write(_GREETING)
        async with asyncio.timeout(MESSAGE_WITHIN_S):
            greeting = await self._reader.readexactly(len(_GREETING))
            if greeting[0] != 0xFF or greeting[9] != 0x7F or greeting[10] < 3 or greeting[12:32] != _GREETING[12:32]:
                raise Broken("it does not speak ZMTP 3 with the mechanism NULL")
            flags, size = await self._head(await self._reader.readexactly(1))
            kind = _socket_type(await self._reader.readexactly(size)) if flags & _COMMAND and size <= _CHUNK else b""
        if kind not in _ASKING:
            raise Broken(f"its socket is of type {kind[:20]!r}; connect a DEALER or a REQ")
        self._writer.write(_command(b"READY", _property(b"Socket-Type", b"ROUTER") + _property(b"Identity", b"")))

    async def message(self) -> Heard:
        """The next message; the part of it for which the budget has no room is read and dropped."""
        heard = Heard(self.caller)
        await self._next_turn()
        try:
            while not heard.frames:  # commands may come before it
                self.silent = True
                first = await self._reader.readexactly(1)
                self.silent = False
                async with asyncio.timeout(MESSAGE_WITHIN_S):
                    while await self._goes_on(heard, first):
                        first = await self._reader.readexactly(1)
        except BaseException:
            self._budget.give(heard.held, heard.caller)
            raise
        return heard

    def send(self, frames: Sequence[bytes]) -> None:
        """Send an answer; it is dropped where the client has left."""
        self._write(b"".join(_framed(_MORE * (position < len(frames)), frame) for position, frame in enumerate(frames, 1)))

    def cut(self) -> None:
        """End the connection at once."""
        self._was_cut = True
        self._writer.transport.abort()
        self.count_unread()

    def count_unread(self) -> int:
        """Count what is unread now in the budget: nothing of a cut connection, of which uvloop still tells the old size."""
        unread = 0 if self._was_cut else self._writer.transport.get_write_buffer_size()
        if unread < self.unread or not self.unread:
            self.unread_since = asyncio.get_running_loop().time()
        self._budget.held += unread - self.unread
        self._budget.unread += unread - self.unread
        self.unread = unread
        return unread

    async def close(self, within_s: float = 0.0) -> None:
        """Cut the connection once all that was sent has left, after `within_s` at the latest."""
        self._writer.close()
        try:
            async with asyncio.timeout(within_s):
                await self._writer.wait_closed()
        except (OSError, TimeoutError):
            self.cut()

    async def _goes_on(self, heard: Heard, first: bytes) -> bool:
        """Read one frame; returns whether the message goes on after it."""
        flags, size = await self._head(first)
        heard.size += size
        if heard.size > self._most_bytes or len(heard.frames) == MOST_FRAMES:
            raise Broken(f"a message has more than {self._most_bytes} bytes or {MOST_FRAMES} frames")
        if flags & _COMMAND:
            self._obey(await self._reader.readexactly(min(size, SMALL_BYTES)), size)
            await self._next_turn()
            heard.size = heard.size if heard.frames else 0  # heartbeats before a message are none of it
            return bool(heard.frames)
        heard.frames.append(await (self._large(heard, size) if size > SMALL_BYTES else self._reader.readexactly(size)))
        return bool(flags & _MORE)

    async def _head(self, flags: bytes) -> tuple[int, int]:
        """A frame's flags and size."""
        if flags[0] & ~(_MORE | _LONG | _COMMAND):
            raise Broken(f"a frame has the flags {flags[0]:#x}")
        return flags[0], int.from_bytes(await self._reader.readexactly(8 if flags[0] & _LONG else 1))

    async def _large(self, heard: Heard, size: int) -> bytes:
        """A large frame, counted as held part by part as it comes: bytes that are only announced take no room from others. A part that
        does not fit is read all the same, and dropped with the rest of the frame.
        """
        before, parts = heard.held, list[bytes]()
        for start in range(0, size, _CHUNK):
            part = await self._reader.readexactly(min(size - start, _CHUNK))
            if heard.whole and self._budget.take(len(part), heard):
                parts.append(part)
            elif heard.whole:
                self._budget.give(heard.held - before, heard.caller)
                heard.held, heard.whole = before, False
                parts.clear()
        return b"".join(parts)

    async def _next_turn(self) -> None:
        """Let other connections have their turns: reading what has arrived already suspends no task. A client that has shown no known key
        has its next turn once it has read its answers.
        """
        await (asyncio.sleep(0) if self.known or not self.unread else self._writer.drain())

    def _obey(self, command: bytes, size: int) -> None:
        """Act on a command: PING is answered, others mean nothing to a ROUTER."""
        if size > SMALL_BYTES:
            raise Broken(f"a command has {size} bytes")
        if command.startswith(b"\x04PING"):
            self._write(_command(b"PONG", command[7 : 7 + 16]))

    def _write(self, data: bytes) -> None:
        """Send bytes. A client that reads nothing has its connection cut, by what was unread before: no client has read these yet."""
        if self.gone:
            return
        if self.count_unread() > UNREAD_BYTES:
            self.cut()
            return
        self._writer.write(data)
        if self.count_unread() and self._draining is None:
            self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        """Give the bytes of unread answers back to the budget once they are read, or the connection has ended."""
        try:
            while self.count_unread():
                await self._writer.drain()
        except OSError:  # the connection has ended
            self.cut()
        finally:
            self._draining = None


def _socket_type(ready: bytes) -> bytes:
    """The socket type in a READY command; b"" where the bytes are no READY command."""
    rest = ready.removeprefix(b"\x05READY")
    while rest and rest != ready:
        name_size = rest[0]
        name, rest = rest[1 : 1 + name_size], rest[1 + name_size :]
        value_size = int.from_bytes(rest[:4])
        value, rest = rest[4 : 4 + value_size], rest[4 + value_size :]
        if name.lower() == b"socket-type":
            return value
    return b""


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + len(value).to_bytes(4) + value


def _command(name: bytes, data: bytes) -> bytes:
    return _framed(_COMMAND, bytes([len(name)]) + name + data)


def _framed(flags: int, body: bytes) -> bytes:
    long = len(body) > 255
    return bytes([flags | _LONG * long]) + len(body).to_bytes(8 if long else 1) + body
