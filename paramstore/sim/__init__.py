"""The policy lab: replays recorded traces through planner and policies, and Belady's optimum, without moving a byte."""
