"""What a model will need and do under a set of flags, before anything is started.

    python -m glm_runtime.plan --model glm-5.3 --gpus 8xH200 --tp-size 8 --context 1048575

    shapes, devices ─┐
    flags ───────────┴> Setup ─> timeline (the ledger) ─> chunks, ranks, traffic, size ─> cost ─> advice ─> report

Every count comes from the function that serves: the ledger's core, `attention.indexer.split`, `attention.workspace`,
`parallel.*`, `glm_runtime.memory`. Every time comes from `cost.py` and is labelled a model.
"""
