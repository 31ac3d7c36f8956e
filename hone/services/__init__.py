"""HTTP between processes of a run and services: one client and one server, both with limits."""
