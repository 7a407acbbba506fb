"""Counters of the gateway: in `stats`, and on GET /metrics with --enable-metrics.

    glm_runtime:zmq_requests_total{end="done"|"error"|"aborted"}   requests by their terminal message
    glm_runtime:zmq_refused_total{code=...}                        messages refused, by the error's code
    glm_runtime:zmq_vanished_total                                 clients that went away with requests in flight
    glm_runtime:zmq_handshakes_refused_total                       connections that did not speak ZMTP, or lacked a key
    glm_runtime:zmq_discarded_total                                messages discarded unread, and told so
    glm_runtime:zmq_clients, glm_runtime:zmq_requests_in_flight    now

No `sglang` import; `prometheus_client` is imported when the metrics are made.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

PREFIX = "glm_runtime:zmq_"
SINGLE = ("vanished", "handshakes_refused", "discarded", "messages_in", "messages_out")


class Counters:
    """Counts of one gateway.

    Args:
        metrics: whether Prometheus is served. registry: where to register; None: prometheus_client's own.
    """

    def __init__(self, metrics: bool = False, registry: Any = None) -> None:
        self.counts: Counter[str] = Counter({name: 0 for name in SINGLE})
        self.ends: Counter[str] = Counter(done=0, error=0, aborted=0)
        self.refused: Counter[str] = Counter()
        self._made: dict[str, Any] = {}
        if metrics:
            self._register(registry)

    def _register(self, registry: Any) -> None:
        from prometheus_client import REGISTRY, Gauge
        from prometheus_client import Counter as Total

        registry = REGISTRY if registry is None else registry

        def total(name: str, text: str, *labels: str) -> None:
            self._made[name] = Total(f"{PREFIX}{name}_total", text, labels, registry=registry)

        total("requests", "Requests by their terminal message.", "end")
        total("refused", "Messages refused, by the error's code.", "code")
        total("vanished", "Clients that went away with requests in flight.")
        total("handshakes_refused", "Connections that did not speak ZMTP, or lacked a key.")
        total("discarded", "Messages discarded unread, and told so.")
        for name, text in (("clients", "Clients now."), ("requests_in_flight", "Requests in flight now.")):
            self._made[name] = Gauge(PREFIX + name, text, registry=registry, multiprocess_mode="livesum")
        for end in self.ends:
            self._made["requests"].labels(end=end)

    def count(self, name: str, by: int = 1) -> None:
        """One of SINGLE."""
        self.counts[name] += by
        if name in self._made:
            self._made[name].inc(by)

    def end(self, kind: str) -> None:
        """A terminal message."""
        self.ends[kind] += 1
        if self._made:
            self._made["requests"].labels(end=kind).inc()

    def refuse(self, code: str) -> None:
        """An `error`, of whatever kind."""
        self.refused[code] += 1
        if self._made:
            self._made["refused"].labels(code=code).inc()

    def now(self, clients: int, in_flight: int) -> None:
        """The two gauges."""
        if self._made:
            self._made["clients"].set(clients)
            self._made["requests_in_flight"].set(in_flight)

    def as_dict(self) -> dict[str, Any]:
        """JSON."""
        return {"requests": dict(self.ends), "refused": dict(self.refused), **self.counts}
