"""An event as the JSON that Alertmanager posts to a webhook (version 4), which many receivers understand."""

from typing import Any

from ftd.transport.wire.public import EventMessage, encode_json

_NEVER = "0001-01-01T00:00:00Z"
"""Alertmanager's word for an alert that has not ended: an event is a fact, and has no end."""


def alert_body(event: EventMessage, cluster: str) -> dict[str, Any]:
    """One group of one alert; ``fingerprint`` is the event's id, so that one sent twice is known by it."""
    labels = {"alertname": event.event, "severity": event.severity, "cluster": cluster, "job": "ftd"}
    if event.node:
        labels["node"] = event.node
    told = {
        "summary": event.reason,
        "cause": event.cause,
        "generation": event.generation,
        "step": event.step,
        "details": encode_json(event.details).decode(),
    }
    annotations = {name: str(value) for name, value in told.items() if value is not None}
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
