"""What measuring programs and soaks share: a server process, models with known answers, clients that check them, counts."""
