"""What a soak is made of: a server process, clients that check every answer, mischief, and measurements."""
