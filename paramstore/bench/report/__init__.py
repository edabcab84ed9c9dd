"""What a run tells: its rows and their verdicts, the machine, and both as a table or a picture."""
