"""What a profile predicts of traffic at several loads: every setting, gates, clients."""
