"""How load is spread over the ranks of a job: tokens counted, an expert's tokens over its ranks, the rows of several tasks."""
