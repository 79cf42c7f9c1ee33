# sh serve.sh
# tuned 2026-11-22 on 233 requests of translation.jsonl (sha256 b069b002…), busiest 87 s to 91 s (4 of 120 s)
# vLLM 0.32.0, CPU (2 cores, x86_64), 13 settings replayed in the shadow, measured live, 4 rounds in turns, confirmed on engines started cold
# against the current max-num-seqs 8, max-num-batched-tokens 2048:
#   e2e_p95          11.1 s -> 4.82 s   (-54.3%, interval -67.6% … -35.5%)
#   e2e_p50          5.97 s -> 2.17 s   (-63.3%, interval -66.4% … -59.9%)
#   ttft_p95         10.4 s -> 0.327 s   (-96.7%, interval -99.4% … -81.7%)
#   tpot_p50         0.00624 s -> 0.0307 s   (+410.4%, interval +310.6% … +534.5%)
#   decode_step_p50  0.00561 s -> 0.0111 s   (+108.4%, interval +51.6% … +186.4%)
#   requests_per_s   14.7/s -> 33.1/s   (+116.9%, interval +65.6% … +184.0%)
#   output_tokens_per_s 1,229/s -> 2,763/s   (+116.9%, interval +65.6% … +184.0%)
# offered 58/s, finished 33/s: overloaded 1.5 x
# gpu_cache_usage_perc (kv_cache_usage_perc) peak 0.08, no preemption
# limited by: the load, 1.5 x what it can sustain
# capacity at the SLOs: holds up to 0.67 x today's load (the current one 0.28 x), predicted and confirmed live
# caveat: the engine did not keep up with the load
# caveat: the window is too small for a p99: fewer than ten requests exceed it
# caveat: the best value lies at the edge of what was searched
# caveat: a window of the trace was replayed, not all of it
# evidence: examples/demo/run
vllm serve tuner/demo_model \
  --served-model-name=demo \
  --load-format=dummy \
  --enforce-eager \
  --kv-cache-memory-bytes=1073741824 \
  --max-num-seqs=128 \
  --max-num-batched-tokens=512
