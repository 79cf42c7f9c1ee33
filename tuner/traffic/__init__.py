"""Recorded traffic: read it, describe it, reshape it."""
