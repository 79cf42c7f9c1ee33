"""Calibrate on a live engine: blocks of the traffic, for whom they are, and what they teach."""
