"""Pages that a command writes for people: one stylesheet, tables, and charts as SVG. They need no other host and no script."""
