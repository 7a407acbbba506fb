"""Stream one answer over ZMQ: python examples/zmq_stream.py [ENDPOINT] [PROMPT]"""

import sys

from glm_runtime.client import Client

endpoint = sys.argv[1] if len(sys.argv) > 1 else "tcp://127.0.0.1:5557"
prompt = sys.argv[2] if len(sys.argv) > 2 else "The way of a request"

with Client(endpoint) as client:
    stream = client.stream(prompt, max_new_tokens=32, temperature=0)
    for delta in stream:
        print(delta.text, end="", flush=True)
    print()
    result = stream.result
    assert result is not None
    print(f"{len(result.output_ids)} tokens, {result.finish_reason['type']}", file=sys.stderr)
