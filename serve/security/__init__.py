"""Who may talk to the server, what they may ask for, and how much of it. What is off costs requests nothing."""
