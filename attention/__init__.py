"""Sparse attention of GLM-MoE-DSA: cache layouts, lightning indexer, sparse MLA, and the kernels below them.

sizes, layouts, batch,     what memory looks like
scratch
indexer/                   which keys a query row reads
paged, workspace_slot,     how it reads them; workspace and topk_remap plan the second, dense is the short cut
dense
kernels/                   the arithmetic, one file a machine
"""
