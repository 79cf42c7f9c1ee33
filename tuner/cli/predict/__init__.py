"""What a profile predicts of traffic at several loads: `tune plan` and `tune explore`."""
