"""Ten clients with ten requests each, on one event loop: python examples/zmq_many_clients.py [ENDPOINT]"""

import asyncio
import sys
import time

from glm_runtime.client import AsyncClient

ENDPOINT = sys.argv[1] if len(sys.argv) > 1 else "tcp://127.0.0.1:5557"
CLIENTS, REQUESTS = 10, 10


async def one_client(number: int) -> int:
    """Tokens that this client got, streamed."""
    tokens = 0

    async def one_request(place: int) -> None:
        nonlocal tokens
        async for delta in client.stream(f"client {number}, request {place}", max_new_tokens=8, ignore_eos=True):
            tokens += len(delta.output_ids)

    async with AsyncClient(ENDPOINT) as client:
        await asyncio.gather(*(one_request(place) for place in range(REQUESTS)))
    return tokens


async def main() -> None:
    begin = time.perf_counter()
    tokens = sum(await asyncio.gather(*(one_client(number) for number in range(CLIENTS))))
    seconds = time.perf_counter() - begin
    print(f"{CLIENTS * REQUESTS} requests, {tokens} tokens in {seconds:.2f} s")


asyncio.run(main())
