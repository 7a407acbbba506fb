"""The ROUTER on the event loop.

    readable ─> at most TURN messages ─> answered, or a task per request ─> outboxes ─> one flush a turn of the loop

A plain socket and its file descriptor serve here rather than zmq.asyncio: a send is then a call, not a future, and all
answers that one step of the engine makes for a client leave together.

Whoever goes away is noticed by the socket's monitor (a closed connection, or one whose heartbeats stopped); then a
heartbeat message to each client with requests in flight tells which of them cannot be reached, and its requests are
aborted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

import zmq
from zmq.utils.monitor import parse_monitor_message

from glm_runtime.gateway import keys
from glm_runtime.gateway.answer import Answer
from glm_runtime.gateway.counters import Counters
from glm_runtime.gateway.flags import GONE_AFTER, Settings
from glm_runtime.gateway.listen import Listener
from glm_runtime.gateway.protocol import (
    ENCODERS,
    TAG,
    VERSION,
    Abort,
    Bad,
    Generate,
    Hello,
    Message,
    Ping,
    Policy,
    Stats,
    error,
    read,
)
from glm_runtime.gateway.session import Live, Session

logger = logging.getLogger(__name__)

TURN = 32  # messages read before others get their turn
SEND_HWM = 32  # messages of a client that ZeroMQ itself holds; what is more waits here, where deltas can join
RECEIVE_HWM = 64  # messages of a client that wait unread; then its connection is not read any more
RETRY_S = 0.01  # between attempts at a client whose connection is full
SWEEP_S = 0.25
PROBES_S = (0.0, 0.005, 0.05, 0.25)  # after a connection closed: ZeroMQ learns of it a little later than the monitor
LINGER_MS = 500
HANDSHAKE_MS = 5000
ZAP_DOMAIN = "glm_runtime"
HEARTBEAT = {"type": "heartbeat"}
MONITORED = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Engine(Protocol):
    """What the gateway asks of the runtime behind it."""

    cumulative: bool  # whether outputs hold everything so far

    @property
    def draining(self) -> bool:
        """Whether the server is about to end and takes no new requests."""

    def generate(self, ask: Generate, rid: str) -> AsyncIterator[Mapping[str, Any]]:
        """SGLang's outputs. Closing it aborts the request. Raises Bad for what cannot be served."""

    async def policy(self) -> Any:
        """As GET /policy."""

    def facts(self) -> Mapping[str, Any]:
        """Model and runtime, for `hello`."""


