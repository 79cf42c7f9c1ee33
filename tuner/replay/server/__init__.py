"""A configuration tried on the real API server, over HTTP and in real time.

A replay inside the engine's process leaves out the HTTP server and the asynchronous front end;
here their share is measured. `process` starts the server, `client` replays over HTTP, `scrape`
reads the server's metrics meanwhile, `comparison` sets the result against the prediction.
"""
