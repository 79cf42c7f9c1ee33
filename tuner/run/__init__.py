"""One tuning run: calibrate, search, race, confirm, decide, keep everything on disk."""
