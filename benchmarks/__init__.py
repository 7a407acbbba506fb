"""Programs that measure. Each takes ``--json FILE`` and ``--quick`` and ends with one ``ASK`` line per ask."""
