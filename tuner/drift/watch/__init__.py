"""A watch over a configuration in use: notice shifted traffic, re-tune, hand over, guard.

`loop` is the watch itself, `policy` says when to act, `handover` rolls a change out and back,
`publish` writes the file, `guard` judges a change, `state` keeps all of it on disk through any
death of the process, `health` shows it over HTTP.
"""
