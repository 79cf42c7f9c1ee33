"""A trace through an engine, on time: instants in, metrics out; in process or over HTTP.

`plan` says how to replay and `arrivals` when requests go; `loop` replays and notes the instants
in a `timeline`; `metrics`, `load`, `slo` and `series` say what they amount to; `process` holds
the engine's own process and `runner` measures configurations on it. `server` does the same over
HTTP.
"""
