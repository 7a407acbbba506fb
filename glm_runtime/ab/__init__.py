"""A/B of policies on one workload: which serves it better, and do they answer the same?

arms ──┐                       ┌─> compare  same tokens? where not: noise or a real difference
asks ──┴─> rounds A B A B ... ─┼─> figures  latencies, throughput, goodput, with paired intervals
          (runner.py)          └─> steps    what each step of each server did, on one time axis
                                   report/  terminal, HTML, CSV, JSON, Perfetto
"""
