"""MQTT, the messages that travel on it, and the clients and servers that use it."""
