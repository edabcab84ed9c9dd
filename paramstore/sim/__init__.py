"""The policy lab: recorded traces against planner, policies and Belady's optimum, without a byte moved."""
