"""Election of the leading coordinator: one pure machine in each coordinator."""
