"""``ftd bridge``: events handed on to a webhook."""
