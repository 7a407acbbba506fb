"""The live switch: one scheduler process that can plan by either scheduler, and changes between two steps.

Reading order: flags (what the operator says), wire (what travels to the scheduler processes), state (who plans, and who
is to plan next), arms (what each has done so far), scheduler (the adapter: SGLang's Scheduler with both ways in it).
All but the last are pure: no torch, no SGLang.
"""
