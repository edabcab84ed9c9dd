"""The measurements of `paramstore bench`: the service beside the limits of the machine it runs on, in the same run."""
