"""Clients of the ZMQ gateway: `Client` blocks, `AsyncClient` is for asyncio. Neither torch nor SGLang is imported.

python -m glm_runtime.client "prompt"     streams an answer to the terminal
"""

from glm_runtime.client.aio import AsyncClient, AsyncStream
from glm_runtime.client.results import Aborted, Choice, ClientError, Delta, Lost, Refused, Result, TooLate
from glm_runtime.client.sync import Client, Stream

__all__ = [
    "Aborted",
    "AsyncClient",
    "AsyncStream",
    "Choice",
    "Client",
    "ClientError",
    "Delta",
    "Lost",
    "Refused",
    "Result",
    "Stream",
    "TooLate",
]
