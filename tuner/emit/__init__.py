"""What the recommendation is written as: one module for each deployment target."""
