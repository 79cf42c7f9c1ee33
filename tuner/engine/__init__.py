"""The engines behind one protocol: vLLM itself, and what its steps did."""
