"""Whether traffic has moved, whether a re-tune would pay, and keeping it tuned."""
