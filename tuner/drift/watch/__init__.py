"""A watch over a configuration in use: notice shifted traffic, re-tune, hand over, guard.

`policy` says when to act, `state` remembers it through any death of the process, `sampling`
and `live` ask Prometheus, `publish` writes the file, `hook` hands it over, `guard` takes it
back if it does worse than was foretold, `loop` puts them together, `health` shows it.
"""
