"""Find the max_num_seqs and max_num_batched_tokens that suit a recorded workload.

`tune --trace prod.jsonl` replays the trace against vLLM in its own process and writes the
configuration that `vllm serve --config` takes. The version stands in the package's metadata.
"""
