"""The ZMQ gateway: a second, public front of the server, beside HTTP and fed by the same TokenizerManager.

    DEALER ──[tag, message]──> ROUTER (server.py) ─> protocol.py: decode, check ─> engine.py ─> TokenizerManager
    DEALER <─[tag, message]─── outbox of that client (session.py) <─ answer.py: deltas, one terminal <─┘

    protocol.py  messages and their bytes          session.py  what waits for one client, bounded
    answer.py    SGLang's outputs as messages      server.py   the socket on the event loop
    listen.py    endpoints, bound before launch    keys.py     CURVE keys
    flags.py     limits                            engine.py, mount.py   the two modules that know SGLang

Nothing that a peer sends is ever unpickled or handed on as bytes: SGLang's own sockets, which speak pickle, stay
private. The wire is described in docs/zmq-protocol.md; `glm_runtime.client` speaks it.
"""
