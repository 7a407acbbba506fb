"""pip install with few lines: the big downloads, a sign of life every 15 s, and pip's own words on failure.

python scripts/install.py ARGUMENTS-OF-PIP-INSTALL...
"""

from __future__ import annotations

import collections
import importlib.util
import queue
import re
import subprocess
import sys
import threading
import time
from typing import IO

SIGN_OF_LIFE_S = 15.0
SHOWN_MB = 20.0
KEPT_LINES = 40
WIDTH = 90


def feed(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    """Moves lines of ``stream`` to ``lines``; None marks the end."""
    for line in stream:
        lines.put(line.rstrip())
    lines.put(None)


def size_mb(words: str) -> float:
    """MB that a ``Downloading name (373.0 MB)`` line of pip names; 0 for every other line."""
    found = re.fullmatch(r"Downloading .*\(([\d.]+) (kB|MB|GB)\)", words)
    return float(found[1]) * {"kB": 1e-3, "MB": 1.0, "GB": 1e3}[found[2]] if found else 0.0


def activity(words: str) -> str | None:
    """What a line of pip's says it is doing, cut to one line of ours; None where it says nothing new."""
    if words.startswith("Installing collected"):
        return f"unpacking {words.count(',') + 1} packages"
    return words[:WIDTH] if words.startswith(("Downloading", "Building", "Collecting")) else None


def main(arguments: list[str]) -> int:
    """Runs pip with this interpreter; returns its exit code."""
    if importlib.util.find_spec("sglang") is None:
        print("first installation: SGLang with torch and its GPU libraries, several GB and some minutes", flush=True)
    begin = told = time.monotonic()
    command = [sys.executable, "-m", "pip", "install", "--progress-bar", "off", "--disable-pip-version-check"]
    command += arguments
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    assert child.stdout is not None
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=feed, args=(child.stdout, lines), daemon=True).start()
    kept: collections.deque[str] = collections.deque(maxlen=KEPT_LINES)
    doing, files = "looking up packages", 0
    try:
        while True:
            shown = False
            try:
                line = lines.get(timeout=1.0)
            except queue.Empty:
                pass
            else:
                if line is None:
                    break
                kept.append(line)
                words = line.strip()
                files += words.startswith(("Downloading", "Using cached"))
                doing = activity(words) or doing
                shown = words.startswith("Installing collected") or size_mb(words) >= SHOWN_MB
            if shown or time.monotonic() - told > SIGN_OF_LIFE_S:
                told = time.monotonic()
                print(f"  {told - begin:4.0f} s  {files:3d} files  {doing}", flush=True)
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
