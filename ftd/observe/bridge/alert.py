"""Renders an event as the JSON that Alertmanager posts to webhooks (version 4), which many receivers
understand.
"""

from typing import Any

from ftd.transport.wire.public import EventMessage, encode_json

_NEVER = "0001-01-01T00:00:00Z"
"""Alertmanager's value for an alert that has not ended; an event has no end."""


def build_alert(event: EventMessage, cluster: str) -> dict[str, Any]:
    """Return one group with one alert. Its ``fingerprint`` is the event's id, by which receivers recognise
    repetitions.
    """
    labels = {"alertname": event.event, "severity": event.severity, "cluster": cluster, "job": "ftd"}
    if event.node:
        labels["node"] = event.node
    fields = {
        "summary": event.reason,
        "cause": event.cause,
        "generation": event.generation,
        "step": event.step,
        "details": encode_json(event.details).decode(),
    }
    annotations = {name: str(value) for name, value in fields.items() if value is not None}
    return {
        "version": "4",
        "groupKey": f"{cluster}/{event.event}/{event.node or ''}",
        "truncatedAlerts": 0,
        "status": "firing",
        "receiver": "ftd",
        "groupLabels": {"alertname": event.event},
        "commonLabels": labels,
        "commonAnnotations": annotations,
        "externalURL": "",
        "alerts": [
            {
                "status": "firing",
                "labels": labels,
                "annotations": annotations,
                "startsAt": event.at,
                "endsAt": _NEVER,
                "generatorURL": "",
                "fingerprint": event.id,
            }
        ],
    }
