"""One run from facts to decision, with an engine or without."""
