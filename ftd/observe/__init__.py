"""Reports, live view, dashboard, metrics and tracking, all made from a cluster's public events and states."""
