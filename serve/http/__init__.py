"""HTTP beside gRPC: KServe v2's REST interface, metrics, and a page for people."""
