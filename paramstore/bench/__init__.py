"""What `paramstore bench` measures: the service beside the limits of the machine it runs on, in the same run."""
