"""Which provider would run which node, and what moves between them."""
