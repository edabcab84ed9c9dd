"""The daemon on a simulated machine with simulated clients, whose every event a seed orders."""
