"""Topics and payloads: msgpack between our own processes, JSON wherever an outside tool reads."""
