"""Servers on many machines that answer as one.

A controller knows the members and decides what each of them serves. Beside each server an agent starts it, reports to the
controller and carries out its orders. Clients speak to the servers directly: no tensor passes through agent or controller.
"""
