"""Authentication, authorization, TLS and limits of clients. Features that are off add no cost to requests."""
