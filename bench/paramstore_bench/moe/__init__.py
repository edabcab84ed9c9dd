"""What the bench of expert-parallel layers needs: the ranks, what each of them does, and the judgement of what they found."""
