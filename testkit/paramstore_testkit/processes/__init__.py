"""Daemons, trainers, ranks and clients in processes of their own: started, killed at named points, never left behind."""
