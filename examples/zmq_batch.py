"""Many prompts at once over one connection: python examples/zmq_batch.py [ENDPOINT]"""

import sys

from glm_runtime.client import Client

endpoint = sys.argv[1] if len(sys.argv) > 1 else "tcp://127.0.0.1:5557"
prompts = [f"Tell me about the number {number}." for number in range(20)]

with Client(endpoint, encoding="msgpack") as client:
    results = client.batch(prompts, max_new_tokens=8, temperature=0)
    for prompt, result in zip(prompts, results, strict=True):
        print(f"{prompt} -> {result.text!r} ({result.meta_info['prompt_tokens']} prompt tokens)")
