"""`python -m glm_runtime.client "prompt"`: an answer of the ZMQ gateway, streamed to the terminal."""

from __future__ import annotations

import argparse
import sys

from glm_runtime.client import Client, ClientError, Lost
from glm_runtime.client.sync import DEFAULT
from glm_runtime.ending import fail
from glm_runtime.errors import ConfigError


def main(argv: list[str] | None = None) -> None:
    """Stream one answer. Exit code 1 where there is none, 2 for bad arguments."""
    parser = argparse.ArgumentParser(prog="python -m glm_runtime.client", description="Ask the ZMQ gateway.")
    parser.add_argument("prompt", nargs="?", help="the prompt; without it, standard input")
    parser.add_argument("--endpoint", default=DEFAULT, help=f"the server's --zmq-endpoint (default {DEFAULT})")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T")
    parser.add_argument("--stop", action="append", metavar="TEXT")
    parser.add_argument("--chat", action="store_true", help="send it as a user's chat message")
    parser.add_argument("--key-file", metavar="FILE", help="CURVE: own NAME.key_secret")
    parser.add_argument("--server-key", metavar="FILE", help="CURVE: the server's NAME.key")
    given = parser.parse_args(argv)
    text = given.prompt if given.prompt is not None else sys.stdin.read()
    sampling = {"max_new_tokens": given.max_new_tokens, "temperature": given.temperature}
    if given.stop:
        sampling["stop"] = given.stop
    try:
        with Client(given.endpoint, key_file=given.key_file, server_key=given.server_key) as client:
            prompt = [{"role": "user", "content": text}] if given.chat else text
            for delta in client.stream(prompt, **sampling):
                print(delta.text, end="", flush=True)
            print()
    except (ConfigError, ValueError) as error:
        fail(error)
    except Lost as error:
        fail(f"--endpoint {given.endpoint}: {error}; was the server started with --zmq-endpoint?", code=1)
    except ClientError as error:
        fail(error, code=1)
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
