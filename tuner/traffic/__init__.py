"""Recorded traffic: read it, describe it, reshape it.

`traces` holds a recording as columns; `formats` and `prometheus` read one. `describe` and
`sketch` sum one up, `windows` and `reshape` cut and change it, `prompts` and `prefixes` give
its requests tokens; `concurrency` and `sampling` serve these.
"""
