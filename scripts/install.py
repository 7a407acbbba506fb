"""pip install with few lines: what is fetched and how big, a sign of life every 15 s, and pip's own words on failure.

python scripts/install.py ARGUMENTS-OF-PIP-INSTALL...
"""

from __future__ import annotations

import collections
import importlib.util
import queue
import subprocess
import sys
import threading
import time
from typing import IO

SIGN_OF_LIFE_S = 15.0
KEPT_LINES = 40
WIDTH = 100


def feed(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    """Moves lines of ``stream`` to ``lines``; None marks the end."""
    for line in stream:
        lines.put(line.rstrip())
    lines.put(None)


def main(arguments: list[str]) -> int:
    """Runs pip with this interpreter; returns its exit code."""
    if importlib.util.find_spec("sglang") is None:
        print("first installation: SGLang with torch and its GPU libraries, several GB and some minutes", flush=True)
    begin = time.monotonic()
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--progress-bar",
        "off",
        "--disable-pip-version-check",
        *arguments,
    ]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    assert child.stdout is not None
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=feed, args=(child.stdout, lines), daemon=True).start()
    kept: collections.deque[str] = collections.deque(maxlen=KEPT_LINES)
    doing = "looking up packages"
    try:
        while True:
            try:
                line = lines.get(timeout=SIGN_OF_LIFE_S)
            except queue.Empty:
                print(f"  {time.monotonic() - begin:4.0f} s  still {doing}", flush=True)
                continue
            if line is None:
                break
            kept.append(line)
            words = line.strip()
            if words.startswith(("Downloading", "Building")):
                doing = words[:WIDTH]
                print(f"  {time.monotonic() - begin:4.0f} s  {doing}", flush=True)
            elif words.startswith("Installing collected"):
                doing = f"unpacking {words.count(',') + 1} packages"
                print(f"  {time.monotonic() - begin:4.0f} s  {doing}", flush=True)
            elif words.startswith("Collecting"):
                doing = f"looking up {words.removeprefix('Collecting ')}"[:WIDTH]
        code = child.wait()
    except KeyboardInterrupt:
        child.terminate()
        child.wait()
        return 130
    if code:
        print("\n".join(kept))
        print(f"pip install {' '.join(arguments)} failed with code {code}; its last lines stand above")
        return code
    print(f"installed {' '.join(arguments)} in {time.monotonic() - begin:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
