"""Subscriber that prints failures and recoveries of a cluster: python examples/subscriber.py [HOST [PORT]]"""

import json
import sys
from collections import deque

from paho.mqtt.client import CallbackAPIVersion, Client

seen = deque(maxlen=1000)


def on_message(_client, _data, message):
    event = json.loads(message.payload)
    if event["id"] not in seen and (event["severity"] != "info" or event["event"] == "RecoveryCompleted"):
        print(event["at"], event["severity"], event["event"], event["reason"], sep="  ", flush=True)
    seen.append(event["id"])


client = Client(CallbackAPIVersion.VERSION2)
client.on_connect = lambda *_: client.subscribe("ftd/v2/ftd/events", qos=1)
client.on_message = on_message
client.connect(sys.argv[1] if len(sys.argv) > 1 else "localhost", int((sys.argv[2:] or [1883])[0]))
client.loop_forever()
