"""Which coordinator leads: one pure machine in each of them."""
