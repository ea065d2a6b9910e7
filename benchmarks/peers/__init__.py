"""Systems that ftd is compared with, each trained on the same model in the same run."""
