"""Subscriber that prints failures and recoveries of the cluster that FTD_BROKER and FTD_CLUSTER name."""

import json
import os
from collections import deque
from urllib.parse import unquote, urlsplit

from paho.mqtt.client import CallbackAPIVersion, Client

seen = deque(maxlen=10_000)


def on_message(_client, _data, message):
    event = json.loads(message.payload)
    if event["id"] not in seen and (event["severity"] != "info" or event["event"] == "RecoveryCompleted"):
        print(event["at"], event["severity"], event["event"], event["reason"], sep="  ", flush=True)
    seen.append(event["id"])


topic = f"ftd/v2/{os.environ.get('FTD_CLUSTER', 'ftd')}/events"
client = Client(CallbackAPIVersion.VERSION2)
client.on_connect = lambda *_: client.subscribe(topic, qos=1)
client.on_message = on_message
broker = urlsplit(os.environ.get("FTD_BROKER", "mqtt://localhost:1883"))
if broker.username:
    client.username_pw_set(unquote(broker.username), unquote(broker.password or ""))
if secure := broker.scheme == "mqtts":
    client.tls_set()
client.connect(broker.hostname, broker.port or (8883 if secure else 1883))
client.loop_forever()
