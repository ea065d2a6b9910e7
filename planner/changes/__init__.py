"""After a change: which layouts there are, which of them pays, who takes which place, what moves."""
