"""The only place that touches vLLM, and with it vLLM's private names.

Features are looked up, never inferred from a version number. Written for vLLM 0.20 to 0.33:
the scheduler was tried on every release of them (tests/benchmarks/vllm_versions.py), engines on
0.20.2, 0.26.0, 0.28.0, 0.31.0 and 0.32.0. Whatever is missing in another version is missing
here, in one place, with a message that names it.
"""
