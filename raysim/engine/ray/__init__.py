"""Hosts and the driver as Ray actors, on one machine or a cluster."""
