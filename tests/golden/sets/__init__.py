"""One module per set, named as the set, with ``check(case) -> str | None`` (None: passed, else what differed)."""
