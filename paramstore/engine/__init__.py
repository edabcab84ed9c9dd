"""The store: plan, run, settle. The planner decides on the event loop; workers move bytes; settling is again plain code."""
