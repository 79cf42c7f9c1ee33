"""Other configurations of the engine that need a start of their own, beside the one that is."""
