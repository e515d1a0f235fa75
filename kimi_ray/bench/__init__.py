"""Benches: every number that the design promises, measured through the public API, against a floor of the same run.

What may enter: workloads, floors, meters. A bench checks what it measured and reports; it decides nothing.
"""