class Gateway:
    """One ROUTER over all endpoints.

    Args:
        engine: what answers. settings: limits. listeners: bound endpoints; handed over by `start`.
        metrics: whether to register Prometheus metrics.
    """

    def __init__(
        self, engine: Engine, settings: Settings, listeners: Sequence[Listener], metrics: bool = False
    ) -> None:
        self.engine, self.settings, self.listeners = engine, settings, list(listeners)
        self.counters = Counters(metrics)
        self.sessions: dict[bytes, Session] = {}
        self._session_nonce = secrets.token_hex(8)
        # NOTE: SGLang's scheduler aborts every request whose id begins with the given one: ids here are random in
        # front and of one length, so none is the beginning of another, of this front or of any other.
        self._rid_head, self._rid_next = f"~zmq-{secrets.token_hex(8)}-", 0
        self._dirty: set[Session] = set()
        self._flush_due = False
        self._blocked: set[Session] = set()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._policy: asyncio.Task[Any] | None = None
        self._gone_somewhere = False
        self._secure = settings.secret_key_file is not None
        self._authenticator: Any = None
        self.closed = False

    # ---- life ----

    async def start(self) -> None:
        """Take the listeners over and serve. Raises zmq.ZMQError where ZeroMQ will not have one."""
        self.loop = asyncio.get_running_loop()
        self.context = zmq.Context()
        try:
            self._open()
        except BaseException:
            self.context.destroy(linger=0)  # else it would wait for its sockets, for ever
            raise
        self.loop.add_reader(self.socket.fileno(), self._readable)
        self.loop.add_reader(self.monitor.fileno(), self._watched)
        self._after("sweep", SWEEP_S, self._sweep)
        self.loop.call_soon(self._readable)
        where = ", ".join(
            listener.endpoint.text + (" (CURVE)" if self._secure and not listener.endpoint.own else "")
            for listener in self.listeners
        )
        logger.info("glm_runtime: ZMQ gateway on %s", where)

    def _open(self) -> None:
        """The sockets, bound."""
        if self._secure:
            self._authenticator = self._authenticate()
        self.socket = self._router()
        self.monitor = self.socket.get_monitor_socket(MONITORED)
        for listener in sorted(self.listeners, key=lambda listener: not listener.endpoint.own):
            if self._secure and not listener.endpoint.own:
                self._demand_curve()
            self.socket.setsockopt(zmq.USE_FD, listener.hand_over())
            self.socket.bind(listener.endpoint.text)

    def _router(self) -> zmq.Socket[bytes]:
        made = self.context.socket(zmq.ROUTER)
        beat = int(self.settings.heartbeat_s * 1000)
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),  # a send to somebody gone is an error, not silence
            (zmq.ROUTER_HANDOVER, 1),  # peers that name themselves are refused; each of them hears so
            (zmq.SNDHWM, SEND_HWM),
            (zmq.RCVHWM, RECEIVE_HWM),
            (zmq.LINGER, LINGER_MS),
            (zmq.MAXMSGSIZE, 2 * self.settings.max_message),  # beyond it ZeroMQ closes the connection itself
            (zmq.HANDSHAKE_IVL, HANDSHAKE_MS),
            (zmq.HEARTBEAT_IVL, beat),
            (zmq.HEARTBEAT_TIMEOUT, GONE_AFTER * beat),
            (zmq.IPV6, int(any(":" in listener.endpoint.host for listener in self.listeners))),
        ):
            made.setsockopt(option, value)
        return made

    def _demand_curve(self) -> None:
        """Endpoints bound from here on demand CURVE; ZeroMQ copies a socket's options when it binds."""
        file = str(self.settings.secret_key_file)
        public, secret = keys.load_secret(file, "--zmq-curve-secret-key-file")
        self.socket.curve_publickey, self.socket.curve_secretkey, self.socket.curve_server = public, secret, True
        self.socket.zap_domain = ZAP_DOMAIN.encode()

    def _authenticate(self) -> Any:
        from zmq.auth.asyncio import AsyncioAuthenticator

        made = AsyncioAuthenticator(self.context)
        made.start()
        made.configure_curve(domain=ZAP_DOMAIN, location=str(self.settings.authorized_keys))
        return made

    async def close(self) -> None:
        """End every request with an error, send what waits, and release the endpoints."""
        self.closed = True
        for session in list(self.sessions.values()):
            for live in list(session.live.values()):
                self._end(session, live, error(live.ask.id, "shutting_down", "the server is ending"))
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._flush()
        for timer in self._timers.values():
            timer.cancel()
        self.loop.remove_reader(self.socket.fileno())
        self.loop.remove_reader(self.monitor.fileno())
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        await asyncio.to_thread(self.context.term)
        for listener in self.listeners:
            listener.close()

    def _after(self, name: str, seconds: float, call: Any) -> None:
        """Call once later; a pending call of that name stands."""

        def run() -> None:
            del self._timers[name]
            call()

        if name not in self._timers and not self.closed:
            self._timers[name] = self.loop.call_later(seconds, run)

    # ---- in ----

    def _readable(self) -> None:
        """The descriptor says so only once: read until nothing is left, in turns."""
        for _ in range(TURN):
            if self.closed:
                return
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.counters.count("messages_in")
            try:
                self._message(frames)
            except Exception:  # a fault of ours with one message ends neither the loop nor the others
                logger.exception("glm_runtime: a ZMQ message failed")
        self.loop.call_soon(self._readable)

    def _message(self, frames: list[bytes]) -> None:
        identity = frames[0]
        if not identity.startswith(b"\0"):
            refusal = error(None, "routing_id", "leave the socket's routing id unset: the server names its clients")
            return self._raw(identity, refusal)
        session = self.sessions.get(identity)
        if session is None:
            if len(self.sessions) >= self.settings.max_clients:
                text = f"the server has {len(self.sessions)} clients, as many as it takes; come back later"
                self._gone_somewhere = True
                return self._raw(identity, error(None, "overloaded", text, "--zmq-max-clients", len(self.sessions)))
            session = self.sessions[identity] = Session(identity, self.settings.client_buffer, self.loop.time())
        session.heard = self.loop.time()
        if session.muted or session.full:
            return self._discard(session)
        try:
            request = self._read(session, frames)
        except Bad as bad:
            return self._refuse(session, bad)
        self._handle(session, request)

    def _read(self, session: Session, frames: list[bytes]) -> Any:
        if len(frames) != 3:
            hint = "; a REQ socket adds a frame, use DEALER" if len(frames) > 1 and not frames[1] else ""
            raise Bad("malformed", f"2 frames are needed, version and message, not {len(frames) - 1}{hint}")
        if frames[1] != TAG:
            raise Bad("version", f"frame 1 is not {TAG.decode()}, the version spoken here")
        if len(frames[2]) > self.settings.max_message:
            text = f"a message of {len(frames[2])} bytes; {self.settings.max_message} is the limit"
            raise Bad("too_large", text, "--zmq-max-message-mb", len(frames[2]), self.settings.max_message)
        return read(frames[2], session.encoding)

    def _refuse(self, session: Session, bad: Bad) -> None:
        if bad.code in ("malformed", "version", "too_large"):
            session.strikes += 1
            if session.muted:
                text = f"{session.strikes} malformed messages: nothing more of this connection is read"
                bad = Bad("muted", text)
        if bad.id in session.live:
            bad.id = None  # the request of that id goes on; this message ends nothing
        self.counters.refuse(bad.code)
        if bad.id is not None:
            self.counters.end("error")
        self._put(session, bad.message())

    def _discard(self, session: Session) -> None:
        session.discarded += 1
        self.counters.count("discarded")

    def _handle(self, session: Session, request: Any) -> None:
        if isinstance(request, Generate):
            try:
                self._generate(session, request)
            except Bad as bad:
                self._refuse(session, bad)
        elif isinstance(request, Ping):
            self._put(session, {"type": "pong", "id": request.id, "session": self._name(session)})
        elif isinstance(request, Hello):
            self._hello(session, request)
        elif isinstance(request, Abort):
            live = session.live.get(request.target)
            answer = {"type": "abort", "id": request.id, "target": request.target, "found": live is not None}
            self._put(session, answer)
            if live is not None:
                self._end(session, live, live.answer.aborted("aborted by its client"))
        elif isinstance(request, Stats):
            self._put(session, {"type": "stats", "id": request.id} | self.stats())
        elif isinstance(request, Policy):
            self._spawn(self._answer_policy(session, request.id))

    def _name(self, session: Session) -> str:
        return f"{self._session_nonce}-{session.identity.hex()}"

    def _hello(self, session: Session, request: Hello) -> None:
        if session.live and request.encoding != session.encoding:
            text = "encoding: it changes only while no request is in flight"
            return self._refuse(session, Bad("bad_request", text, "encoding", request.encoding, session.encoding))
        answer = {
            "type": "hello",
            "id": request.id,
            "version": VERSION,
            "session": self._name(session),
            "encoding": request.encoding,
            "batch": request.batch,
            "limits": self.settings.limits(),
            **self.engine.facts(),
        }
        session.put_encoded(ENCODERS[session.encoding](answer))  # in the encoding spoken so far
        self._wake(session)
        session.encoding, session.batch, session.heartbeat_s = request.encoding, request.batch, request.heartbeat_s

    async def _answer_policy(self, session: Session, id: str) -> None:
        """One question to the scheduler at a time, whoever asks."""
        if self._policy is None or self._policy.done():
            self._policy = self.loop.create_task(self.engine.policy())  # type: ignore[arg-type]
        try:
            self._put(session, {"type": "policy", "id": id, "policy": await asyncio.shield(self._policy)})
        except Exception as problem:
            self._refuse(session, Bad("engine", f"{type(problem).__name__}: {problem}"))

    def stats(self) -> dict[str, Any]:
        """Counters and what is in flight now."""
        return {
            "clients": len(self.sessions),
            "in_flight": sum(len(session.live) for session in self.sessions.values()),
            "waiting_bytes": sum(session.waiting for session in self.sessions.values()),
            **self.counters.as_dict(),
        }

    # ---- requests ----

    def _generate(self, session: Session, ask: Generate) -> None:
        if ask.id in session.live:
            raise Bad("duplicate_id", "id: a request of this id is in flight", "id", ask.id)
        if self.engine.draining or self.closed:
            raise Bad("shutting_down", "the server is ending; it takes no new request", id=ask.id)
        most = self.settings.max_requests
        if len(session.live) >= most:
            text = f"{most} requests are in flight, as many as one client may have"
            raise Bad("overloaded", text, "--zmq-max-requests", len(session.live) + 1, most, ask.id)
        n = ask.sampling_params.get("n")
        n = n if type(n) is int and 1 < n <= 1024 else 1
        self._rid_next += 1
        answer = Answer(ask.id, ask.stream, n, self.engine.cumulative)
        live = Live(ask, f"{self._rid_head}{self._rid_next:012x}", answer)
        session.live[ask.id] = live
        live.task = self._spawn(self._run(session, live))

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _run(self, session: Session, live: Live) -> None:
        """One request from its start to its terminal message."""
        outputs = self.engine.generate(live.ask, live.rid)
        try:
            async for out in outputs:
                for message in live.answer.take(out):
                    if message["type"] == "delta":
                        self._delta(session, live, message)
                    else:
                        self._end(session, live, message)
                if live.ended:
                    return
            self._end(session, live, error(live.ask.id, "internal", "the engine ended the request without a result"))
        except Bad as bad:
            bad.id = live.ask.id
            self._end(session, live, bad.message())
        except asyncio.CancelledError:
            self._end(session, live, live.answer.aborted("aborted by the server"))
        except Exception as problem:
            logger.exception("glm_runtime: a ZMQ request failed")
            self._end(session, live, error(live.ask.id, "internal", f"{type(problem).__name__}: {problem}"))
        finally:
            await outputs.aclose()  # type: ignore[attr-defined]

    def _delta(self, session: Session, live: Live, message: Message) -> None:
        if live.ended:
            return
        self._put(session, message, live)
        if session.full:
            text = f"{session.waiting} bytes wait for this client, which does not read; its stream is ended"
            bad = Bad("client_too_slow", text, "--zmq-client-buffer-mb", session.waiting, session.limit, live.ask.id)
            self._end(session, live, bad.message())

    def _end(self, session: Session, live: Live, terminal: Message) -> None:
        """The one terminal message of a request; what the engine still makes is not sent."""
        if live.ended:
            return
        live.ended = True
        if session.live.get(live.ask.id) is live:
            del session.live[live.ask.id]
        self.counters.end(terminal["type"])
        if terminal["type"] == "error":
            self.counters.refuse(terminal["code"])
        if live.task is not None and live.task is not asyncio.current_task():
            live.task.cancel()
        self._put(session, terminal)

    # ---- out ----

    def _put(self, session: Session, message: Message, live: Live | None = None) -> None:
        session.put(message, live)
        self._wake(session)

    def _wake(self, session: Session) -> None:
        """Have its outbox sent at the end of this turn of the loop."""
        if not session.blocked:
            self._dirty.add(session)
            if not self._flush_due:
                self._flush_due = True
                self.loop.call_soon(self._flush)

    def _raw(self, identity: bytes, message: Message) -> None:
        """Answer somebody who has no session; if that does not go out at once, it does not matter."""
        self.counters.refuse(message["code"])
        with contextlib.suppress(zmq.ZMQError):
            self.socket.send_multipart([identity, TAG, ENCODERS["json"](message)], zmq.NOBLOCK)

    def _flush(self) -> None:
        self._flush_due = False
        dirty, self._dirty = self._dirty, set()
        for session in dirty:
            self._send(session)
        # NOTE: a send can swallow the descriptor's sign that something came in.
        if not self.closed and int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self.loop.call_soon(self._readable)

    def _send(self, session: Session) -> None:
        while session.outbox:
            frame, count = session.next()
            try:
                self.socket.send_multipart([session.identity, TAG, frame], zmq.NOBLOCK)
            except zmq.Again:
                session.blocked = True
                self._blocked.add(session)
                return self._after("retry", RETRY_S, self._retry)
            except zmq.ZMQError:
                return self._gone(session)
            session.sent(count)
            self.counters.count("messages_out", count)
        session.blocked = False
        self._blocked.discard(session)
        if session.discarded:
            count, session.discarded = session.discarded, 0
            why = "too many malformed ones came before" if session.muted else "answers waited that were not read"
            text = f"{count} messages of this client were discarded unread: {why}"
            if not session.muted:
                self._put(session, error(None, "overloaded", text, "--zmq-client-buffer-mb", count, session.limit))

    def _retry(self) -> None:
        for session in list(self._blocked):
            self._send(session)
        if self._blocked:
            self._after("retry", RETRY_S, self._retry)

    # ---- who has gone ----

    def _watched(self) -> None:
        while not self.closed:
            try:
                event = parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            if event["event"] == zmq.EVENT_DISCONNECTED:
                for seconds in PROBES_S:
                    self._after(f"probe {seconds}", seconds, self._probe)
                self._gone_somewhere = True
            else:
                self.counters.count("handshakes_refused")

    def _probe(self, idle: bool = False) -> None:
        """Say something to every client with a request in flight (or to all): who cannot be reached has gone."""
        for session in list(self.sessions.values()):
            if (idle or session.live) and not session.blocked:
                heartbeat = ENCODERS[session.encoding](HEARTBEAT)
                try:
                    self.socket.send_multipart([session.identity, TAG, heartbeat], zmq.NOBLOCK)
                except zmq.Again:
                    continue
                except zmq.ZMQError:
                    self._gone(session)
        self.loop.call_soon(self._readable)

    def _sweep(self) -> None:
        self._watched()
        now = self.loop.time()
        for session in list(self.sessions.values()):
            promise = session.heartbeat_s
            if promise is not None and session.live and now - session.heard > GONE_AFTER * promise:
                reason = f"no sign of its client for {now - session.heard:.1f} s"
                for live in list(session.live.values()):
                    self._end(session, live, live.answer.aborted(reason))
        if self._gone_somewhere:
            self._gone_somewhere = False
            self._probe(idle=True)
        in_flight = sum(len(session.live) for session in self.sessions.values())
        self.counters.now(len(self.sessions), in_flight)
        self.loop.call_soon(self._readable)
        self._after("sweep", SWEEP_S, self._sweep)

    def _gone(self, session: Session) -> None:
        """Abort what a client has in flight and forget it."""
        if self.sessions.get(session.identity) is session:
            del self.sessions[session.identity]
        self._blocked.discard(session)
        self._dirty.discard(session)
        if session.live:
            self.counters.count("vanished")
        for live in list(session.live.values()):
            self._end(session, live, live.answer.aborted("its client has gone"))
        self._dirty.discard(session)
        session.outbox.clear()
        session.blocked = True
