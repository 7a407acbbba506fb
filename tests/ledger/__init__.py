"""Tests of the ledger scheduler in running servers."""
