"""What a profile predicts of traffic at several loads: settings, gates, clients, fleets."""
