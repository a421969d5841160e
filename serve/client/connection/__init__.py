"""How a server is reached: where it is, who both are, what its errors mean."""
