"""Protection of scripts by one line: of the trainers of several libraries, and of loops over a data loader."""
