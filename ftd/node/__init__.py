"""The ``ftd node`` daemon of one host: its trainers, its rendezvous server and its connection to the broker."""
