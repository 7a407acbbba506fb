"""Property tests of this folder run without a per-example deadline: time is measured in benchmarks, not in tests."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
