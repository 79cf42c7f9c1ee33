"""Pure decisions: what better means, what to measure next, who has won."""
