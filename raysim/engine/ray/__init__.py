"""Hosts and the driver as Ray actors, on one machine or a cluster. But for the search in `raysim.sweep.tune`, only this
package imports Ray."""
