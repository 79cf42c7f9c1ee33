"""Recording what a live vLLM server is asked, as a trace that `tune` reads.

Two doors lead in. vLLM loads `plugin` by itself where this package is installed: it brings the
exact token counts and latencies of every finished request. `vllm serve --middleware
tuner.recorder.TraceRecorder` adds which prompts share a prefix, and the requests whose client
went away; `tap` reads for it. Their `messages` go to the one `recorder`, which joins
them (`join`, `open_prompts`, `blocks`) into `rows` and writes files (`segments`) as `settings`
say; `faults` keeps what fails from the server. Both doors do nothing unless TUNE_RECORD names a
file.

No text, no token and no name is kept: of a prompt its length and keyed hashes of its blocks, of
an identifier a keyed hash. The key is random, lives in memory and ends with the server.
"""

from __future__ import annotations

from tuner.recorder.middleware import TraceRecorder

__all__ = ["TraceRecorder"]
