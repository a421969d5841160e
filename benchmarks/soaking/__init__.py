"""Parts of a soak: a server process, clients that check every answer, injected faults, and measurements."""
