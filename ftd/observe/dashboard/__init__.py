"""The dashboard: a web page that shows what the coordinator publishes, live."""
