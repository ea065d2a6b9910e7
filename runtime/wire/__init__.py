"""What processes say to each other. No torch in here: the daemons import it."""
