"""A policy on a recorded trace, without a model: who would wait how long, on how many machines.

python -m glm_runtime.simulate --trace T --policy vllm-ledger --model glm-5.3 --gpus 8xH200 --tp-size 8

trace ─> router ─> Replica ─┬─ LedgerSide   the server's own ledger over the KV port of its server
                            ├─ StockSide    SGLang's prefill-first scheduler, modelled
                            ├─ PrefixTree   SGLang's page pool and radix cache, in counts of pages
                            └─ cost         a step's time: the planner's model, or one fitted to a step log
"""
