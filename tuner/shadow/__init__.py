"""vLLM's scheduling, compiled, with predicted step times; vLLM's own beside it to compare."""
