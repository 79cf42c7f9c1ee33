"""A trace through an engine, on time: instants in, metrics out; in process or over HTTP."""
