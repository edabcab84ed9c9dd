"""What the bench of guesses needs: a trained model of real size, a slow volume, and the judgement of its pairs."""
