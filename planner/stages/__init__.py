"""Time under 1F1B and memory of stages and of the pipelines that consist of them."""
