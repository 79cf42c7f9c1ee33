"""A simulator that runs vLLM's own scheduler with predicted step times."""
