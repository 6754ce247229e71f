"""Mutated inputs in bulk: ``python -m tests.fuzz --mp4 20000 --sidecar 5000 --seed 0``.

Every case is a pure function of its kind and number, so that one that fails can be run again alone. The
test suite runs a few hundred of the same cases (`tests/fuzz/test_fuzz.py`).
"""
