"""Small stores, planners, ranks and volumes in a few calls, for the tests of the engine's parts."""
