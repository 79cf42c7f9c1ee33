"""A configuration tried on the real API server, over HTTP and in real time.

What a replay inside the engine's process cannot see is what the HTTP server and the
asynchronous front end add; here it is measured beside what was predicted.
"""

from __future__ import annotations
