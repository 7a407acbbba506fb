"""The lightning indexer: which keys a query row reads, and how the scoring of them is cut.

score(t, s) = sum_h w[t, h] * relu(q[t, h] . k[s])          ids(t) = the topk best s <= t, ascending
"""
