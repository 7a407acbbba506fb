"""Three ways to end a request early; the server stops computing each time: python examples/zmq_abort.py [ENDPOINT]"""

import sys
import time

from glm_runtime.client import Client, TooLate

endpoint = sys.argv[1] if len(sys.argv) > 1 else "tcp://127.0.0.1:5557"
long = {"max_new_tokens": 20_000, "ignore_eos": True}

with Client(endpoint) as client:
    # Leave the loop.
    for count, _ in enumerate(client.stream("one", **long)):
        if count == 3:
            break
    # Close the stream.
    with client.stream("two", **long) as stream:
        print("first piece of the second:", repr(next(stream).text))
    # Let it run out of time: a request that does not stream makes no progress that a client sees.
    client.timeout = 1.0
    try:
        client.generate("three", **long)
    except TooLate as late:
        print("the third:", late)
    client.timeout = 60.0
    deadline = time.monotonic() + 10
    while (stats := client.stats())["in_flight"] and time.monotonic() < deadline:
        time.sleep(0.01)
    print("in flight now:", stats["in_flight"], "- aborted so far:", stats["requests"]["aborted"])
