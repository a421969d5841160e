"""Generates load in separate processes: schedules and sends requests over HTTP/2 connections, and records their latencies."""
