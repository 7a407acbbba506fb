"""Sparse attention of GLM-MoE-DSA: cache layouts, lightning indexer, sparse MLA, and the kernels below them.

layouts, batch, scratch    what memory looks like
indexer/                   which keys a query row reads
paged, workspace, dense    how it reads them
kernels/                   the arithmetic, one file a machine
"""
