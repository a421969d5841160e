"""What a soak is made of: a server process, clients that check every answer, injected faults, and measurements."""
