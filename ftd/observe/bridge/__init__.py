"""``ftd bridge``: sends events to a webhook."""
