"""Durable state: what a coordinator must know again after SIGKILL, as its journal has it."""
