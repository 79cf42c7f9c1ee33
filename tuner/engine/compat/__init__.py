"""The only place that touches vLLM, and with it vLLM's private names.

Features are looked up, never inferred from a version number. Written for vLLM 0.20 to 0.33:
tried on 0.32.0, read in the sources of 0.20.2 and 0.33.0. Whatever is missing in another
version is missing here, in one place, with a message that names it.
"""
