"""What may be set beside the two limits: which knobs there are, and which of them pay."""
