"""What the bench of decoding needs: the runs and their judgement, the prompt under which a ring hides its loads, and the peers."""
