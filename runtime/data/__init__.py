"""The data set's samples as batches: which ones a step uses, reading them in worker processes, collating."""
