"""The MQTT session that every part uses, and brokers for one machine: embedded amqtt, or mosquitto."""
