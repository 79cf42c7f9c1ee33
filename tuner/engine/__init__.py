"""The engines behind one protocol: vLLM itself, and what its steps did.

`serve_config` reads the user's configuration, `protocol` is what an engine promises, `live` is
a real vLLM, `compat` the only place that touches vLLM's private names; `limits`, `shape` and
`steps` are the values they exchange.
"""
